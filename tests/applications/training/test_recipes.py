"""Recipes: the authors' settings, and schedules of the learning rate."""

import dataclasses
import math
import pathlib
import re

import keras
import numpy as np
import pytest
from keras import ops
from recipe_helpers import tensors

from keras_equiattn import applications
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import optimizers
from keras_equiattn.applications.training import recipes
from keras_equiattn.convert.from_att_gconvs import att_gconvs_parts


def test_step_schedule():
    schedule = optimizers.StepSchedule(1.0, [6, 8], 0.1, warmup_steps=4)
    rates = [float(ops.convert_to_numpy(schedule(s))) for s in range(10)]
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    copy = optimizers.StepSchedule.from_config(schedule.get_config())
    assert copy.get_config() == schedule.get_config()
    with pytest.raises(ValueError, match="`milestones` must increase"):
        optimizers.StepSchedule(1.0, [8, 6])


def test_recipe_makes_its_optimizer():
    recipe = dataclasses.replace(
        recipes.get_recipe("rotmnist_p4cnn"),
        optimizer="sgd",
        momentum=0.9,
        nesterov=True,
        milestones=(2, 3),
        warmup_epochs=1,
    )
    optimizer = recipes.make_optimizer(recipe, steps_per_epoch=2)
    assert isinstance(optimizer, optimizers.CoupledSGD)
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)
    variable = keras.Variable(np.zeros(1, "float32"))
    rates = []
    for _ in range(8):
        rate = ops.convert_to_numpy(optimizer.learning_rate)
        rates.append(float(rate) / recipe.learning_rate)
        optimizer.apply(tensors([np.zeros(1)]), [variable])
    expected = [0.5, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_rotmnist_recipe_is_the_authors():
    recipe = recipes.get_recipe("rotmnist_p4cnn")
    optimizer = recipes.make_optimizer(recipe, steps_per_epoch=94)
    assert isinstance(optimizer, optimizers.CoupledAdam)
    config = optimizer.get_config()
    assert config["learning_rate"] == pytest.approx(1e-3)
    assert (config["beta_1"], config["beta_2"]) == (0.9, 0.999)
    assert (config["epsilon"], config["decay"]) == (1e-8, 1e-4)
    assert config["weight_decay"] is None
    assert (recipe.dataset, recipe.batch_size) == ("rot_mnist", 128)
    assert (recipe.epochs, recipe.validation_size) == (100, 2000)
    assert not recipe.milestones
    assert (recipe.padding, recipe.flip) == (0, False)
    assert recipes.get_recipe("rotmnist_z2cnn").epochs == 300


@pytest.mark.once
@pytest.mark.parametrize(
    "attention", [None, "input", "co", "full", "spatial", "channel"]
)
def test_kernels_learn_with_the_factors_of_the_authors(attention):
    """The converter's factors, unless a normalisation cancels them."""
    name = "_".join(["rotmnist_p4cnn", *([attention] if attention else [])])
    model = applications.get_model(name)
    optimizer = recipes.make_optimizer(recipes.get_recipe(name), 1)
    optimizer.build(model.trainable_variables)
    # Attention on responses sees them without the factor, so that it scales the
    # output alone, and batch normalisation cancels it.
    on_responses = attention in ("full", "spatial", "channel")
    expected = {
        part.variable.path: part.factor
        for part in att_gconvs_parts(model).values()
        if part.variable.path.startswith("conv7/")
        or not (on_responses or part.variable.path.endswith("/kernel"))
    }
    assert expected["conv7/kernel"] == math.pi / 2
    for variable in model.trainable_variables:
        factor = expected.get(variable.path, 1.0)
        assert optimizer._factor_of(variable) == pytest.approx(factor)


@pytest.mark.once
def test_other_groups_learn_without_factors():
    for name in ("rotmnist_z2cnn", "rotmnist_p16cnn"):
        assert recipes.get_recipe(name).kernel_factors == ()


@pytest.mark.once
def test_cifar_recipes_are_the_authors():
    recipe = recipes.get_recipe("allcnnc_p4_input")
    assert (recipe.dataset, recipe.batch_size) == ("cifar10", 128)
    assert (recipe.optimizer, recipe.momentum) == ("sgd", 0.9)
    assert (recipe.learning_rate, recipe.weight_decay) == (0.05, 1e-3)
    assert (recipe.epochs, recipe.factor) == (350, 0.1)
    assert recipe.milestones == (200, 250, 300)
    assert recipe.normalization == "imagenet"
    assert (recipe.padding, recipe.flip) == (0, False)
    assert "0.01, 0.05, 0.1, 0.25" in recipe.source
    recipe = recipes.get_recipe("resnet44_p4m")
    assert (recipe.optimizer, recipe.momentum) == ("sgd", 0.9)
    assert (recipe.learning_rate, recipe.weight_decay) == (0.05, 0)
    assert (recipe.epochs, recipe.milestones) == (300, (50, 100, 150))


@pytest.mark.once
def test_pcam_recipe_is_the_authors():
    recipe = recipes.get_recipe("pcam_densenet_p4m_input")
    assert (recipe.dataset, recipe.batch_size) == ("pcam", 64)
    assert (recipe.optimizer, recipe.learning_rate) == ("adam", 1e-3)
    assert (recipe.weight_decay, recipe.epochs) == (1e-4, 100)
    assert (recipe.plateau_patience, recipe.plateau_factor) == (20, 0.5)
    assert recipe.normalization == "dataset"
    assert not recipe.milestones


@pytest.mark.once
@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
@pytest.mark.parametrize(
    ("model", "epochs", "milestones"),
    [
        ("resnet29_z2", 100, (50, 75)),
        ("resnet29_p4_asc", 100, (50, 75)),
        ("resnet83_p4_asc_se", 200, (100, 150)),
    ],
)
def test_recipe_of_affine_self_convolution(model, epochs, milestones, dataset):
    """The recipe that the training script takes, for both datasets."""
    options = training.TrainOptions(model, pathlib.Path("run"))
    if dataset != "cifar10":
        options = dataclasses.replace(options, dataset=dataset)
    recipe = training.resolve(options)
    info = datasets.info(recipe.dataset)
    held_out = recipe.validation_size or info.validation_size
    assert (recipe.dataset, held_out) == (dataset, 5000)
    assert (recipe.batch_size, recipe.epochs) == (128, epochs)
    assert (recipe.optimizer, recipe.momentum) == ("sgd", 0.9)
    assert recipe.nesterov
    assert (recipe.learning_rate, recipe.weight_decay) == (0.1, 1e-4)
    assert (recipe.milestones, recipe.factor) == (milestones, 0.1)
    assert recipe.warmup_epochs == 10
    # Crops from 36 x 36 pixels.
    assert (info.shape[0] + 2 * recipe.padding, recipe.flip) == (36, True)
    assert recipe.normalization == "dataset"
    schedule = recipes.learning_rate(recipe, steps_per_epoch=2)
    rates = [
        float(ops.convert_to_numpy(schedule(2 * epoch - 1)))
        for epoch in (5, 10, milestones[0], milestones[0] + 1, epochs)
    ]
    np.testing.assert_allclose(rates, [0.05, 0.1, 0.1, 0.01, 0.001], rtol=1e-5)


@pytest.mark.once
def test_recipes_of_group_self_attention():
    """Their sources say that they are recalled and not verified."""
    for name, epochs, batch_size in (
        ("gsanet_rotmnist_p4", 300, 8),
        ("gsanet_cifar10_z2m", 350, 24),
        ("gsanet_pcam_p4m", 100, 8),
    ):
        recipe = training.resolve(
            training.TrainOptions(name, pathlib.Path("run"))
        )
        assert "recalled" in recipe.source
        assert "not verified" in recipe.source
        assert (recipe.epochs, recipe.batch_size) == (epochs, batch_size)
        assert recipe.weight_decay == 1e-4
        assert recipe.cosine == (name == "gsanet_cifar10_z2m")
        rate = 0.01 if recipe.cosine else 1e-3
        assert recipe.learning_rate == rate


def test_cosine_after_warmup():
    recipe = dataclasses.replace(
        recipes.get_recipe("gsanet_cifar10_p4"), epochs=8, warmup_epochs=2
    )
    schedule = recipes.learning_rate(recipe, steps_per_epoch=2)
    rates = [float(ops.convert_to_numpy(schedule(step))) for step in range(17)]
    falling = 0.5 * (1 + np.cos(np.pi * np.arange(13) / 12))
    expected = 0.01 * np.concatenate([[0, 0.25, 0.5, 0.75], falling])
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-8)
    # A warm-up from a fraction of the rate, as ACmix's authors have it.
    start = dataclasses.replace(recipe, warmup_start=0.25)
    schedule = recipes.learning_rate(start, steps_per_epoch=2)
    rates = [float(ops.convert_to_numpy(schedule(step))) for step in range(6)]
    expected = 0.01 * np.array([0.25, 0.4375, 0.625, 0.8125, *falling[:2]])
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    # Without a warm-up the rate falls at once; in a short run it only rises.
    recipe = dataclasses.replace(recipe, warmup_epochs=0)
    schedule = recipes.learning_rate(recipe, steps_per_epoch=2)
    first, half = (float(ops.convert_to_numpy(schedule(s))) for s in (0, 8))
    np.testing.assert_allclose([first, half], [0.01, 0.005], rtol=1e-5)
    recipe = dataclasses.replace(recipe, warmup_epochs=10)
    optimizer = recipes.make_optimizer(recipe, steps_per_epoch=2)
    variable = keras.Variable(np.zeros(1, "float32"))
    for _ in range(2):
        optimizer.apply(tensors([np.ones(1)]), [variable])
    rate = float(ops.convert_to_numpy(optimizer.learning_rate))
    assert rate == pytest.approx(0.001)


