"""Where the images come from: MNIST, .amat files, tensorflow_datasets."""

import sys

import numpy as np
import pytest
from dataset_helpers import assert_equal
from dataset_helpers import DATA_DIR
from dataset_helpers import get_loader
from dataset_helpers import LOADERS
from dataset_helpers import needs
from dataset_helpers import numpy_batches
from dataset_helpers import once
from dataset_helpers import random_arrays

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data import splits
from keras_equiattn.applications.data.sources import access
from keras_equiattn.applications.data.sources import pixels
from keras_equiattn.applications.data.sources import rot_mnist
from keras_equiattn.applications.data.sources import tfds

# --- Rotated MNIST ----------------------------------------------------------


def write_amat(path, images, labels):
    """Writes upright images transposed, as the files of 2007 hold them."""
    columns = images[..., 0].transpose(0, 2, 1).reshape(len(images), -1)
    np.savetxt(path, np.column_stack([columns, labels]), fmt="%.7g")


@once
def test_amat_files(tmp_path, monkeypatch):
    counts = {"train": 12, "test": 5}
    monkeypatch.setattr(rot_mnist, "SIZES", counts)
    folder = tmp_path / "mnist_rotation_new"
    folder.mkdir()
    expected = {}
    for part, count in counts.items():
        images, labels = random_arrays(count, (28, 28, 1))
        expected[part] = images / np.float32(255), labels % 10
        write_amat(folder / rot_mnist.AMAT_FILES[part], *expected[part])
    assert access.state("rot_mnist", tmp_path) == "prepared (files of 2007)"

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
    path = tmp_path / rot_mnist.AMAT_FILES["test"]
    write_amat(path, images, labels)
    with pytest.raises(ValueError, match="5 rows of 784 pixels and a label"):
        rot_mnist.read_amat(path, 5)
    with pytest.raises(
        datasets.DatasetNotPreparedError, match=r"train_valid.amat is missing"
    ):
        datasets.load_pydataset("rot_mnist", data_dir=tmp_path)
    state = access.state("rot_mnist", tmp_path)
    assert state.startswith("not prepared (Rotated MNIST in ")
    write_amat(path, images * 255, labels)
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\]"):
        rot_mnist.read_amat(path)
    write_amat(path, images, labels + 9)
    with pytest.raises(ValueError, match=r"labels in 0\.\.9"):
        rot_mnist.read_amat(path)


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """A data directory with an MNIST of 30 and 4 digits; counts its reads."""
    reads = []
    (train, test) = (
        (images, labels % 10)
        for images, labels in (
            random_arrays(30, (28, 28, 1), seed=0),
            random_arrays(4, (28, 28, 1), seed=1),
        )
    )

    def read_tfds(name, data_dir, part):
        assert name == "rot_mnist"
        reads.append(part)
        return {"train": train, "test": test}[part]

    monkeypatch.setattr(tfds, "load", read_tfds)
    monkeypatch.setattr(rot_mnist, "SIZES", {"train": 12, "test": 16})
    folder = tmp_path / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    return tmp_path, reads, train, test


@once
def test_rotated_mnist_is_built_once(tiny_mnist):
    data_dir, reads, _, _ = tiny_mnist
    state = access.state("rot_mnist", data_dir)
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
    state = access.state("rot_mnist", data_dir)
    assert state == "prepared (built from MNIST)"
    # The cache alone is enough.
    (data_dir / "mnist" / "3.0.1" / "dataset_info.json").unlink()
    datasets.load_pydataset("rot_mnist", **kwargs)


@once
def test_rotated_mnist_shares_no_digit_between_splits(tiny_mnist):
    _, _, train, test = tiny_mnist
    arrays = rot_mnist.build(train, test, rot_mnist.SIZES)
    again = rot_mnist.build(train, test, rot_mnist.SIZES)
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
        rotated = pixels.rotate(image, [90 * turns])
        np.testing.assert_allclose(
            rotated[0], np.rot90(image[0], turns), atol=1e-5
        )
    half = pixels.rotate(image, [45])
    assert half.min() >= 0
    assert half.max() <= 1
    assert half[0, 0, 0] == 0


