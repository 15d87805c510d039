"""Datasets: splits, reproducible epochs, files, command line and messages."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest

from keras_equiattn.applications import _batches
from keras_equiattn.applications import _sources
from keras_equiattn.applications import datasets

once = pytest.mark.once
DATA_DIR = _sources.resolve_data_dir(None)
LOADERS = {"tf.data": "load", "PyDataset": "load_pydataset"}


def needs(name):
    """Marks a test of real data, which runs where the data is."""

    def mark(test):
        state = _sources.state(name, DATA_DIR)
        test = pytest.mark.skipif(
            not state.startswith("prepared"), reason=f"{name} is {state}"
        )(test)
        return pytest.mark.slow(once(test))

    return mark


def get_loader(pipeline):
    """The function that loads through `pipeline`."""
    if pipeline == "tf.data":
        pytest.importorskip("tensorflow")
    return getattr(datasets, LOADERS[pipeline])


def numpy_batches(dataset):
    """One iteration over a dataset of either pipeline, as arrays."""
    return [tuple(np.asarray(part) for part in batch) for batch in dataset]


def assert_equal(actual, expected):
    """Two lists of batches are the same, bit for bit."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        for part, reference in zip(one, other, strict=True):
            assert part.dtype == reference.dtype
            np.testing.assert_array_equal(part, reference)


def random_arrays(count, shape=(6, 5, 2), seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(1, 256, (count, *shape)).astype("uint8")
    return images, np.arange(count, dtype="int32")


@pytest.fixture(scope="module")
def digits_npz(tmp_path_factory):
    """The upright digits, exported."""
    path = tmp_path_factory.mktemp("export") / "digits.npz"
    return datasets.export("digits_upright", path)


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


# --- Splits -----------------------------------------------------------------


@once
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("digits", (4400, 800, 5200, 1988)),
        ("digits_upright", (1100, 200, 1300, 497)),
    ],
)
def test_digits(name, sizes):
    splits = ("train", "validation", "train+validation", "test")
    facts = datasets.info(name)
    sources = []
    for split, size in zip(splits, sizes, strict=True):
        batches = datasets.load_pydataset(name, split).batches
        assert batches.images.shape == (size, *facts.shape)
        assert set(batches.labels) == set(range(facts.classes))
        assert batches.shuffle == split.startswith("train")
        sources.append(batches.images)
    train, validation, pool, test = sources
    np.testing.assert_array_equal(np.concatenate([train, validation]), pool)
    images = {image.tobytes() for image in np.concatenate([pool, test])}
    assert len(images) == len(pool) + len(test)
    pixels = pool / 255
    np.testing.assert_allclose(pixels.mean(), facts.mean[0], atol=1e-4)
    np.testing.assert_allclose(pixels.std(), facts.std[0], atol=1e-4)


@once
def test_digits_are_turned_versions_of_the_upright_ones():
    turned = datasets.load_pydataset("digits", "test").batches
    upright = datasets.load_pydataset("digits_upright", "test").batches
    np.testing.assert_array_equal(turned.labels, np.repeat(upright.labels, 4))
    # A turn about the centre keeps the sum of the pixels, nearly.
    sums = turned.images.sum((1, 2, 3)).reshape(-1, 4)
    reference = upright.images.sum((1, 2, 3))[:, None]
    np.testing.assert_allclose(sums / reference, 1, atol=0.05)


@once
def test_validation_size_is_an_argument():
    train = datasets.load_pydataset("digits_upright", validation_size=300)
    validation = datasets.load_pydataset(
        "digits_upright", "validation", validation_size=300
    )
    assert len(train.batches.images) == 1000
    assert len(validation.batches.images) == 300


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


class Spy(keras.Model):
    """Keeps every batch that `fit` trains on."""

    def train_step(self, *args):
        batch = [keras.ops.convert_to_numpy(part) for part in args[-1]]
        self.seen.append(tuple(batch))
        return super().train_step(*args)


def make_spy():
    inputs = keras.Input((28, 28, 1))
    outputs = keras.layers.Dense(10)(keras.layers.Flatten()(inputs))
    model = Spy(inputs, outputs)
    model.seen = []
    model.compile(
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        run_eagerly=True,
    )
    return model