def assert_as_for_imagenet(recipe):
    assert (recipe.dataset, recipe.normalization) == (
        "imagenet_folder",
        "imagenet",
    )
    assert (recipe.cosine, recipe.label_smoothing) == (True, 0.1)
    assert (recipe.resized_crop, recipe.flip, recipe.padding) == (True, True, 0)


def assert_as_for_residual_networks(recipe):
    assert_as_for_imagenet(recipe)
    assert (recipe.epochs, recipe.batch_size) == (100, 256)
    assert (recipe.optimizer, recipe.momentum) == ("sgd", 0.9)
    assert not recipe.nesterov
    assert (recipe.learning_rate, recipe.weight_decay) == (0.1, 1e-4)


@pytest.mark.once
def test_recipes_of_acmix():
    recipe = recipes.get_recipe("acmix_resnet50")
    assert recipe == recipes.get_recipe("acmix_resnet26_conv")
    assert_as_for_residual_networks(recipe)
    assert (recipe.warmup_epochs, recipe.warmup_start) == (5, 0.25)
    recipe = recipes.get_recipe("acmix_swin_small_attention")
    assert recipe == recipes.get_recipe("acmix_swin_tiny")
    assert (recipe.dataset, recipe.epochs) == ("imagenet_folder", 300)
    assert (recipe.optimizer, recipe.weight_decay) == ("adamw", 0.05)
    assert recipe.learning_rate == 5e-4 * recipe.batch_size / 512
    assert (recipe.warmup_epochs, recipe.cosine) == (20, True)
    assert recipe.warmup_start == 5e-7 / 5e-4
    assert (recipe.label_smoothing, recipe.resized_crop) == (0.1, True)
    for word in ("mixup", "CutMix", "RandAugment", "erasing", "Recalled"):
        assert word in recipe.source
    recipe = recipes.get_recipe("acmix_san19_attention")
    assert recipe == recipes.get_recipe("acmix_san10")
    for word in ("recalled", "not verified"):
        assert word in recipe.source
    assert_as_for_residual_networks(recipe)
    assert (recipe.warmup_epochs, recipe.warmup_start) == (0, 0)
    recipe = recipes.get_recipe("acmix_pvt_small_attention")
    assert recipe == recipes.get_recipe("acmix_pvt_tiny")
    for word in (
        *("recalled", "not verified"),
        *("mixup", "CutMix", "RandAugment", "erasing"),
    ):
        assert word in recipe.source
    assert_as_for_imagenet(recipe)
    assert (recipe.epochs, recipe.batch_size) == (300, 1024)
    assert (recipe.optimizer, recipe.weight_decay) == ("adamw", 0.05)
    assert recipe.learning_rate == 1e-3
    assert (recipe.warmup_epochs, recipe.warmup_start) == (5, 1e-3)
    recipe = recipes.get_recipe("acmix_swin_tiny_cifar10_attention")
    assert recipe.source.startswith("ours")
    assert (recipe.dataset, recipe.optimizer) == ("cifar10", "adamw")
    assert (recipe.padding, recipe.resized_crop) == (4, False)


