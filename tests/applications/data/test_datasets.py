"""Splits, files, command line and messages of the datasets."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import zipfile

import numpy as np
import pytest
from dataset_helpers import get_loader
from dataset_helpers import LOADERS
from dataset_helpers import once
from dataset_helpers import random_arrays

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data.__main__ import main
from keras_equiattn.applications.data.sources import catalogue
from keras_equiattn.applications.data.sources import digits
from keras_equiattn.applications.data.sources import npz

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
    facts = dataclasses.replace(catalogue.INFOS["pcam"], shape=(4, 4, 3))
    arrays = {"metadata": npz.metadata(facts)}
    parts = {"train": 7, "validation": 3, "test": 2}
    for seed, (part, count) in enumerate(parts.items()):
        images, labels = random_arrays(count, facts.shape, seed)
        arrays[f"{part}_images"] = images
        arrays[f"{part}_labels"] = labels % 2
    path = tmp_path / "pcam.npz"
    npz.save(path, arrays)
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
        catalogue.INFOS["digits_upright"], shape=(6, 5, 2), validation_size=1
    )
    for seed in range(2):
        images, labels = random_arrays(4, facts.shape, seed)
        arrays = {"metadata": npz.metadata(facts)}
        for part in ("train", "test"):
            arrays[f"{part}_images"] = images
            arrays[f"{part}_labels"] = labels
        npz.save(path, arrays)
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
        from keras_equiattn.applications.data import datasets

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
        assert 'pip install "keras-equiattn[tensorflow]"' in line
    assert "load_pydataset" in lines[1]


@once
@pytest.mark.sweep
@pytest.mark.parametrize("place", ["data", "datasets"])  # today's, former
def test_command_line_exports(place, tmp_path):
    path = tmp_path / "out.npz"
    module = f"keras_equiattn.applications.{place}"
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
    assert main(["list", "--data-dir", str(tmp_path)]) == 0
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
            f"data prepare cifar10 --data-dir {tmp_path}",
        ),
    ]:
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error
    assert main(["export", "digits", str(path), "--force"]) == 0
    assert main(["prepare", "digits"]) == 0
    assert "nothing to prepare" in capsys.readouterr().out


@once
def test_a_failed_download_is_one_clear_error(tmp_path, monkeypatch, capsys):
    tfds = pytest.importorskip("tensorflow_datasets")

    class Builder:
        def download_and_prepare(self):
            raise AssertionError("no connection")

    monkeypatch.setattr(tfds, "builder", lambda name, data_dir: Builder())
    arguments = ["prepare", "rot_mnist", "--data-dir", str(tmp_path)]
    assert main(arguments) == 1
    assert capsys.readouterr().err == (
        "error: tensorflow_datasets could not prepare 'mnist' in "
        f"{tmp_path}: no connection\n"
    )


# --- Bad arguments ----------------------------------------------------------


@once
@pytest.mark.parametrize("pipeline", LOADERS)
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "cifar-10"}, "Did you mean 'cifar10'"),
        ({"name": "imagenet"}, "datasets are: digits, .* or the path"),
        ({"name": 3}, "`name` must be a dataset's name .* Received: 3"),
        (
            {"split": "val"},
            "`split` must be 'train' or 'valid.* Received: 'val",
        ),
        ({"batch_size": 0}, "`batch_size` must be a positive integer"),
        ({"batch_size": 2.0}, "`batch_size` must .* Received: 2.0"),
        ({"batch_size": True}, "`batch_size` must .* Received: True"),
        ({"augment": 4}, "`augment` must be None, .* Received: 4"),
        (
            {"augment": True, "split": "test"},
            "`augment` must be None, except for the training .* split='test'",
        ),
        ({"seed": -1}, "`seed` must be a non-negative integer"),
        ({"seed": "0"}, "`seed` must be a non-negative .* Received: '0'"),
        ({"data_dir": 1}, "`data_dir` must be a path or None. Received: 1"),
        ({"validation_size": 0}, "`validation_size` must be a positive int"),
        ({"validation_size": 0.1}, "`validation_size` must .* Received: 0.1"),
        ({"validation_size": 1300}, "less than the 1300 images .* 1300"),
        (
            {"validation_size": 10, "name": "digits"},
            "must be a multiple of 4: 'digits' has 4 images of .* Received: 10",
        ),
        (
            {"validation_size": 10, "name": "pcam"},
            "'pcam' has its own validation split. Received: 10",
        ),
        ({"normalization": 3}, r"None or \(mean, std\)"),
        ({"normalization": ((0.1, 0.2), 1)}, r"each a number or 1 of them"),
        ({"normalization": (0, 0)}, "positive, finite stds"),
        ({"normalization": (np.nan, 1)}, "finite means"),
        ({"initial_epoch": -1}, "`initial_epoch` must be a non-negative int"),
    ],
)
def test_bad_arguments_of_the_loaders(pipeline, kwargs, message):
    load = get_loader(pipeline)
    with pytest.raises(ValueError, match=message):
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
        with pytest.raises(ValueError, match=key):
            datasets.load_pydataset(name, data_dir=tmp_path, **kwargs)


@once
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"images": [[1]]}, "uint8 or float32 .* Received: list"),
        (
            {"images": np.zeros((2, 3, 3), "uint8")},
            r"Received: uint8 of shape \(2, 3, 3\)",
        ),
        ({"images": np.zeros((2, 3, 3, 1))}, "Received: float64 of"),
        ({"images": np.zeros((0, 3, 3, 1), "uint8")}, "n > 0"),
        ({"labels": np.zeros(3, "int32")}, "of 2 integers"),
        ({"labels": np.zeros(2)}, "Received: float64 of shape"),
        ({"batch_size": 0}, "`batch_size` must be a positive integer"),
        ({"shuffle": 1}, "`shuffle` must be True or False. Received: 1"),
        ({"augment": "yes"}, "`augment` must be None"),
        ({"seed": None}, "`seed` must be a non-negative .* Received: None"),
        ({"normalization": (1,)}, r"None or \(mean, std\)"),
        ({"initial_epoch": 0.5}, "`initial_epoch` must be .* Received: 0.5"),
    ],
)
def test_bad_arguments_of_batches(kwargs, message):
    good = {
        "images": np.zeros((2, 3, 3, 1), "uint8"),
        "labels": np.zeros(2, "int32"),
    }
    with pytest.raises(ValueError, match=message):
        datasets.Batches(**{**good, **kwargs})


@once
def test_bad_arguments_of_augmentation_and_counter():
    for padding in (-1, 1.5):
        with pytest.raises(ValueError, match=f"`padding` .* {padding}"):
            datasets.Augmentation(padding)
    with pytest.raises(ValueError, match=r"`flip` must be .* Received: 1"):
        datasets.Augmentation(4, 1)
    with pytest.raises(ValueError, match="what load or load_pydataset return"):
        datasets.EpochCounter([1, 2])


@once
def test_bad_arguments_of_files(tmp_path, digits_npz):
    export = datasets.export
    with pytest.raises(ValueError, match="Unknown dataset 'mnist'"):
        export("mnist", tmp_path / "out.npz")
    with pytest.raises(ValueError, match="`name` must be a dataset's name"):
        export(digits_npz, tmp_path / "out.npz")
    with pytest.raises(ValueError, match="`name` must be a dataset's name"):
        datasets.prepare(digits_npz)
    with pytest.raises(ValueError, match=r"`path` must end in \.npz"):
        export("digits", tmp_path / "out.npy")
    with pytest.raises(ValueError, match=r"`path` must be a path. Rec.* 1"):
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
    digits.digits_arrays.cache_clear()
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


def changed_npz(path, target, **changes):
    """A copy of a dataset with other arrays, or without those that are None."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    for name, change in changes.items():
        if change is None:
            del arrays[name]
        else:
            arrays[name] = change(arrays[name])
    np.savez(target, **arrays)
    return target


