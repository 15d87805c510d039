"""Raw arrays behind `keras_equiattn.applications.datasets`.

Everything here returns NumPy arrays: images of shape `(n, height, width,
channels)`, uint8 in 0..255 or float32 in [0, 1], and int32 labels of shape
`(n,)`. Optional packages are imported inside the functions that need them, so
that the module loads with NumPy alone, and nothing is ever downloaded except
by `prepare`.
"""

import contextlib
import functools
import importlib
import json
import os
import tempfile
import zipfile
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from typing import TypeAlias

import keras
import numpy as np
from numpy.typing import NDArray

from keras_equiattn import _checks

Arrays: TypeAlias = tuple[NDArray[Any], NDArray[np.int32]]

COMMAND = "python -m keras_equiattn.applications.datasets"
# Larger datasets are streamed from disk instead of held in memory.
MEMORY_LIMIT = 2 * 10**9
NPZ_FORMAT = "keras-equiattn dataset 1"
# Mean and deviation of its pixels in [0, 1], in RGB.
IMAGENET_NORMALIZATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class DatasetNotPreparedError(FileNotFoundError):
    """The data is not on disk; the message says how to put it there."""


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about a dataset that a model or a recipe needs.

    Attributes:
        name: Name of the dataset.
        shape: Shape of one image, `(height, width, channels)`.
        classes: Number of classes.
        mean: Mean of the training pixels in [0, 1], one per channel.
        std: Standard deviation of the same pixels, one per channel.
        validation_size: Default number of validation images, cut from the end
            of the training pool; None when the dataset has its own
            validation split.
        views: Images made of each source image. They are neighbours in the
            pool, so a validation size that is a multiple of `views` shares no
            source image with the training split.
    """

    name: str
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    validation_size: int | None
    views: int = 1

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """`(mean, std)`, as `load` takes it."""
        return self.mean, self.std


INFOS = {
    info.name: info
    for info in (
        DatasetInfo(
            "digits", (28, 28, 1), 10, (0.1565,), (0.2880,), 800, views=4
        ),
        DatasetInfo(
            "digits_upright", (28, 28, 1), 10, (0.1565,), (0.2952,), 200
        ),
        DatasetInfo("rot_mnist", (28, 28, 1), 10, (0.1309,), (0.2901,), 2000),
        DatasetInfo(
            "cifar10",
            (32, 32, 3),
            10,
            (0.4914, 0.4822, 0.4465),
            (0.2470, 0.2435, 0.2616),
            5000,
        ),
        DatasetInfo(
            "cifar100",
            (32, 32, 3),
            100,
            (0.5071, 0.4865, 0.4409),
            (0.2673, 0.2564, 0.2762),
            5000,
        ),
        DatasetInfo(
            "pcam",
            (96, 96, 3),
            2,
            (0.701, 0.538, 0.692),
            (0.235, 0.277, 0.213),
            None,
        ),
        DatasetInfo(
            "imagenet_folder",
            (224, 224, 3),
            1000,
            *IMAGENET_NORMALIZATION,
            None,
        ),
    )
}
TFDS_NAMES = {
    "rot_mnist": "mnist",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "pcam": "patch_camelyon",
}


def optional_import(module: str, extra: str, hint: str = "") -> ModuleType:
    """Imports an optional package or says how to install it.

    Args:
        module: Name of the module.
        extra: The extra of this library that installs it.
        hint: A sentence for the message of the error.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{package} is needed here and cannot be imported. Install it "
            f'with: pip install "keras-equiattn[{extra}]"{hint}'
        ) from error


def import_tensorflow(hint: str = "") -> Any:
    """Imports TensorFlow; for another backend it only feeds data."""
    tf = optional_import("tensorflow", "tensorflow", hint)
    if keras.backend.backend() != "tensorflow":
        # It must not claim the GPU's memory; too late where it runs already.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
    return tf


def resolve_data_dir(data_dir: str | os.PathLike[str] | None) -> Path:
    """Returns the folder of the prepared datasets.

    Args:
        data_dir: The folder, or None for the environment's `TFDS_DATA_DIR`
            and else `~/tensorflow_datasets`.
    """
    if data_dir is None:
        data_dir = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    elif not isinstance(data_dir, str | os.PathLike):
        raise ValueError(
            f"`data_dir` must be a path or None. Received: {data_dir!r}"
        )
    return Path(data_dir).expanduser().absolute()