@pytest.mark.parametrize("batch_size", [400, 2000], ids=["several", "one"])
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


# --- .npz files and the command line ----------------------------------------


@once
def test_export_keeps_everything(digits_npz):
    facts = datasets.info(digits_npz)
    assert facts == datasets.info("digits_upright")
    with np.load(digits_npz, allow_pickle=False) as file:
        assert sorted(file) == [
            "metadata",
            "test_images",
            "test_labels",
            "train_images",
            "train_labels",
        ]
        assert file["train_images"].dtype == np.uint8
        assert len(file["train_images"]) == 1300


@once
def test_a_validation_split_of_its_own(tmp_path):
    facts = dataclasses.replace(_sources.INFOS["pcam"], shape=(4, 4, 3))
    arrays = {"metadata": _sources.npz_metadata(facts)}
    parts = {"train": 7, "validation": 3, "test": 2}
    for seed, (part, count) in enumerate(parts.items()):
        images, labels = random_arrays(count, facts.shape, seed)
        arrays[f"{part}_images"] = images
        arrays[f"{part}_labels"] = labels % 2
    path = tmp_path / "pcam.npz"
    _sources.save_npz(path, arrays)
    assert datasets.info(path) == facts
    for part in parts:
        batches = datasets.load_pydataset(path, part).batches
        np.testing.assert_array_equal(batches.images, arrays[f"{part}_images"])
    both = datasets.load_pydataset(path, "train+validation").batches
    np.testing.assert_array_equal(both.images[:7], arrays["train_images"])
    np.testing.assert_array_equal(both.images[7:], arrays["validation_images"])
    with pytest.raises(ValueError, match=r"'pcam' has its own validation"):
        datasets.load_pydataset(path, validation_size=2)


@once
def test_a_rewritten_file_is_read_again(tmp_path):
    path = tmp_path / "data.npz"
    facts = dataclasses.replace(
        _sources.INFOS["digits_upright"], shape=(6, 5, 2), validation_size=1
    )
    for seed in range(2):
        images, labels = random_arrays(4, facts.shape, seed)
        arrays = {"metadata": _sources.npz_metadata(facts)}
        for part in ("train", "test"):
            arrays[f"{part}_images"] = images
            arrays[f"{part}_labels"] = labels
        _sources.save_npz(path, arrays)
        os.utime(path, ns=(seed, seed))
        batches = datasets.load_pydataset(path, "test").batches
        np.testing.assert_array_equal(batches.images, images)
    assert list(tmp_path.iterdir()) == [path]


@once
def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(file, **arrays):
        file.write(b"partial")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(KeyboardInterrupt):
        datasets.export("digits_upright", tmp_path / "out.npz")
    assert not list(tmp_path.iterdir())


@once
def test_training_without_tensorflow(digits_npz):
    pytest.importorskip("jax")
    script = """
        import sys
        for name in ("tensorflow", "tensorflow_datasets"):
            sys.modules[name] = None
        import keras
        from keras_equiattn.applications import datasets

        train = datasets.load_pydataset(sys.argv[1], augment=True)
        model = keras.Sequential(
            [
                keras.layers.Flatten(),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy")
        history = model.fit(
            train,
            validation_data=datasets.load_pydataset("digits", "validation"),
            callbacks=[datasets.EpochCounter(train)],
            verbose=0,
        )
        print(keras.backend.backend(), sorted(history.history))
        for function in (datasets.load, datasets.prepare):
            try:
                function("cifar10", data_dir=sys.argv[2])
            except ImportError as error:
                print(error)
    """
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(script),
            str(digits_npz),
            str(digits_npz.parent),
        ],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0] == "jax ['loss', 'val_loss']"
    for line in lines[1:]:
        assert line.startswith("tensorflow is needed here")
        assert 'pip install "keras-equiattn[datasets]"' in line
    assert "load_pydataset" in lines[1]


