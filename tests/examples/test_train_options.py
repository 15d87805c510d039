"""``examples/train.py`` refuses bad options before it loads any data."""

import dataclasses
import json
import tempfile

import keras
import pytest
from training_run import arguments

from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import recipes


@pytest.fixture
def no_data(monkeypatch):
    """Loading any data is a failure."""

    def fail(*args, **kwargs):
        pytest.fail("Data was loaded before the options were checked.")

    for name in ("load", "load_pydataset"):
        monkeypatch.setattr(datasets, name, fail)


def refusal(train, command, capsys) -> str:
    """What the script says before it gives up."""
    with pytest.raises(SystemExit) as error:
        train.main(command)
    assert error.value.code not in (None, 0)
    told = capsys.readouterr()
    return f"{error.value.code} {told.out} {told.err}"


@pytest.mark.once
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--model=tinny", "Unknown model 'tinny'. Did you mean 'tiny'?"),
        ("--dataset=digit", "Unknown dataset 'digit'. Did you mean 'digits'?"),
        ("--dataset=none.npz", "none.npz does not exist"),
        ("--epochs=0", "`epochs` must be a positive integer. Received: 0"),
        ("--epochs=two", "two"),
        ("--batch-size=0", "`batch_size` must be a positive integer"),
        ("--learning-rate=-1", "`learning_rate` must be a finite number"),
        ("--learning-rate=inf", "finite number above 0. Received: inf"),
        ("--weight-decay=-1", "`weight_decay` must be a finite number"),
        ("--padding=-1", "`padding` must be a non-negative integer"),
        ("--resized-crop=True", "`padding` must be 0 where `resized_crop`"),
        ("--label-smoothing=1", "`label_smoothing` must be a number in [0, 1)"),
        ("--dataset=no/images", "images/train does not exist"),
        ("--milestones=0", "`milestones` must be positive integers that"),
        ("--milestones=4", "less than the 4 epochs of the run"),
        ("--plateau-patience=-1", "`plateau_patience` must be a non-negative"),
        ("--validation-size=0", "`validation_size` must be None or a positive"),
        ("--seed=-1", "`seed` must be a non-negative integer. Received: -1"),
        ("--seed=4294967296", "`seed` must be less than 2**32"),
        ("--dtype-policy=float8", "float8"),
        ("--log-steps=0", "`log_steps` must be a positive integer"),
        ("--evaluation-size=12", "must be a multiple of the batch size, 8"),
        ("--evaluation-size=0", "`evaluation_size` must be a positive integer"),
        ("--nonsense=1", "nonsense"),
    ],
)
def test_bad_options_fail_early(
    train, npz, tmp_path, capsys, no_data, more, message
):
    out = tmp_path / "run"
    assert message in refusal(train, arguments(npz, out, more), capsys)
    assert not out.exists()


@pytest.mark.once
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--dataset=cifar10", "`input_shape` must be (28, 28, channels)"),
        ("--weights=none.h5", "Received: 'none.h5'"),
    ],
)
def test_what_the_network_refuses_fails_early(
    train, tmp_path, capsys, no_data, more, message
):
    out = tmp_path / "run"
    command = ["--model=rotmnist_p4cnn", f"--out={out}", more]
    assert message in refusal(train, command, capsys)
    assert not out.exists()


@pytest.mark.once
def test_dataset_that_is_not_prepared(train, tmp_path, capsys):
    command = [
        "--model=rotmnist_p4cnn",
        f"--data-dir={tmp_path}",
        f"--out={tmp_path / 'run'}",
    ]
    told = refusal(train, command, capsys)
    assert "'rot_mnist' is not prepared" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.once
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--epochs=9", "imagenet_folder/train does not exist"),
        ("--train-on-all", "validation images are also the test images"),
        ("--dataset=cifar10", "`resized_crop` must be False except"),
    ],
)
def test_folder_of_images_that_is_not(
    train, tmp_path, capsys, monkeypatch, more, message
):
    """The recipe of a network for ImageNet, with a network that is small."""
    pytest.importorskip("tensorflow")
    recipe = recipes.get_recipe("acmix_resnet26")
    monkeypatch.setitem(recipes._RECIPES, "tiny", recipe)
    out = tmp_path / "run"
    command = ["--model=tiny", f"--data-dir={tmp_path}", f"--out={out}", more]
    assert message in refusal(train, command, capsys)
    assert not out.exists()


@pytest.mark.once
def test_dataset_with_too_few_images(train, npz, tmp_path, capsys):
    command = arguments(npz, tmp_path / "run", "--validation-size=48")
    told = refusal(train, command, capsys)
    assert "must be less than the 48 images" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.once
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "holds a run already: go on with it by --resume"),
        (("--resume", "--seed=1"), "started with seed=0, not with seed=1"),
        (("--resume", "--epochs=3"), "started with epochs=4, not with epochs"),
        (("--resume", "--train-on-all"), "started with train_on_all=False"),
    ],
)
def test_folder_with_another_run(
    train, whole_run, npz, capsys, no_data, more, message
):
    told = refusal(train, arguments(npz, whole_run, *more), capsys)
    assert message in told


@pytest.mark.once
def test_backend_of_a_resumed_run_is_the_same(
    train, whole_run, npz, capsys, no_data, monkeypatch
):
    monkeypatch.setattr(keras.backend, "backend", lambda: "other")
    told = refusal(train, arguments(npz, whole_run, "--resume"), capsys)
    assert "not with backend='other'" in told