def with_nan(images):
    images = images.astype("float32")
    images[0, 0, 0, 0] = np.nan
    return images


def with_facts(**facts):
    def change(metadata):
        return np.array(json.dumps({**json.loads(str(metadata)), **facts}))

    return change


@pytest.mark.once
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": lambda y: y + 1}, "from 0 to 9.*labels from 1 to 10"),
        ({"train_labels": lambda y: y - 1}, "from 0 to 9.*labels from -1 to 8"),
        ({"train_labels": lambda y: y.astype(str)}, "integers.*<U"),
        ({"train_labels": lambda y: y[:-1]}, "integers"),
        ({"train_images": None}, "has no train_images"),
        ({"train_images": lambda x: x[:, :-1]}, r"shape \(28, 28, 1\)"),
        ({"train_images": with_nan}, "finite.*1 values"),
        ({"train_images": lambda x: x.astype("int64")}, "uint8 or float32"),
        ({"train_images": lambda x: x.astype(object)}, "cannot be read"),
        ({"metadata": with_facts(classes=10**9)}, "not a dataset"),
        ({"metadata": with_facts(classes=0)}, "not a dataset"),
    ],
)
def test_files_that_no_network_can_learn(
    digits_npz, tmp_path, changes, message
):
    path = changed_npz(digits_npz, tmp_path / "other.npz", **changes)
    with pytest.raises(ValueError, match=message):
        datasets.load_pydataset(path, "train")


@pytest.mark.once
def test_damaged_file(digits_npz, tmp_path):
    path = tmp_path / "other.npz"
    content = bytearray(pathlib.Path(digits_npz).read_bytes())
    with zipfile.ZipFile(digits_npz) as archive:
        place = archive.getinfo("train_images.npy").header_offset
    for offset in range(200, 240):
        content[place + offset] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.npz cannot be read"):
        datasets.load_pydataset(path, "train")


@pytest.mark.once
def test_damaged_facts(digits_npz, tmp_path):
    """Two bits of one byte are flipped, at many places, one at a time."""
    path = tmp_path / "other.npz"
    content = pathlib.Path(digits_npz).read_bytes()
    with zipfile.ZipFile(digits_npz) as archive:
        entry = archive.getinfo("metadata.npy")
    first = content.index(b"PK\x01\x02")  # the list of all entries
    places = {entry.header_offset, *range(first, len(content), 7)}
    places |= set(range(entry.header_offset, entry.header_offset + 500, 3))
    told = []
    for place in sorted(places):
        broken = bytearray(content)
        broken[place] ^= 0x24
        path.write_bytes(broken)
        try:
            npz.info(path)
        except ValueError as error:
            told.append(str(error))
    assert len(told) > 100
    assert all("is not a dataset of this library" in text for text in told)