@once
def test_command_line_exports(tmp_path):
    path = tmp_path / "out.npz"
    module = "keras_equiattn.applications.datasets"
    result = subprocess.run(
        [sys.executable, "-m", module, "export", "digits", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"Wrote {path}")
    assert datasets.info(path) == datasets.info("digits")


@once
def test_command_line_lists(tmp_path, capsys):
    assert datasets.main(["list", "--data-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == datasets.list_datasets()
    assert lines[0].endswith("embedded")
    assert all(line.endswith(" not prepared") for line in lines[2:])


@once
def test_command_line_says_errors_in_one_line(tmp_path, capsys):
    path = tmp_path / "out.npz"
    path.write_text("")
    for arguments, message in [
        (["export", "digit", "out.npz"], "Did you mean 'digits'?"),
        (["export", "digits", str(path)], "Overwrite it with --force"),
        (
            ["export", "cifar10", "out.npz", "--data-dir", str(tmp_path)],
            f"datasets prepare cifar10 --data-dir {tmp_path}",
        ),
    ]:
        assert datasets.main(arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error
    assert datasets.main(["export", "digits", str(path), "--force"]) == 0
    assert datasets.main(["prepare", "digits"]) == 0
    assert "nothing to prepare" in capsys.readouterr().out


@once
def test_a_failed_download_is_one_clear_error(tmp_path, monkeypatch, capsys):
    tfds = pytest.importorskip("tensorflow_datasets")

    class Builder:
        def download_and_prepare(self):
            raise AssertionError("no connection")

    monkeypatch.setattr(tfds, "builder", lambda name, data_dir: Builder())
    arguments = ["prepare", "rot_mnist", "--data-dir", str(tmp_path)]
    assert datasets.main(arguments) == 1
    assert capsys.readouterr().err == (
        "error: tensorflow_datasets could not prepare 'mnist' in "
        f"{tmp_path}: no connection\n"
    )


# --- Rotated MNIST ----------------------------------------------------------


def write_amat(path, images, labels):
    """Writes upright images as the files of 2007 hold them."""
    columns = images[..., 0].transpose(0, 2, 1).reshape(len(images), -1)
    np.savetxt(path, np.column_stack([columns, labels]), fmt="%.7g")


@once
def test_amat_files(tmp_path, monkeypatch):
    counts = {"train": 12, "test": 5}
    monkeypatch.setattr(_sources, "ROT_MNIST_SIZES", counts)
    folder = tmp_path / "mnist_rotation_new"
    folder.mkdir()
    expected = {}
    for part, count in counts.items():
        images, labels = random_arrays(count, (28, 28, 1))
        expected[part] = images / np.float32(255), labels % 10
        write_amat(folder / _sources.AMAT_FILES[part], *expected[part])
    assert _sources.state("rot_mnist", tmp_path) == "prepared (files of 2007)"

    def check():
        for split, part, rows in [
            ("train", "train", slice(8)),
            ("validation", "train", slice(8, None)),
            ("test", "test", slice(None)),
        ]:
            data = datasets.load_pydataset(
                "rot_mnist", split, data_dir=tmp_path, validation_size=4
            ).batches
            images, labels = expected[part]
            assert data.images.dtype == np.float32
            np.testing.assert_allclose(data.images, images[rows], atol=1e-6)
            np.testing.assert_array_equal(data.labels, labels[rows])

    check()
    # Read once: the cache is enough from now on.
    for file in folder.iterdir():
        file.unlink()
    check()
    with pytest.raises(ValueError, match="less than the 12 images"):
        datasets.load_pydataset("rot_mnist", data_dir=tmp_path)


@once
def test_bad_amat_files(tmp_path):
    images, labels = random_arrays(3, (28, 28, 1))
    images = images / 255
    path = tmp_path / _sources.AMAT_FILES["test"]
    write_amat(path, images, labels)
    with pytest.raises(ValueError, match="5 rows of 784 pixels and a label"):
        _sources.read_amat(path, 5)
    with pytest.raises(
        datasets.DatasetNotPreparedError, match=r"train_valid.amat is missing"
    ):
        datasets.load_pydataset("rot_mnist", data_dir=tmp_path)
    state = _sources.state("rot_mnist", tmp_path)
    assert state.startswith("not prepared (Rotated MNIST in ")
    write_amat(path, images * 255, labels)
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\]"):
        _sources.read_amat(path)
    write_amat(path, images, labels + 9)
    with pytest.raises(ValueError, match=r"labels in 0\.\.9"):
        _sources.read_amat(path)


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """A data directory with an MNIST of 30 and 4 digits; counts its reads."""
    reads = []
    train = random_arrays(30, (28, 28, 1), seed=0)
    test = random_arrays(4, (28, 28, 1), seed=1)

    def read_tfds(name, data_dir, part):
        assert name == "rot_mnist"
        reads.append(part)
        return {"train": train, "test": test}[part]

    monkeypatch.setattr(_sources, "read_tfds", read_tfds)
    monkeypatch.setattr(_sources, "ROT_MNIST_SIZES", {"train": 12, "test": 16})
    folder = tmp_path / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    return tmp_path, reads, train, test


@once
def test_rotated_mnist_is_built_once(tiny_mnist):
    data_dir, reads, _, _ = tiny_mnist
    state = _sources.state("rot_mnist", data_dir)
    assert state == "prepared (to be built from MNIST)"
    kwargs = {"data_dir": data_dir, "validation_size": 2}
    for split, count in [
        ("train", 10),
        ("validation", 2),
        ("train+validation", 12),
        ("test", 16),
    ]:
        data = datasets.load_pydataset("rot_mnist", split, **kwargs).batches
        assert data.images.shape == (count, 28, 28, 1)
        assert data.images.dtype == np.uint8
    assert reads == ["train", "test"]
    state = _sources.state("rot_mnist", data_dir)
    assert state == "prepared (built from MNIST)"
    # The cache alone is enough.
    (data_dir / "mnist" / "3.0.1" / "dataset_info.json").unlink()
    datasets.load_pydataset("rot_mnist", **kwargs)


@once
def test_rotated_mnist_shares_no_digit_between_splits(tiny_mnist):
    _, _, train, test = tiny_mnist
    arrays = _sources.build_rot_mnist(train, test, _sources.ROT_MNIST_SIZES)
    again = _sources.build_rot_mnist(train, test, _sources.ROT_MNIST_SIZES)
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, again[key])
    pool, held_out = arrays["train_source"], arrays["test_source"]
    assert len(set(pool)) == 12
    assert len(set(held_out)) == 16
    assert not set(pool) & set(held_out)
    assert set(pool) < set(range(30))
    assert set(range(30, 34)) < set(held_out)
    labels = np.concatenate([train[1], test[1]])
    for part, rows in [("train", pool), ("test", held_out)]:
        np.testing.assert_array_equal(arrays[f"{part}_labels"], labels[rows])


@once
def test_rotation_is_bilinear_and_counterclockwise():
    image = np.random.default_rng(0).random((1, 28, 28), "float32")
    for turns in range(4):
        rotated = _sources.rotate(image, [90 * turns])
        np.testing.assert_allclose(
            rotated[0], np.rot90(image[0], turns), atol=1e-5
        )
    half = _sources.rotate(image, [45])
    assert half.min() >= 0
    assert half.max() <= 1
    assert half[0, 0, 0] == 0


@needs("rot_mnist")
def test_real_rotated_mnist():
    sizes = {"train": 10_000, "validation": 2_000, "test": 50_000}
    for split, size in sizes.items():
        data = datasets.load_pydataset("rot_mnist", split).batches
        assert data.images.shape == (size, 28, 28, 1)
        counts = np.bincount(data.labels, minlength=10)
        assert (counts > 0.07 * size).all()
    pool = datasets.load_pydataset("rot_mnist", "train+validation").batches
    ((pixels, _),) = datasets.Batches(
        pool.images, pool.labels, len(pool.images)
    ).epoch(0)
    facts = datasets.info("rot_mnist")
    np.testing.assert_allclose(pixels.mean(), facts.mean[0], atol=2e-3)
    np.testing.assert_allclose(pixels.std(), facts.std[0], atol=2e-3)
    path = _sources.rot_mnist_cache(DATA_DIR)
    if path.name == "rot_mnist_built.npz":
        with np.load(path) as file:
            train, test = file["train_source"], file["test_source"]
        assert len(set(train)) == 12_000
        assert len(set(test)) == 50_000
        assert not set(train) & set(test)
        assert train.max() < 60_000
        assert set(range(60_000, 70_000)) < set(test)


# --- Datasets of tensorflow_datasets ----------------------------------------


@needs("cifar10")
def test_real_cifar10():
    train = datasets.load("cifar10", augment=True, validation_size=10_000)
    assert len(train) == -(-40_000 // 128)
    images, labels = next(iter(train))
    assert images.shape == (128, 32, 32, 3)
    assert 0 <= np.min(images) < np.max(images) <= 1
    assert set(np.asarray(labels)) <= set(range(10))
    assert len(datasets.load("cifar10", "validation")) == 40
    assert len(datasets.load("cifar10", "test")) == 79
    pool = datasets.load_pydataset("cifar10", "train+validation").batches
    facts = datasets.info("cifar10")
    pixels = pool.images.reshape(-1, 3)
    np.testing.assert_allclose(pixels.mean(0) / 255, facts.mean, atol=1e-4)
    np.testing.assert_allclose(pixels.std(0) / 255, facts.std, atol=1e-4)


@needs("cifar100")
def test_real_cifar100():
    train = datasets.load("cifar100", augment=True)
    assert len(train) == -(-45_000 // 128)
    images, labels = next(iter(train))
    assert images.shape == (128, 32, 32, 3)
    assert np.max(labels) >= 20


@needs("pcam")
def test_real_pcam():
    splits = _sources.tfds_builder("pcam", DATA_DIR).info.splits
    for split in ("train", "validation", "test", "train+validation"):
        # All of it is too large for memory: `load` streams it then.
        data = datasets.load("pcam", split, 64)
        count = sum(splits[part].num_examples for part in split.split("+"))
        assert len(data) == -(-count // 64)
        images, labels = next(iter(data))
        assert images.shape == (64, 96, 96, 3)
        assert 0 <= np.min(images) < np.max(images) <= 1
        assert set(np.asarray(labels)) == {0, 1}


@needs("pcam")
def test_streamed_batches(monkeypatch):
    monkeypatch.setattr(_sources, "MEMORY_LIMIT", 1_000)
    streams = []
    stream = _batches.StreamedBatches

    def spy(*args, **kwargs):
        streams.append(stream(*args, **kwargs))
        return streams[-1]

    monkeypatch.setattr(datasets, "StreamedBatches", spy)
    builder = _sources.tfds_builder("pcam", DATA_DIR)
    if builder.info.splits["test"].num_examples > 2_000:
        pytest.skip("needs the sample: reading all of pcam takes minutes")
    # Without a shuffle, what streams is what memory holds.
    normalization = datasets.info("pcam").normalization
    kwargs = {"batch_size": 50, "normalization": normalization}
    for split in ("validation", "test"):
        streamed = datasets.load("pcam", split, **kwargs)
        memory = datasets.load_pydataset("pcam", split, **kwargs)
        assert len(streamed) == len(memory)
        assert_equal(numpy_batches(streamed), numpy_batches(memory))
    kwargs = {"batch_size": 100, "augment": True, "seed": 2}
    epochs = numpy_batches(datasets.load("pcam", **kwargs))
    resumed = datasets.load("pcam", initial_epoch=1, **kwargs)
    dataset = datasets.load("pcam", **kwargs)
    assert_equal(numpy_batches(dataset), epochs)
    second = numpy_batches(dataset)
    assert_equal(numpy_batches(resumed), second)
    assert not np.array_equal(second[0][1], epochs[0][1])
    assert len(streams) == 5
    # Shuffled, but complete.
    plain = datasets.load("pcam", "train", 100)
    sums = np.concatenate([x.sum((1, 2, 3)) for x, _ in numpy_batches(plain)])
    memory = datasets.load_pydataset("pcam", "train").batches.images
    expected = memory.astype("float32") / 255
    np.testing.assert_allclose(
        np.sort(sums), np.sort(expected.sum((1, 2, 3))), rtol=1e-4
    )


@once
def test_newest_complete_version_is_read(tmp_path):
    assert _sources.tfds_folder("cifar10", tmp_path) is None
    for version in ("3.0.2", "3.0.10", "4.0.0.incompleteXYZ", "notes"):
        folder = tmp_path / "cifar10" / version
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "cifar10" / "5.0.0").mkdir()
    folder = _sources.tfds_folder("cifar10", tmp_path)
    assert folder == tmp_path / "cifar10" / "3.0.10"


@once
@pytest.mark.parametrize("pipeline", LOADERS)
@pytest.mark.parametrize("name", ["rot_mnist", "cifar10", "cifar100", "pcam"])
def test_nothing_is_downloaded_unless_asked(
    name, pipeline, tmp_path, monkeypatch
):
    monkeypatch.setattr(_sources, "download", None)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "default"))
    load = get_loader(pipeline)
    command = f"python -m keras_equiattn.applications.datasets prepare {name}"
    with pytest.raises(datasets.DatasetNotPreparedError) as caught:
        load(name)
    assert str(caught.value) == (
        f"Dataset {name!r} is not prepared in {tmp_path / 'default'}. "
        f"Prepare it once with: {command}"
    )
    with pytest.raises(FileNotFoundError) as caught:
        load(name, "test", data_dir=tmp_path)
    assert str(caught.value).endswith(f"{command} --data-dir {tmp_path}")


# --- Bad arguments ----------------------------------------------------------


@once
@pytest.mark.parametrize("pipeline", LOADERS)
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"name": "cifar-10"}, ValueError, "Did you mean 'cifar10'"),
        ({"name": "imagenet"}, ValueError, "one of digits, .* or the path"),
        ({"name": 3}, TypeError, "name must be a dataset's name .* got int"),
        ({"split": "val"}, ValueError, "split must be one of train, valid"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer"),
        ({"augment": 4}, TypeError, "augment must be None, a bool or an"),
        (
            {"augment": True, "split": "test"},
            ValueError,
            "augment is for the training splits, not for 'test'",
        ),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": "0"}, TypeError, "seed must be an integer"),
        ({"data_dir": 1}, TypeError, "data_dir must be a path or None"),
        ({"validation_size": 0}, ValueError, "validation_size must be at l"),
        ({"validation_size": 0.1}, TypeError, "validation_size must be an i"),
        ({"validation_size": 1300}, ValueError, "less than the 1300 images"),
        (
            {"validation_size": 10, "name": "digits"},
            ValueError,
            "must be a multiple of 4, got 10: 'digits' has 4 images of each",
        ),
        (
            {"validation_size": 10, "name": "pcam"},
            ValueError,
            "'pcam' has its own validation split",
        ),
        ({"normalization": 3}, ValueError, r"None or \(mean, std\)"),
        (
            {"normalization": ((0.1, 0.2), 1)},
            ValueError,
            r"each a number or 1 of them",
        ),
        ({"normalization": (0, 0)}, ValueError, "positive stds"),
        ({"normalization": (np.nan, 1)}, ValueError, "finite means"),
        ({"initial_epoch": -1}, ValueError, "initial_epoch must be at leas"),
    ],
)
def test_bad_arguments_of_the_loaders(pipeline, kwargs, error, message):
    load = get_loader(pipeline)
    with pytest.raises(error, match=message):
        load(**{"name": "digits_upright", **kwargs})