def not_prepared(name: str, data_dir: Path) -> DatasetNotPreparedError:
    """The error for a dataset that is not in `data_dir`."""
    option = ""
    if data_dir != resolve_data_dir(None):
        option = f" --data-dir {data_dir}"
    return DatasetNotPreparedError(
        f"Dataset {name!r} is not prepared in {data_dir}. Prepare it once "
        f"with: {COMMAND} prepare {name}{option}"
    )


# --- Embedded digits ------------------------------------------------------


@functools.lru_cache(maxsize=2)
def digits_arrays(rotated: bool) -> tuple[Arrays, Arrays]:
    """Builds scikit-learn's 1797 digits as 28x28 images.

    The 8x8 digits are enlarged to 20x20 by cubic splines and centred. By a
    fixed permutation 1300 digits make the training pool and 497 the test
    split. scikit-learn does not say who wrote which digit, so the writers of
    the splits are not distinct.

    Args:
        rotated: Whether every digit appears at four uniform angles, one after
            the other, instead of once and upright.

    Returns:
        `((train_images, train_labels), (test_images, test_labels))`, uint8
        images of shape `(n, 28, 28, 1)`.
    """
    ndimage = optional_import("scipy.ndimage", "examples")
    sklearn_datasets = optional_import("sklearn.datasets", "examples")
    source, labels = sklearn_datasets.load_digits(return_X_y=True)
    source = source.reshape(-1, 8, 8).astype("float32") / 16
    images = np.zeros((len(source), 28, 28), "float32")
    images[:, 4:24, 4:24] = ndimage.zoom(
        source, (1, 2.5, 2.5), order=3, mode="grid-constant", grid_mode=True
    )
    np.clip(images, 0, 1, out=images)
    rng = np.random.default_rng(1797)
    order = rng.permutation(len(images))
    if rotated:
        order = np.repeat(order, INFOS["digits"].views)
        images = rotate(images[order], rng.uniform(0, 360, len(order)))
    else:
        images = images[order]
    labels = labels[order].astype("int32")
    pool = 1300 * len(order) // len(source)
    pixels = to_uint8(images)[..., None]
    return (
        (read_only(pixels[:pool]), read_only(labels[:pool])),
        (read_only(pixels[pool:]), read_only(labels[pool:])),
    )


def rotate(
    images: NDArray[Any], angles: NDArray[Any], extra: str = "examples"
) -> NDArray[np.float32]:
    """Rotates float32 `(n, height, width)` bilinearly by degrees `(n,)`."""
    ndimage = optional_import("scipy.ndimage", extra)
    out = np.empty(images.shape, "float32")
    for image, angle, target in zip(images, angles, out, strict=True):
        ndimage.rotate(image, angle, reshape=False, order=1, output=target)
    return out