@pytest.mark.once
def test_crops_need_no_padding():
    recipe = recipes.get_recipe("acmix_resnet26")
    with pytest.raises(ValueError, match="`padding` must be 0 where `resized"):
        dataclasses.replace(recipe, padding=4)


@pytest.mark.once
def test_milestones_take_the_place_of_a_warmup_from_above_zero():
    options = training.TrainOptions(
        "acmix_resnet26", pathlib.Path("run"), milestones=(80,)
    )
    recipe = training.resolve(options)
    assert (recipe.milestones, recipe.cosine) == ((80,), False)
    assert (recipe.warmup_epochs, recipe.warmup_start) == (5, 0.0)


@pytest.mark.once
def test_milestones_take_the_place_of_a_cosine():
    options = training.TrainOptions(
        "gsanet_cifar10_p4", pathlib.Path("run"), milestones=(80,)
    )
    recipe = training.resolve(options)
    assert (recipe.milestones, recipe.cosine) == ((80,), False)
    with pytest.raises(ValueError, match=r"must be \(\) where `cosine`"):
        dataclasses.replace(recipe, cosine=True)


@pytest.mark.once
@pytest.mark.parametrize(
    "change",
    [{"milestones": (50,)}, {"warmup_epochs": 1}, {"cosine": True}],
)
def test_plateau_excludes_other_changes_of_the_rate(change):
    recipe = recipes.get_recipe("pcam_densenet_p4")
    message = "`plateau_patience` must be None where .* Received: 20"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(recipe, **change)