@once
@pytest.mark.parametrize("name", ["digits", "rot_mnist", "cifar10", "pcam"])
def test_bad_arguments_are_found_before_the_data(name, tmp_path):
    for kwargs in (
        {"split": "dev"},
        {"batch_size": -1},
        {"seed": 1.5},
        {"augment": "flip"},
        {"normalization": "yes"},
        {"validation_size": -4},
    ):
        (key,) = kwargs
        with pytest.raises((TypeError, ValueError), match=key):
            datasets.load_pydataset(name, data_dir=tmp_path, **kwargs)


@once
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"images": [[1]]}, ValueError, "uint8 or float32 .* got list"),
        (
            {"images": np.zeros((2, 3, 3), "uint8")},
            ValueError,
            r"got uint8 of shape \(2, 3, 3\)",
        ),
        ({"images": np.zeros((2, 3, 3, 1))}, ValueError, "got float64 of"),
        ({"images": np.zeros((0, 3, 3, 1), "uint8")}, ValueError, "n > 0"),
        ({"labels": np.zeros(3, "int32")}, ValueError, "of 2 integers"),
        ({"labels": np.zeros(2)}, ValueError, "got float64 of shape"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"augment": "yes"}, TypeError, "augment must be None"),
        ({"seed": None}, TypeError, "seed must be an integer"),
        ({"normalization": (1,)}, ValueError, r"None or \(mean, std\)"),
        ({"initial_epoch": 0.5}, TypeError, "initial_epoch must be an int"),
    ],
)
def test_bad_arguments_of_batches(kwargs, error, message):
    good = {
        "images": np.zeros((2, 3, 3, 1), "uint8"),
        "labels": np.zeros(2, "int32"),
    }
    with pytest.raises(error, match=message):
        datasets.Batches(**{**good, **kwargs})