def to_uint8(images: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounds pixels in [0, 1] to the nearest of 0..255."""
    return np.rint(images * 255).astype("uint8")


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Marks an array that several datasets share."""
    array.setflags(write=False)
    return array


# --- Rotated MNIST --------------------------------------------------------

AMAT_FILES = {
    "train": "mnist_all_rotation_normalized_float_train_valid.amat",
    "test": "mnist_all_rotation_normalized_float_test.amat",
}
ROT_MNIST_SIZES = {"train": 12_000, "test": 50_000}


def find_amat(data_dir: Path) -> dict[str, Path] | None:
    """Looks for the two files of 2007; None when there is neither."""
    for folder in (
        data_dir,
        data_dir / "rot_mnist",
        data_dir / "mnist_rotation_new",
        data_dir / "rot_mnist" / "mnist_rotation_new",
    ):
        paths = {part: folder / file for part, file in AMAT_FILES.items()}
        missing = [path for path in paths.values() if not path.is_file()]
        if not missing:
            return paths
        if len(missing) < len(paths):
            raise DatasetNotPreparedError(
                f"Rotated MNIST in {folder} is incomplete: {missing[0].name} "
                "is missing. Add it, or remove the other .amat file."
            )
    return None


def read_amat(path: Path, rows: int | None = None) -> Arrays:
    """Reads a rotated MNIST text file.

    Each row holds 784 pixels in [0, 1], column by column, and the label.

    Args:
        path: The `.amat` file.
        rows: Number of rows it must have; None takes any.

    Returns:
        float32 images of shape `(n, 28, 28, 1)` and int32 labels.
    """
    table = np.loadtxt(path, dtype="float32", ndmin=2)
    if table.shape[1] != 785 or (rows is not None and len(table) != rows):
        raise ValueError(
            f"{path} must hold {rows or 'n'} rows of 784 pixels and a label. "
            f"Received: an array of shape {table.shape}"
        )
    images, labels = table[:, :-1], table[:, -1]
    if images.min() < 0 or images.max() > 1:
        raise ValueError(f"{path} must hold pixels in [0, 1].")
    if not np.isin(labels, np.arange(10)).all():
        raise ValueError(f"{path} must hold labels in 0..9.")
    upright = images.reshape(-1, 28, 28).transpose(0, 2, 1)
    return np.ascontiguousarray(upright)[..., None], labels.astype("int32")


def build_rot_mnist(
    train: Arrays, test: Arrays, sizes: dict[str, int]
) -> dict[str, NDArray[Any]]:
    """Builds rotated MNIST anew from the upright digits.

    The training pool is drawn from MNIST's training digits; the test split is
    every MNIST test digit and other training digits, so that no digit is in
    both.

    Args:
        train: MNIST's training images and labels.
        test: MNIST's test images and labels.
        sizes: Number of images of `"train"` and of `"test"`.

    Returns:
        uint8 images, int32 labels, and the row of each image in MNIST, training
        digits first (`train_source`, `test_source`).
    """
    images = np.concatenate([train[0], test[0]])[..., 0]
    labels = np.concatenate([train[1], test[1]])
    rng = np.random.default_rng(2007)
    order = rng.permutation(len(train[0])).astype("int32")
    extra = sizes["test"] - len(test[0])
    source = {
        "train": order[: sizes["train"]],
        "test": np.concatenate(
            [
                np.arange(len(train[0]), len(images), dtype="int32"),
                order[sizes["train"] : sizes["train"] + extra],
            ]
        ),
    }
    arrays: dict[str, NDArray[Any]] = {}
    for part, rows in source.items():
        upright = images[rows].astype("float32") / 255
        rotated = rotate(upright, rng.uniform(0, 360, len(rows)), "datasets")
        arrays[f"{part}_images"] = to_uint8(rotated)[..., None]
        arrays[f"{part}_labels"] = labels[rows]
        arrays[f"{part}_source"] = rows
    return arrays


def rot_mnist_cache(data_dir: Path) -> Path:
    """Returns the cached arrays of rotated MNIST, built on first use.

    The files of 2007 come first: their cache holds float32 pixels. The one
    that is built from MNIST holds uint8 pixels.
    """
    folder = data_dir / "rot_mnist"
    original = folder / "rot_mnist_2007.npz"
    built = folder / "rot_mnist_built.npz"
    if original.is_file():
        return original
    amat = find_amat(data_dir)
    arrays: dict[str, NDArray[Any]] = {}
    if amat is not None:
        for part, file in amat.items():
            images, labels = read_amat(file, ROT_MNIST_SIZES[part])
            arrays[f"{part}_images"] = images
            arrays[f"{part}_labels"] = labels
    elif built.is_file():
        return built
    elif tfds_folder("rot_mnist", data_dir) is None:
        raise not_prepared("rot_mnist", data_dir)
    else:
        arrays = build_rot_mnist(
            read_tfds("rot_mnist", data_dir, "train"),
            read_tfds("rot_mnist", data_dir, "test"),
            ROT_MNIST_SIZES,
        )
    path = built if amat is None else original
    folder.mkdir(parents=True, exist_ok=True)
    save_npz(path, arrays)
    return path


def rot_mnist_state(data_dir: Path) -> str:
    """Says from what `rot_mnist_cache` would come."""
    folder = data_dir / "rot_mnist"
    if (folder / "rot_mnist_2007.npz").is_file() or find_amat(data_dir):
        return "prepared (files of 2007)"
    if (folder / "rot_mnist_built.npz").is_file():
        return "prepared (built from MNIST)"
    if tfds_folder("rot_mnist", data_dir):
        return "prepared (to be built from MNIST)"
    return "not prepared"


# --- tensorflow_datasets --------------------------------------------------


def tfds_folder(name: str, data_dir: Path) -> Path | None:
    """Returns the newest prepared version's folder, None without one."""
    versions = []
    for file in (data_dir / TFDS_NAMES[name]).glob("*/dataset_info.json"):
        numbers = file.parent.name.split(".")
        # A preparation under way has a longer name.
        if all(number.isdecimal() for number in numbers):
            versions.append(([int(number) for number in numbers], file.parent))
    return max(versions)[1] if versions else None


def tfds_builder(name: str, data_dir: Path) -> Any:
    """Opens a prepared dataset from its folder, which needs no network."""
    folder = tfds_folder(name, data_dir)
    if folder is None:
        raise not_prepared(name, data_dir)
    import_tensorflow()
    tfds = optional_import("tensorflow_datasets", "datasets")
    return tfds.builder_from_directory(str(folder))


def read_tfds(name: str, data_dir: Path, part: str) -> Arrays:
    """Reads a whole split of a prepared dataset into memory."""
    builder = tfds_builder(name, data_dir)
    tfds = optional_import("tensorflow_datasets", "datasets")
    images, labels = tfds.as_numpy(
        builder.as_dataset(
            split=part, batch_size=-1, shuffle_files=False, as_supervised=True
        )
    )
    return images, labels.astype("int32")


def prepare(name: str, data_dir: Path) -> str:
    """Downloads what a dataset needs and builds its caches.

    Args:
        name: Name of the dataset.
        data_dir: Folder that receives it.

    Returns:
        A sentence for the user.
    """
    if name.startswith("digits"):
        return f"{name} is embedded: nothing to prepare."
    if is_folder(INFOS[name]):
        return f"{name} is ready: {image_folder(INFOS[name], data_dir)}"
    if name == "rot_mnist":
        if rot_mnist_state(data_dir) == "not prepared":
            download(TFDS_NAMES[name], data_dir)
        return f"{name} is ready: {rot_mnist_cache(data_dir)}"
    if tfds_folder(name, data_dir) is None:
        download(TFDS_NAMES[name], data_dir)
    return f"{name} is ready: {tfds_folder(name, data_dir)}"


def download(name: str, data_dir: Path) -> None:
    """Downloads and prepares a dataset of tensorflow_datasets."""
    import_tensorflow()
    tfds = optional_import("tensorflow_datasets", "datasets")
    try:
        tfds.builder(name, data_dir=str(data_dir)).download_and_prepare()
    except Exception as error:
        # Whatever it raises, the command line should say it in one line.
        raise RuntimeError(
            f"tensorflow_datasets could not prepare {name!r} in {data_dir}: "
            f"{error}"
        ) from error


def state(name: str, data_dir: Path) -> str:
    """Says in a few words whether a dataset is on disk."""
    if name.startswith("digits"):
        return "embedded"
    if name == "rot_mnist":
        try:
            return rot_mnist_state(data_dir)
        except DatasetNotPreparedError as error:
            return f"not prepared ({error})"
    if is_folder(INFOS[name]):
        if not (data_dir / name).is_dir():
            return "not prepared"
        try:
            image_folder(INFOS[name], data_dir)
        except DatasetNotPreparedError as error:
            return f"not prepared ({error})"
        return "prepared"
    return "prepared" if tfds_folder(name, data_dir) else "not prepared"


# --- .npz files -----------------------------------------------------------


def save_npz(
    path: Path, arrays: dict[str, NDArray[Any]], compress: bool = True
) -> None:
    """Writes arrays to `path`, which appears only once it is complete."""
    handle, temporary = tempfile.mkstemp(".npz", ".partial_", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            save = np.savez_compressed if compress else np.savez
            save(file, **arrays)  # type: ignore[arg-type]
        # mkstemp's files are private; a dataset need not be.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def npz_info(path: Path) -> DatasetInfo:
    """Reads the `DatasetInfo` that `export` wrote into a file."""
    if not path.is_file():
        raise DatasetNotPreparedError(
            f"{path} does not exist. Write it once with: {COMMAND} export "
            f"NAME {path}"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            metadata = json.loads(str(file["metadata"]))
        if metadata.pop("format") != NPZ_FORMAT:
            raise ValueError("another format")
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in metadata.items()
        }
        return DatasetInfo(**fields)
    except (
        AttributeError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(
            f"{path} is not a dataset of this library. Write one with: "
            f"{COMMAND} export NAME OUT.npz"
        ) from error


def npz_metadata(info: DatasetInfo) -> NDArray[Any]:
    """The `metadata` entry that `npz_info` reads back."""
    return np.array(json.dumps({"format": NPZ_FORMAT, **asdict(info)}))


# --- Folders of images ----------------------------------------------------

# Sides of the squares that images are read as, and that networks see.
READ_SIZE = 256
IMAGE_SIZE = 224
# The folder of each split. The labels of ImageNet's own test images are not
# public: what validates tests as well.
FOLDERS = {"train": "train", "validation": "val", "test": "val"}
LAYOUT = "train/<class>/<image> and val/<class>/<image>, JPEG or PNG"


def is_folder(source: DatasetInfo | Path) -> bool:
    """Whether a dataset is a folder of images."""
    if isinstance(source, Path):
        return source.suffix != ".npz"
    return source.name == "imagenet_folder"


def image_folder(source: DatasetInfo | Path, data_dir: Path) -> Path:
    """The folder of a dataset that is one, its classes checked.

    Args:
        source: What `resolve` returned.
        data_dir: Folder of the prepared datasets; unused by a path.
    """
    if isinstance(source, Path):
        folder_classes(source)
        return source
    folder = data_dir / source.name
    found = len(folder_classes(folder))
    if found != source.classes:
        raise DatasetNotPreparedError(
            f"{folder} must hold the {source.classes} classes of ImageNet. "
            f"Found: {found}. Give the path of a folder in place of "
            f"{source.name!r} for other classes."
        )
    return folder


def folder_classes(folder: Path) -> list[str]:
    """Names of the class folders, which training and validation share."""
    found = {}
    for part in ("train", "val"):
        if not (folder / part).is_dir():
            raise DatasetNotPreparedError(
                f"{folder / part} does not exist. {folder} must hold {LAYOUT}: "
                "put the images there, nothing downloads them."
            )
        found[part] = {
            path.name
            for path in (folder / part).iterdir()
            if path.is_dir() and not path.name.startswith(".")
        }
    if found["train"] != found["val"] or not found["train"]:
        first, count = {}, {}
        for part, other in (("train", "val"), ("val", "train")):
            alone = sorted(found[part] - found[other])
            first[part] = ", ".join(alone[:3]) or "none"
            count[part] = len(alone)
        raise DatasetNotPreparedError(
            f"{folder} must hold {LAYOUT}, with the same classes in both. "
            + "; ".join(
                f"only in {part}: {count[part]} ({first[part]})"
                for part in found
            )
        )
    return sorted(found["train"])


def folder_info(folder: Path) -> DatasetInfo:
    """The facts about a folder of images: those of ImageNet, its classes."""
    return replace(
        INFOS["imagenet_folder"],
        name=folder.name,
        classes=len(folder_classes(folder)),
    )


# --- All of them ----------------------------------------------------------


def resolve(name: str | os.PathLike[str]) -> DatasetInfo | Path:
    """Returns a dataset's facts, or the path when `name` is one.

    That of an .npz file, or of a folder of images: what is no dataset's name,
    and is a folder or has one in front.
    """
    if not isinstance(name, str | os.PathLike):
        raise ValueError(
            "`name` must be a dataset's name or the path of an .npz file or "
            f"of a folder of images. Received: {name!r}"
        )
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text not in INFOS and (
        path.suffix == ".npz" or len(path.parts) > 1 or path.is_dir()
    ):
        return path.absolute()
    also = ", or the path of an .npz file or of a folder of images"
    return INFOS[_checks.known_name(text, "dataset", INFOS, also)]


def read_arrays(
    source: DatasetInfo | Path, data_dir: Path, part: str
) -> Arrays:
    """Reads one part of a dataset.

    Args:
        source: What `resolve` returned.
        data_dir: Folder of the prepared datasets; unused by embedded digits
            and .npz files.
        part: `"train"` (the whole training pool), `"validation"` (of a
            dataset that has its own) or `"test"`.

    Returns:
        Read-only images of shape `(n, height, width, channels)` and int32
        labels of shape `(n,)`.
    """
    if isinstance(source, Path):
        return _npz_arrays(source, source.stat().st_mtime_ns, part)
    if source.name.startswith("digits"):
        train, test = digits_arrays(source.name == "digits")
        return train if part == "train" else test
    if source.name == "rot_mnist":
        path = rot_mnist_cache(data_dir)
        return _npz_arrays(path, path.stat().st_mtime_ns, part)
    return _tfds_arrays(source.name, data_dir, part)


@functools.lru_cache(maxsize=4)
def _npz_arrays(path: Path, changed: int, part: str) -> Arrays:
    del changed  # only tells a rewritten file from the one in the cache
    with np.load(path, allow_pickle=False) as file:
        return (
            read_only(file[f"{part}_images"]),
            read_only(file[f"{part}_labels"].astype("int32")),
        )


@functools.lru_cache(maxsize=4)
def _tfds_arrays(name: str, data_dir: Path, part: str) -> Arrays:
    images, labels = read_tfds(name, data_dir, part)
    return read_only(images), read_only(labels)