@once
def test_missing_scipy_is_an_extra_of_the_datasets(tiny_mnist, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    with pytest.raises(ImportError, match="scipy is needed") as caught:
        datasets.load_pydataset("rot_mnist", data_dir=tiny_mnist[0])
    assert 'pip install "keras-equiattn[datasets]"' in str(caught.value)


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
    path = rot_mnist.cache(DATA_DIR)
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
    splits = tfds.builder("pcam", DATA_DIR).info.splits
    for split in ("train", "validation", "test", "train+validation"):
        # All of pcam is too large for memory, so `load` streams it.
        data = datasets.load("pcam", split, 64)
        count = sum(splits[part].num_examples for part in split.split("+"))
        assert len(data) == -(-count // 64)
        images, labels = next(iter(data))
        assert images.shape == (64, 96, 96, 3)
        assert 0 <= np.min(images) < np.max(images) <= 1
        assert set(np.asarray(labels)) == {0, 1}


@needs("pcam")
def test_streamed_batches(monkeypatch):
    monkeypatch.setattr(splits, "MEMORY_LIMIT", 1_000)
    opened = []
    stream = splits.StreamedBatches

    def spy(*args, **kwargs):
        opened.append(stream(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(splits, "StreamedBatches", spy)
    builder = tfds.builder("pcam", DATA_DIR)
    if builder.info.splits["test"].num_examples > 2_000:
        pytest.skip("needs the sample: reading all of pcam takes minutes")
    # Without a shuffle, streamed batches equal those from memory.
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
    assert len(opened) == 5
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
    assert tfds.folder("cifar10", tmp_path) is None
    for version in ("3.0.2", "3.0.10", "4.0.0.incompleteXYZ", "notes"):
        folder = tmp_path / "cifar10" / version
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "cifar10" / "5.0.0").mkdir()
    folder = tfds.folder("cifar10", tmp_path)
    assert folder == tmp_path / "cifar10" / "3.0.10"


@once
@pytest.mark.parametrize("pipeline", LOADERS)
@pytest.mark.parametrize("name", ["rot_mnist", "cifar10", "cifar100", "pcam"])
def test_nothing_is_downloaded_unless_asked(
    name, pipeline, tmp_path, monkeypatch
):
    monkeypatch.setattr(tfds, "download", None)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "default"))
    load = get_loader(pipeline)
    command = f"python -m keras_equiattn.applications.data prepare {name}"
    with pytest.raises(datasets.DatasetNotPreparedError) as caught:
        load(name)
    assert str(caught.value) == (
        f"Dataset {name!r} is not prepared in {tmp_path / 'default'}. "
        f"Prepare it once with: {command}"
    )
    with pytest.raises(FileNotFoundError) as caught:
        load(name, "test", data_dir=tmp_path)
    assert str(caught.value).endswith(f"{command} --data-dir {tmp_path}")


@needs("pcam")
def test_each_process_streams_examples_of_its_own(monkeypatch):
    monkeypatch.setattr(splits, "MEMORY_LIMIT", 1_000)
    kwargs = {"split": "validation", "batch_size": 30}
    whole, _ = datasets.load_pydataset("pcam", **kwargs).batches.batch(0, 0)
    parts = [
        datasets.load("pcam", shard=datasets.Shard(index, 3), **kwargs)
        for index in range(3)
    ]
    first = [numpy_batches(part)[0][0] for part in parts]
    assert [len(images) for images in first] == [10, 10, 10]
    np.testing.assert_array_equal(first[0], whole[:10])
    counts = [sum(len(y) for _, y in numpy_batches(part)) for part in parts]
    assert len(set(counts)) == 1
    total = datasets.load_pydataset("pcam", **kwargs).batches.count
    assert 0 <= total - sum(counts) < 3
    keys = [
        {images.tobytes() for x, _ in numpy_batches(part) for images in x}
        for part in parts
    ]
    assert not keys[0] & keys[1] | keys[1] & keys[2] | keys[0] & keys[2]
