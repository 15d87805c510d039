"""Batches, epochs and the two pipelines."""

import keras
import numpy as np
import pytest
from dataset_helpers import assert_equal
from dataset_helpers import get_loader
from dataset_helpers import LOADERS
from dataset_helpers import make_spy
from dataset_helpers import numpy_batches
from dataset_helpers import once
from dataset_helpers import random_arrays
from sweeps import swept

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data.prefetching import prefetched

# --- Batches ----------------------------------------------------------------


@once
def test_epochs_are_permutations_that_depend_on_seed_and_epoch_alone():
    images, labels = random_arrays(10)

    def epoch(number, seed=0, **kwargs):
        batches = datasets.Batches(
            images, labels, 4, shuffle=True, seed=seed, **kwargs
        )
        return list(batches.epoch(number))

    first = epoch(0)
    assert [len(batch[0]) for batch in first] == [4, 4, 2]
    assert all(batch[0].dtype == np.float32 for batch in first)
    assert all(batch[1].dtype == np.int32 for batch in first)
    order = np.concatenate([batch[1] for batch in first])
    assert sorted(order) == list(range(10))
    seen = np.concatenate([batch[0] for batch in first])
    np.testing.assert_array_equal(seen, images[order] / np.float32(255))
    assert_equal(epoch(0), first)
    for other in (epoch(1), epoch(0, seed=1)):
        assert list(np.concatenate([b[1] for b in other])) != list(order)
    augmented = epoch(0, augment=True)
    assert list(np.concatenate([b[1] for b in augmented])) == list(order)


@once
def test_batches_are_random_access():
    batches = datasets.Batches(
        *random_arrays(10), 4, shuffle=True, augment=True
    )
    expected = [list(batches.epoch(epoch)) for epoch in range(3)]
    for epoch, index in [(2, 1), (0, 2), (2, 0), (1, 1)]:
        assert_equal([batches.batch(epoch, index)], [expected[epoch][index]])
    with pytest.raises(IndexError, match="no batch 3 of 3"):
        batches.batch(0, 3)


@once
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
def test_augmented_images_are_crops_and_flips(padding, flip):
    images, labels = random_arrays(3)
    batches = datasets.Batches(
        images, labels, augment=datasets.Augmentation(padding, flip)
    )
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), *[(padding, padding)] * 2, (0, 0)))
    candidates = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            candidates[top, left, False] = crop / np.float32(255)
            if flip:
                candidates[top, left, True] = crop[:, :, ::-1] / np.float32(255)
    found = []
    for epoch in range(100):
        ((result, unchanged),) = batches.epoch(epoch)
        np.testing.assert_array_equal(unchanged, labels)
        for index, image in enumerate(result):
            matches = [
                key
                for key, candidate in candidates.items()
                if np.array_equal(candidate[index], image)
            ]
            assert len(matches) == 1
            found.append(matches[0])
    # Every choice occurs: 300 draws from at most 50.
    assert set(found) == set(candidates)


@once
@pytest.mark.parametrize("flip", [False, True])
def test_augmented_images_come_in_all_poses(flip):
    images, labels = random_arrays(3)
    images = images[:, :4, :4]
    augment = datasets.Augmentation(padding=0, flip=flip, turn=True)
    batches = datasets.Batches(images, labels, augment=augment)
    found = set()
    for epoch in range(40):
        ((result, _),) = batches.epoch(epoch)
        for before, after in zip(images, result, strict=True):
            poses = [
                np.rot90(pose, turns) / np.float32(255)
                for pose in (before, before[:, ::-1])
                for turns in range(4)
            ]
            (pose,) = [
                n for n, pose in enumerate(poses) if np.array_equal(pose, after)
            ]
            found.add(pose)
    assert found == set(range(8 if flip else 4))


@once
def test_turns_change_no_other_choice():
    images, labels = random_arrays(5)
    images = np.concatenate([images[:, :4, :4]] * 2, axis=-1)
    arrays = {}
    for turn in (False, True):
        augment = datasets.Augmentation(padding=2, flip=True, turn=turn)
        batches = datasets.Batches(
            images, labels, shuffle=True, augment=augment
        )
        arrays[turn] = next(batches.epoch(0))
    np.testing.assert_array_equal(arrays[False][1], arrays[True][1])
    for before, after in zip(arrays[False][0], arrays[True][0], strict=True):
        assert any(np.array_equal(np.rot90(before, n), after) for n in range(4))


