"""Datasets that are folders of images."""

import sys

import numpy as np
import pytest
from dataset_helpers import assert_equal
from dataset_helpers import make_spy
from dataset_helpers import numpy_batches
from dataset_helpers import once
from PIL import Image
from sweeps import swept

from keras_equiattn.applications.data import augmentation
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data import images as image_batches
from keras_equiattn.applications.data.__main__ import main
from keras_equiattn.applications.data.sources import access
from keras_equiattn.applications.data.sources import catalogue

pytestmark = once
CROP = datasets.Augmentation(0, True, resized_crop=True)
CLASSES = ("ape", "bee", "cat")
# Height, width, mode and ending: some smaller than 224, none square.
KINDS = [
    ((301, 417), "RGB", "JPEG"),
    ((97, 131), "L", "jpg"),
    ((260, 190), "RGBA", "png"),
    ((40, 300), "CMYK", "JPEG"),
]


def smooth_image(rng, size, mode):
    """Coarse blocks, enlarged: JPEG changes them little."""
    pixels = rng.integers(0, 256, (*(n // 20 for n in size), 3), "uint8")
    return Image.fromarray(pixels).resize(size[::-1]).convert(mode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes, each of four training and two validation images."""
    root = tmp_path_factory.mktemp("images") / "zoo"
    rng = np.random.default_rng(0)
    for part, kinds in (("train", KINDS), ("val", KINDS[::2])):
        for name in CLASSES:
            (root / part / name).mkdir(parents=True)
            for index, (size, mode, ending) in enumerate(kinds):
                path = root / part / name / f"{index}.{ending}"
                smooth_image(rng, size, mode).save(path)
    (root / "train" / ".hidden").mkdir()
    (root / "val" / "readme.txt").write_text("not an image")
    return root


@pytest.fixture
def ramp(tmp_path):
    """One image of 256 x 256 pixels, whose values are their coordinates."""
    for part in ("train", "val"):
        (tmp_path / part / "one").mkdir(parents=True)
        rows, columns = np.indices((256, 256), "uint8")
        image = np.stack([rows, columns, 0 * rows], axis=-1)
        Image.fromarray(image).save(tmp_path / part / "one" / "ramp.png")
    return tmp_path


def load(*args, **kwargs):
    pytest.importorskip("tensorflow")
    return datasets.load(*args, **kwargs)


def together(batches):
    """Images and labels of all batches."""
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


def test_info(folder):
    facts = datasets.info(folder)
    assert (facts.name, facts.shape, facts.classes) == ("zoo", (224, 224, 3), 3)
    assert facts.normalization == catalogue.IMAGENET_NORMALIZATION
    assert facts.validation_size is None
    facts = datasets.info("imagenet_folder")
    assert (facts.shape, facts.classes) == ((224, 224, 3), 1000)


def central_view(path):
    """The central square at 256 x 256 pixels, cropped to 224 x 224."""
    image = np.asarray(Image.open(path).convert("RGB"), "float64") / 255
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = image[top : top + side, left : left + side]
    places = np.clip((np.arange(256) + 0.5) * side / 256 - 0.5, 0, side - 1)
    low = np.floor(places).astype(int)
    high, part = np.minimum(low + 1, side - 1), places - low
    part = part[:, None, None]
    image = image[low] * (1 - part) + image[high] * part
    image = image.swapaxes(0, 1)
    image = image[low] * (1 - part) + image[high] * part
    return image.swapaxes(0, 1)[16:240, 16:240]


def test_evaluation_is_the_central_crop(folder):
    dataset = load(str(folder), "validation", 4)
    assert len(dataset) == 2
    batches = numpy_batches(dataset)
    assert [len(batch[1]) for batch in batches] == [4, 2]
    images, labels = together(batches)
    assert (images.dtype, labels.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(labels, [0, 0, 1, 1, 2, 2])
    paths = [
        p for name in CLASSES for p in sorted((folder / "val" / name).iterdir())
    ]
    for image, path in zip(images, paths, strict=True):
        # Decoders of JPEG may differ by a level or two.
        atol = 0.03 if path.suffix == ".JPEG" else 1e-4
        np.testing.assert_allclose(image, central_view(path), atol=atol)
    assert_equal(numpy_batches(load(folder, "test", 4)), batches)
    mean, std = (np.array(part) for part in catalogue.IMAGENET_NORMALIZATION)
    ((normalized, _),) = numpy_batches(
        load(folder, "test", normalization=(mean, std))
    )
    np.testing.assert_allclose(normalized, (images - mean) / std, atol=1e-5)


def test_epochs_are_reproducible_and_resumable(folder):
    kwargs = {"batch_size": 5, "augment": CROP, "seed": 2}
    dataset = load(folder, **kwargs)
    assert len(dataset) == 3
    epochs = [numpy_batches(dataset) for _ in range(3)]
    again = load(folder, initial_epoch=1, **kwargs)
    next(iter(again))  # an iteration that is not finished does not count
    for expected in epochs[1:]:
        assert_equal(numpy_batches(again), expected)
    for epoch in epochs:
        images, labels = together(epoch)
        assert images.shape == (12, 224, 224, 3)
        assert sorted(labels) == [0] * 4 + [1] * 4 + [2] * 4
        assert images.min() >= 0
        assert images.max() <= 1
    orders = {tuple(together(epoch)[1]) for epoch in epochs}
    assert len(orders) == 3
    other = together(load(folder, **{**kwargs, "seed": 3}))
    assert not np.array_equal(other[1], together(epochs[0])[1])
    # The same order without augmentation.
    plain = together(load(folder, **{**kwargs, "augment": None}))
    np.testing.assert_array_equal(plain[1], together(epochs[0])[1])


def test_crops_are_the_boxes_of_the_plan(ramp):
    batches = image_batches.FolderBatches(
        ramp / "train", 1, augment=CROP, seed=1
    )
    found = set()
    for epoch in range(8):
        ((images, _),) = batches.epoch(epoch)
        plan = augmentation.Plan(1, 1, epoch, False, CROP)
        top, left, bottom, right = np.rint(256 * plan.boxes[0])
        rows, columns = 255 * images[0, :, 112, 0], 255 * images[0, 112, :, 1]
        if plan.flips[0]:
            columns = columns[::-1]
        for values, start, stop in (
            (rows, top, bottom),
            (columns, left, right),
        ):
            side = stop - start
            places = start + (np.arange(224) + 0.5) * side / 224 - 0.5
            places = places.clip(start, stop - 1)
            np.testing.assert_allclose(values, places, atol=1e-2)
        found.add((top, left, bottom, right, bool(plan.flips[0])))
    assert len(found) == 8
    assert len({flip for *_, flip in found}) == 2


def test_padding_moves_the_central_crop(ramp):
    augment = datasets.Augmentation(3, False)
    batches = image_batches.FolderBatches(ramp / "train", 1, augment=augment)
    for epoch in range(5):
        ((images, _),) = batches.epoch(epoch)
        offset = augmentation.Plan(1, 0, epoch, False, augment).offsets[0]
        expected = 128 + offset - 3
        np.testing.assert_allclose(255 * images[0, 112, 112, :2], expected)


def test_boxes():
    boxes = augmentation.draw_boxes(np.random.default_rng(0), 20_000)
    assert boxes.min() >= 0
    assert boxes.max() <= 1
    height, width = (boxes[:, 2:] - boxes[:, :2]).T
    area, ratio = height * width, width / height
    assert 0.08 <= area.min() < 0.081
    assert 0.99 < area.max() <= 1
    assert ratio.min() * (1 + 1e-9) >= 3 / 4
    assert ratio.max() <= 4 / 3 * (1 + 1e-9)
    assert abs(np.log(ratio).mean()) < 0.01
    small = area < 0.5  # boxes this small always fit
    np.testing.assert_allclose(area[small].mean(), 0.29, atol=0.01)
    center = (boxes[:, :2] + boxes[:, 2:]) / 2
    np.testing.assert_allclose(center.mean(axis=0), 0.5, atol=0.01)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"split": "train+validation"},
            "must be 'train', 'validation' or 'test': validation images",
        ),
        ({"validation_size": 2}, "'zoo' has its own validation split"),
        ({"augment": 3}, "`augment` must be None"),
        ({"augment": CROP, "split": "test"}, "except for the training splits"),
    ],
)
def test_bad_arguments(folder, kwargs, message):
    with pytest.raises(ValueError, match=message):
        load(folder, **kwargs)


def test_crops_are_of_folders_alone(tmp_path):
    message = "`resized_crop` must be False except for folders of images"
    with pytest.raises(ValueError, match=message):
        datasets.load_pydataset("cifar10", augment=CROP, data_dir=tmp_path)
    images = np.zeros((2, 3, 3, 1), "uint8")
    with pytest.raises(ValueError, match=message):
        datasets.Batches(images, np.zeros(2, "int32"), augment=CROP)
    with pytest.raises(ValueError, match=r"`padding` must be 0 where .* 4"):
        datasets.Augmentation(resized_crop=True)
    with pytest.raises(ValueError, match="`resized_crop` must be True or Fal"):
        datasets.Augmentation(0, True, 1)


def test_folders_are_not_exported(folder, tmp_path):
    for name in (folder, "imagenet_folder"):
        message = f"which is read as it is. Received: '{name}"
        with pytest.raises(ValueError, match=message):
            datasets.export(name, tmp_path / "out.npz")


@pytest.mark.parametrize(
    "augment",
    swept((None, CROP, datasets.Augmentation(5, True, turn=True)), CROP),
    ids=["none", "crops", "turns"],
)
def test_grain_reads_what_tensorflow_reads(folder, augment):
    pytest.importorskip("grain")
    shard = datasets.Shard(1, 2)
    for split in ("train", "validation"):
        kwargs = {
            "batch_size": 4,
            "augment": augment if split == "train" else None,
            "seed": 3,
            "shard": shard if split == "train" else None,
        }
        expected = load(folder, split, **kwargs)
        found = datasets.load_pydataset(folder, split, **kwargs)
        assert len(found) == len(expected)
        for _ in range(2):
            pairs = zip(found, numpy_batches(expected), strict=True)
            for (images, labels), (others, of_others) in pairs:
                assert (images.dtype, labels.dtype) == ("float32", "int32")
                np.testing.assert_array_equal(labels, of_others)
                np.testing.assert_allclose(images, others, atol=0.03)
                assert abs(images - others).mean() < 1 / 255


@pytest.mark.parametrize(
    "augment", [CROP, datasets.Augmentation(5, True, turn=True)]
)
def test_readers_agree_to_rounding(ramp, augment):
    """On a file whose pixels all decoders return as they are."""
    pytest.importorskip("grain")
    pytest.importorskip("tensorflow")
    found, expected = (
        image_batches.FolderBatches(ramp / "train", 1, reader, augment=augment)
        for reader in ("grain", "tf.data")
    )
    for epoch in range(4):
        ((images, _),), ((others, _),) = (
            batches.epoch(epoch) for batches in (found, expected)
        )
        np.testing.assert_allclose(images, others, atol=2e-6)


@pytest.mark.parametrize("reader", ["grain", "tf.data"])
@pytest.mark.parametrize(
    "content", [b"text", b"\xff\xd8\xff\xe0 cut off", None]
)
def test_broken_file_is_named(ramp, reader, content):
    pytest.importorskip({"grain": "grain", "tf.data": "tensorflow"}[reader])
    path = ramp / "train" / "one" / "zero.png"
    path.touch()
    batches = image_batches.FolderBatches(ramp / "train", 1, reader)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(OSError, match=f"The image {path} cannot be read"):
        list(batches.epoch(0))


def test_fit_reads_epochs_of_grain(folder):
    pytest.importorskip("grain")
    dataset = datasets.load_pydataset(folder, batch_size=5, seed=1)
    spy = make_spy((224, 224, 3))
    spy.fit(dataset, epochs=2, verbose=0, shuffle=False)
    epochs = np.split(np.concatenate([labels for _, labels in spy.seen]), 2)
    again = datasets.load_pydataset(folder, batch_size=5, seed=1)
    for found in epochs:
        expected = np.concatenate([labels for _, labels in again])
        np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(*epochs)


def test_folders_need_grain_without_tensorflow(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    dataset = datasets.load_pydataset(folder)
    with pytest.raises(ImportError, match=r"keras-equiattn\[grain\]"):
        next(iter(dataset))


def test_folders_that_cannot_be(tmp_path, capsys):
    def message(name=tmp_path / "zoo"):
        with pytest.raises(datasets.DatasetNotPreparedError) as caught:
            load(name, data_dir=tmp_path)
        return str(caught.value)

    root = tmp_path / "zoo"
    for part in ("train", "val"):
        told = message()
        assert f"{root / part} does not exist" in told
        assert "train/<class>/<image> and val/<class>/<image>" in told
        (root / part).mkdir(parents=True)
    assert "only in train: 0 (none); only in val: 0 (none)" in message()
    for name in "abcd":
        (root / "train" / name).mkdir()
    (root / "val" / "e").mkdir()
    assert "only in train: 4 (a, b, c); only in val: 1 (e)" in message()
    (root / "val" / "e").rmdir()
    for name in "abcd":
        (root / "val" / name).mkdir()
    assert "must hold images in its class folders" in message()

    # By its name the dataset has 1000 classes, in a folder of that name.
    folder = tmp_path / "imagenet_folder"
    assert f"{folder / 'train'} does not exist" in message(folder.name)
    command = [folder.name, "--data-dir", str(tmp_path)]
    assert main(["prepare", *command]) == 1
    assert "nothing downloads them" in capsys.readouterr().err
    assert access.state(folder.name, tmp_path) == "not prepared"
    root.rename(folder)
    told = message(folder.name)
    assert "must hold the 1000 classes of ImageNet. Found: 4." in told
    assert access.state(folder.name, tmp_path).endswith(f"({told})")
    for part in ("train", "val"):
        for index in range(996):
            (folder / part / f"n{index:08}").mkdir()
    assert access.state(folder.name, tmp_path) == "prepared"
    assert main(["prepare", *command]) == 0
    assert f"is ready: {folder}" in capsys.readouterr().out


def test_names_and_paths(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert datasets.info("zoo").classes == 3
    with pytest.raises(ValueError, match="Unknown dataset 'zo'"):
        datasets.info("zo")
    with pytest.raises(datasets.DatasetNotPreparedError, match="not exist"):
        datasets.info("data/zo")