@once
def test_bad_arguments_of_augmentation_and_counter():
    with pytest.raises(ValueError, match="padding must be at least 0"):
        datasets.Augmentation(-1)
    with pytest.raises(TypeError, match="padding must be an integer"):
        datasets.Augmentation(1.5)
    with pytest.raises(TypeError, match="flip must be a bool, got int"):
        datasets.Augmentation(4, 1)
    with pytest.raises(TypeError, match="what load or load_pydataset return"):
        datasets.EpochCounter([1, 2])


@once
def test_bad_arguments_of_files(tmp_path, digits_npz):
    export = datasets.export
    with pytest.raises(ValueError, match="Unknown dataset 'mnist'"):
        export("mnist", tmp_path / "out.npz")
    with pytest.raises(ValueError, match="name must be a dataset's name"):
        export(digits_npz, tmp_path / "out.npz")
    with pytest.raises(ValueError, match="name must be a dataset's name"):
        datasets.prepare(digits_npz)
    with pytest.raises(ValueError, match=r"path must end in \.npz"):
        export("digits", tmp_path / "out.npy")
    with pytest.raises(TypeError, match="path must be a path, got int"):
        export("digits", 1)
    with pytest.raises(FileNotFoundError, match=r"folder .* does not exist"):
        export("digits", tmp_path / "nowhere" / "out.npz")
    with pytest.raises(FileExistsError, match="--force"):
        export("digits", digits_npz)
    with pytest.raises(datasets.DatasetNotPreparedError, match="export NAME"):
        datasets.info(tmp_path / "missing.npz")

    others = {
        "empty": lambda path: path.write_bytes(b""),
        "text": lambda path: path.write_text("images"),
        "array": lambda path: np.save(path.open("wb"), np.zeros(3)),
        "arrays": lambda path: np.savez(path, x=np.zeros(3)),
        "json": lambda path: np.savez(path, metadata="[1]"),
        "format": lambda path: np.savez(path, metadata='{"format": "x"}'),
    }
    for name, write in others.items():
        path = pathlib.Path(tmp_path, f"{name}.npz")
        write(path)
        with pytest.raises(ValueError, match="not a dataset of this library"):
            datasets.load_pydataset(path)


@once
def test_missing_packages_are_named(monkeypatch):
    _sources.digits_arrays.cache_clear()
    for package in ("scipy.ndimage", "sklearn.datasets"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            name = package.partition(".")[0]
            with pytest.raises(ImportError, match=name) as caught:
                datasets.load_pydataset("digits")
            command = 'pip install "keras-equiattn[examples]"'
            assert command in str(caught.value)


@once
def test_info_of_every_dataset():
    for name in datasets.list_datasets():
        facts = datasets.info(name)
        assert facts.name == name
        assert len(facts.shape) == 3
        assert len(facts.mean) == len(facts.std) == facts.shape[2]
        assert facts.normalization == (facts.mean, facts.std)
    with pytest.raises(ValueError, match="Did you mean 'rot_mnist'"):
        datasets.info("rotmnist")