@once
def test_images_that_cannot_be_turned():
    images, labels = random_arrays(3)
    augment = datasets.Augmentation(turn=True)
    with pytest.raises(ValueError, match=r"`turn` must be False .* not square"):
        datasets.Batches(images[:, :3, :4], labels, augment=augment)


@once
def test_normalization_comes_after_the_padding():
    images = np.full((1, 4, 4, 2), 255, "uint8")
    labels = np.zeros(1, "int32")
    batches = datasets.Batches(
        images,
        labels,
        augment=datasets.Augmentation(4, False),
        normalization=((0.25, 0.5), 0.5),
    )
    values = np.concatenate([next(batches.epoch(e))[0] for e in range(20)])
    assert values.dtype == np.float32
    assert set(values[..., 0].ravel()) == {-0.5, 1.5}
    assert set(values[..., 1].ravel()) == {-1.0, 1.0}


@once
def test_float_images_stay_as_they_are():
    images = np.random.default_rng(0).random((3, 4, 4, 1), "float32")
    batches = datasets.Batches(images, np.arange(3))
    ((result, _),) = batches.epoch(0)
    np.testing.assert_array_equal(result, images)
    assert not np.shares_memory(result, images)


# --- tf.data and PyDataset --------------------------------------------------


@once
@pytest.mark.parametrize("split", ["train", "train+validation", "test"])
def test_both_pipelines_give_the_same_bits(split, digits_npz):
    tf = pytest.importorskip("tensorflow")
    kwargs = {
        "augment": datasets.Augmentation(2, True) if split != "test" else None,
        "batch_size": 300,
        "seed": 5,
        "normalization": datasets.info(digits_npz).normalization,
    }
    dataset = datasets.load("digits_upright", split, **kwargs)
    assert dataset.element_spec == (
        tf.TensorSpec((None, 28, 28, 1), "float32"),
        tf.TensorSpec((None,), "int32"),
    )
    for other in (
        datasets.load_pydataset("digits_upright", split, **kwargs),
        datasets.load_pydataset(digits_npz, split, **kwargs),
        datasets.load(str(digits_npz), split, **kwargs),
    ):
        assert int(dataset.cardinality()) == len(other)
        dataset = datasets.load("digits_upright", split, **kwargs)
        for _ in range(2):
            assert_equal(numpy_batches(other), numpy_batches(dataset))


@once
def test_nothing_is_tuned_while_an_epoch_runs():
    """The end of an epoch would wait for the thread that tunes."""
    tf = pytest.importorskip("tensorflow")
    for dataset in (
        datasets.load("digits_upright"),
        prefetched(tf.data.Dataset.range(5)),
    ):
        # Options of whatever the dataset is made into hold as well.
        for data in (dataset, dataset.take(2)):
            assert data.options().autotune.enabled is False
    assert list(prefetched(tf.data.Dataset.range(5)).as_numpy_iterator()) == [
        *range(5)
    ]


@once
@pytest.mark.parametrize("pipeline", LOADERS)
def test_iterations_are_epochs(pipeline):
    dataset = get_loader(pipeline)(
        "digits_upright", batch_size=100, augment=True, initial_epoch=3
    )
    batches = datasets.load_pydataset(
        "digits_upright", batch_size=100, augment=True
    ).batches
    # An iteration that is not finished does not count.
    next(iter(dataset))
    for epoch in (3, 4):
        assert_equal(numpy_batches(dataset), list(batches.epoch(epoch)))