@pytest.mark.once
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("file", "is no folder"),
        ("file/run", "--out cannot be used: "),
        ("/proc/run/of/mine", "--out cannot be used: "),
        ("x" * 300, "--out cannot be used: "),
    ],
    ids=["file", "under a file", "not writable", "too long"],
)
def test_folder_that_cannot_be(
    train, npz, tmp_path, capsys, no_data, monkeypatch, out, message
):
    monkeypatch.setattr(training, "build_model", None)
    (tmp_path / "file").write_text("")
    told = refusal(train, arguments(npz, tmp_path / out), capsys)
    assert message in told
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.once
@pytest.mark.parametrize("existed", [False, True])
def test_folder_that_takes_no_file(
    train, npz, tmp_path, capsys, no_data, monkeypatch, existed
):
    def full(dir):
        raise OSError("No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    out = tmp_path / "some" / "run"
    if existed:
        out.mkdir(parents=True)
    told = refusal(train, arguments(npz, out), capsys)
    assert "--out cannot be used: No space left" in told
    assert out.exists() == (tmp_path / "some").exists() == existed


@pytest.mark.once
@pytest.mark.parametrize("content", ["", '{"model": "ti', "3", "\0"])
def test_damaged_record_of_a_run(
    train, npz, tmp_path, capsys, no_data, content
):
    (tmp_path / "options.json").write_text(content)
    told = refusal(train, arguments(npz, tmp_path, "--resume"), capsys)
    assert "options.json is damaged" in told


@pytest.mark.once
def test_shorter_run_than_its_milestones(
    train, npz, tmp_path, capsys, no_data, monkeypatch
):
    recipe = dataclasses.replace(recipes.get_recipe("tiny"), milestones=(50,))
    monkeypatch.setitem(recipes._RECIPES, "tiny", recipe)
    told = refusal(train, arguments(npz, tmp_path / "run"), capsys)
    assert "`milestones` must be less than the 4 epochs" in told


@pytest.mark.once
def test_milestones_and_plateau_replace_each_other(train, tmp_path):
    def recipe(model, **options):
        return training.resolve(
            training.TrainOptions(model, tmp_path, **options)
        )

    assert recipe("pcam_densenet_p4").plateau_patience == 20
    with_milestones = recipe("pcam_densenet_p4", milestones=(50,))
    assert with_milestones.plateau_patience is None
    assert with_milestones.milestones == (50,)
    with_plateau = recipe("allcnnc_p4", plateau_patience=5)
    assert with_plateau.milestones == ()
    assert with_plateau.plateau_patience == 5
    message = "must be None where `milestones`"
    with pytest.raises(training.OptionsError, match=message):
        recipe("allcnnc_p4", plateau_patience=5, milestones=(3,))


@pytest.mark.once
@pytest.mark.parametrize(
    ("model", "others"),
    [
        ("gsanet_cifar10_p4", "with warmup_epochs=10, cosine=True"),
        ("resnet29_p4", "with warmup_epochs=10"),
    ],
)
def test_plateau_is_refused_beside_other_changes_of_the_rate(
    train, tmp_path, capsys, no_data, model, others
):
    out = tmp_path / "run"
    command = [f"--model={model}", f"--out={out}", "--plateau-patience=5"]
    told = refusal(train, command, capsys)
    assert "`plateau_patience` must be None where" in told
    assert f"Received: 5, {others}" in told
    assert not out.exists()


@pytest.mark.once
def test_plateau_needs_validation(train, npz, tmp_path, capsys, no_data):
    command = arguments(
        npz, tmp_path / "run", "--plateau-patience=1", "--train-on-all"
    )
    told = refusal(train, command, capsys)
    assert "--train-on-all leaves no validation accuracy" in told


@pytest.mark.once
def test_run_of_an_earlier_version_is_resumed(train, npz, tmp_path):
    """Its record lacks fields that recipes gained later, with defaults."""
    options = training.TrainOptions("tiny", tmp_path, resume=True)
    recipe = training.resolve(options)
    training.open_out(options, recipe)
    path = tmp_path / "options.json"
    started = json.loads(path.read_text())
    assert started.pop("plateau_factor") == 0.5
    assert started.pop("kernel_factors") == []
    for name in ("label_smoothing", "warmup_start", "resized_crop"):
        assert not started.pop(name)
    path.write_text(json.dumps(started))
    training.check_out(options, recipe)
    other = dataclasses.replace(recipe, plateau_factor=0.1)
    with pytest.raises(
        training.OptionsError, match=r"plateau_factor=0\.5, not"
    ):
        training.check_out(options, other)


@pytest.mark.once
def test_run_without_kernel_factors_is_resumed(tmp_path):
    """The recipes of an earlier version had none."""
    options = training.TrainOptions(
        "rotmnist_p4cnn", tmp_path, resume=True, use_kernel_factors=False
    )
    training.open_out(options, training.resolve(options))
    path = tmp_path / "options.json"
    started = json.loads(path.read_text())
    del started["kernel_factors"]
    path.write_text(json.dumps(started))
    training.check_out(options, training.resolve(options))
    options = training.TrainOptions("rotmnist_p4cnn", tmp_path, resume=True)
    with pytest.raises(
        training.OptionsError, match=r"Resume it with --no-use-kernel-factors"
    ):
        training.check_out(options, training.resolve(options))


@pytest.mark.once
def test_kernel_factors_of_a_run(tmp_path):
    def recipe(**options):
        return training.resolve(
            training.TrainOptions("rotmnist_p4cnn", tmp_path, **options)
        )

    assert recipe().kernel_factors
    assert recipe(use_kernel_factors=False).kernel_factors == ()


@pytest.mark.once
def test_default_data_dir_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    for given, expected in (
        (None, None),
        (tmp_path, None),
        (tmp_path / "other", str(tmp_path / "other")),
    ):
        options = training.TrainOptions("tiny", tmp_path, data_dir=given)
        assert options.as_dict()["data_dir"] == expected