@pytest.mark.once
def test_every_model_has_a_recipe():
    # No paper trained the U-Net; it has an example of its own. Octic vision
    # transformers are there for the weights of their authors.
    models = set(applications.list_models())
    models -= set(applications.list_models("unet*"))
    models -= set(applications.list_models("octic*"))
    assert models <= set(recipes.list_recipes())
    with pytest.raises(ValueError, match="no recipe for the model 'unet_p4'"):
        recipes.get_recipe("unet_p4")
    with pytest.raises(ValueError, match="Unknown model 'nothing'"):
        recipes.get_recipe("nothing")
    with pytest.raises(ValueError, match="Did you mean 'rotmnist_p4cnn'"):
        recipes.get_recipe("rotmnist_p4_cnn")


@pytest.mark.once
@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 0},
        {"epochs": 1.5},
        {"epochs": True},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("inf")},
        {"learning_rate": "x"},
        {"epsilon": 0.0},
        {"weight_decay": -1e-4},
        {"weight_decay": float("nan")},
        {"momentum": 1.0},
        {"momentum": None},
        {"momentum": 0.9},  # its optimizer is Adam
        {"nesterov": True},
        {"nesterov": 0},
        {"flip": "yes"},
        {"cosine": 1},
        {"warmup_start": 0.5},
        {"warmup_start": -0.1},
        {"warmup_start": 1},
        {"resized_crop": 1},
        {"label_smoothing": 1.0},
        {"label_smoothing": -0.1},
        {"label_smoothing": "x"},
        {"factor": 0.0},
        {"plateau_patience": -1},
        {"plateau_patience": 1.5},
        {"plateau_factor": 0.0},
        {"plateau_factor": 1.0},
        {"milestones": (60, 30)},
        {"milestones": (0,)},
        {"milestones": (1.5,)},
        {"milestones": 50},
        {"milestones": (50, 100)},
        {"warmup_epochs": -1},
        {"padding": -1},
        {"validation_size": 0},
        {"validation_size": 0.5},
        {"kernel_factors": (("*", -1.0),)},
        {"kernel_factors": ((3, 1.0),)},
        {"kernel_factors": ("ab",)},
        {"kernel_factors": 1.5},
        {"optimizer": "lamb"},
        {"normalization": "none"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_recipe_refuses(change):
    ((name, value),) = change.items()
    message = f"`{name}` must be .* Received: {re.escape(repr(value))}"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(recipes.get_recipe("rotmnist_p4cnn"), **change)