@pytest.mark.parametrize(
    "batch_size", swept((400, 2000), 400), ids=["several", "one"]
)
@pytest.mark.parametrize("pipeline", LOADERS)
def test_epochs_of_fit_are_epochs_of_the_data(pipeline, batch_size, tmp_path):
    load = get_loader(pipeline)
    options = {"batch_size": batch_size, "augment": True, "seed": 1}
    batches = datasets.load_pydataset("digits_upright", **options).batches

    def fit(epochs, callbacks=(), **kwargs):
        model = make_spy()
        data = load("digits_upright", **options)
        model.fit(
            data,
            validation_data=load("digits_upright", "validation", 200),
            epochs=epochs,
            callbacks=[datasets.EpochCounter(data), *callbacks],
            verbose=0,
            **kwargs,
        )
        return model.seen

    def expect(*epochs):
        return [batch for epoch in epochs for batch in batches.epoch(epoch)]

    assert_equal(fit(3), expect(0, 1, 2))
    assert_equal(fit(4, initial_epoch=2), expect(2, 3))
    backup = {"backup_dir": str(tmp_path), "delete_checkpoint": False}
    fit(2, [keras.callbacks.BackupAndRestore(**backup)])
    resumed = fit(4, [keras.callbacks.BackupAndRestore(**backup)])
    assert_equal(resumed, expect(2, 3))


@pytest.mark.parametrize("pipeline", LOADERS)
def test_fit_begins_with_initial_epoch_without_a_counter(pipeline):
    options = {"batch_size": 50, "initial_epoch": 2}
    data = get_loader(pipeline)("digits_upright", **options)
    model = make_spy()
    model.fit(data, epochs=2, verbose=0)
    batches = datasets.load_pydataset("digits_upright", **options).batches
    assert_equal(model.seen, [*batches.epoch(2), *batches.epoch(3)])


@pytest.mark.parametrize("pipeline", LOADERS)
@pytest.mark.every_backend
def test_evaluation_and_prediction_keep_the_order(pipeline):
    data = get_loader(pipeline)("digits_upright", "test", 100)
    labels = datasets.load_pydataset("digits_upright", "test").batches.labels
    inputs = keras.Input((28, 28, 1))
    outputs = keras.layers.Dense(10)(keras.layers.Flatten()(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(metrics=["accuracy"], loss="sparse_categorical_crossentropy")
    predicted = model.predict(data, verbose=0).argmax(-1)
    accuracy = model.evaluate(data, verbose=0, return_dict=True)["accuracy"]
    np.testing.assert_allclose(
        accuracy, (predicted == labels).mean(), atol=1e-6
    )


@pytest.mark.parametrize(("count", "devices"), [(1, 2), (2, 1), (3, 2)])
def test_shards_are_the_parts_of_batches(count, devices):
    # The last batch has 5 images, which none of these counts divides.
    images = np.random.default_rng(0).random((29, 6, 6, 1), "float32")
    labels = np.arange(29)
    kwargs = {"batch_size": 12, "shuffle": True, "augment": True, "seed": 1}
    whole = datasets.Batches(images, labels, **kwargs)
    shards = [
        datasets.Batches(
            images,
            labels,
            shard=datasets.Shard(index, count, devices),
            **kwargs,
        )
        for index in range(count)
    ]
    all_devices = count * devices
    left_out = 5 % all_devices
    assert {len(shard) for shard in shards} == {3 if left_out < 5 else 2}
    for batch in range(len(shards[0])):
        parts = [shard.batch(1, batch) for shard in shards]
        assert {len(y) for _, y in parts} == {len(parts[0][1])}
        assert not len(parts[0][1]) % devices
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        expected_x, expected_y = whole.batch(1, batch)
        np.testing.assert_array_equal(x, expected_x[: len(x)])
        np.testing.assert_array_equal(y, expected_y[: len(y)])
        assert len(expected_y) - len(y) == (left_out if batch == 2 else 0)


def test_shards_that_cannot_be():
    images, labels = np.zeros((5, 3, 3, 1), "uint8"), np.zeros(5, "int32")
    for shard, batch_size, message in (
        (datasets.Shard(0, 3), 4, "multiple of the 3 devices.* Received: 4"),
        (datasets.Shard(0, 3, 2), 6, "6 devices must have an image.* 5 images"),
        ((0, 2), 4, r"`shard` must be None or a Shard. Received: \(0, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            datasets.Batches(images, labels, batch_size, shard=shard)
    with pytest.raises(ValueError, match=r"`index` must be less than 2.* 2"):
        datasets.Shard(2, 2)
