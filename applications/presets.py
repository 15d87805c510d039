"""Networks with their weights, in folders that have the layout of KerasHub.

A preset is a folder with four files: `config.json` is the network,
`model.weights.h5` its weights, `metadata.json` has versions and the checksums
of both, and `README.md` is the card that says what the network was trained on.
"""

import datetime
import json
import os
from importlib import import_module
from importlib import metadata
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn._files import checksum
from keras_equiattn._files import write_json
from keras_equiattn.graphs import require_graph

SHIPPED = Path(__file__).parent / "weights"
CONFIG = "config.json"
METADATA = "metadata.json"
WEIGHTS = "model.weights.h5"
CARD = "README.md"
HUB = "hf://"


def list_presets() -> list[str]:
    """Returns the names of the presets that are part of the package.

    Returns:
        The names, in alphabetical order.
    """
    return sorted(path.name for path in SHIPPED.iterdir() if path.is_dir())


def from_preset(
    preset: str | os.PathLike[str], load_weights: bool = True
) -> keras.Model:
    """Builds a network from a preset, with its weights.

    The files are compared with their checksums before anything is built. What
    comes from the Hugging Face Hub is kept in its cache, in the cache folder of
    the user, and loads from there without a network connection.

    Args:
        preset: one of `list_presets()`; a folder that `save_to_preset` has
            written, as `"./name"` if a shipped preset has the same name; or
            `"hf://user/name"` or `"hf://user/name@revision"` for such a folder
            on the Hugging Face Hub, which needs the package `huggingface_hub`.
        load_weights: whether to load the weights. Without them the network
            starts from random ones.

    Returns:
        A functional `keras.Model`, not compiled.

    Raises:
        ValueError: if there is no such preset, a file is missing or does not
            have its checksum, or Keras does not know one of the layers.
        ImportError: if `huggingface_hub` is needed and not installed.
        OSError: if the hub does not give the files, for example because there
            is no connection and they are not in the cache.

    Example:
        >>> from keras_equiattn.applications import from_preset
        >>> model = from_preset("rotmnist_p4cnn_input")
        >>> model.output_shape
        (None, 10)
    """
    _checks.flag(load_weights, "load_weights")
    folder = _folder(preset)
    _check_files(folder, [CONFIG, *([WEIGHTS] if load_weights else [])], preset)
    config = _read_json(folder, CONFIG, preset)
    # This import registers the layers that networks of the package define.
    import_module("keras_equiattn.applications")
    try:
        model = keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Keras cannot build the network of preset={os.fspath(preset)!r}. "
            "If it has layers of another package, import that package first. "
            f"The error of Keras: {error}"
        ) from error
    if load_weights:
        model.load_weights(folder / WEIGHTS)
    return model


def save_to_preset(
    model: keras.Model,
    folder: str | os.PathLike[str],
    card: str | None = None,
) -> None:
    """Writes a network and its weights to a folder, for `from_preset`.

    Args:
        model: a functional or Sequential model that is built.
        folder: a new folder, or one whose preset is to be replaced.
        card: text of the card, in Markdown: what the network was trained on,
            what it is for, its licence. None writes one with what can be read
            from the network.

    Raises:
        ValueError: for a model without a graph, and where a file has the name
            of the folder.
        TypeError: for a folder that is no path.

    Example:
        >>> from keras_equiattn.applications import save_to_preset
        >>> inputs = keras.Input((28, 28, 1))
        >>> outputs = LiftingConv2D(8, 3, group="p4")(inputs)
        >>> save_to_preset(keras.Model(inputs, outputs), "lifting")
    """
    require_graph(model)
    if not isinstance(card, str | None):
        raise ValueError(f"`card` must be a text or None. Received: {card!r}")
    folder = Path(_checks.path(folder, "folder"))
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            "`folder` must not be the path of a file. Received: "
            f"folder={os.fspath(folder)!r}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Without it the folder is no preset until all of it is written.
    (folder / METADATA).unlink(missing_ok=True)
    config = keras.saving.serialize_keras_object(model)
    # A network that is loaded is not compiled: its loss may be unknown there.
    config.pop("compile_config", None)
    # Lines for each value would double the size of a package with many.
    write_json(folder / CONFIG, config, indent=None)
    save_weights(model, folder / WEIGHTS)
    text = _card(model, folder.name) if card is None else card
    (folder / CARD).write_text(text, encoding="utf-8")
    about = {
        "keras_version": keras.__version__,
        "keras_equiattn_version": metadata.version("keras-equiattn"),
        "parameter_count": int(model.count_params()),
        "date_saved": datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S"),
        "sha256": {name: checksum(folder / name) for name in (CONFIG, WEIGHTS)},
    }
    write_json(folder / METADATA, about)


def save_weights(model: keras.Model, path: Path) -> None:
    """Saves the weights alone; Keras adds those of an optimiser."""
    bare = model
    if model.compiled:
        bare = type(model).from_config(model.get_config())
        bare.set_weights(model.get_weights())
    bare.save_weights(path)


def _folder(preset: str | os.PathLike[str]) -> Path:
    """The folder of a preset, which may have to be downloaded."""
    if not isinstance(preset, str | os.PathLike):
        raise ValueError(
            "`preset` must be a name, a folder or an address. Received: "
            f"preset={preset!r}"
        )
    text = os.fspath(preset)
    if text.startswith(HUB):
        return _from_hub(text)
    if text in list_presets():
        return SHIPPED / text
    if text and Path(text).is_dir():
        return Path(text)
    also = f". A preset may also be a folder, or '{HUB}user/name'"
    return SHIPPED / _checks.known_name(text, "preset", list_presets(), also)


def _from_hub(address: str) -> Path:
    """The folder where the hub's own package keeps the files."""
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(
            f"A preset such as {address!r} needs the package huggingface_hub: "
            "pip install keras-equiattn[hub]"
        ) from None
    name, _, revision = address.removeprefix(HUB).partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(
            f"A preset on the hub is '{HUB}user/name' or "
            f"'{HUB}user/name@revision'. Received: preset={address!r}"
        )
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=[CONFIG, METADATA, WEIGHTS, CARD],
        )
    except Exception as error:
        # The hub raises errors of many types, also for a lost connection.
        raise OSError(
            f"The Hugging Face Hub did not give preset={address!r}. Without a "
            "connection, a preset must be in the cache, in a folder or in the "
            f"package. The error of the hub: {error}"
        ) from error
    return Path(folder)


def shipped_weights(name: str) -> Path:
    """The file with the weights of a shipped preset.

    Raises:
        ValueError: if it does not have its checksum.
    """
    _check_files(SHIPPED / name, [WEIGHTS], name)
    return SHIPPED / name / WEIGHTS


def _check_files(
    folder: Path, names: list[str], preset: str | os.PathLike[str]
) -> None:
    """Raises unless files are there and have their checksums."""
    checksums = _read_json(folder, METADATA, preset).get("sha256")
    if not isinstance(checksums, dict):
        raise ValueError(
            f"{METADATA} of a preset must hold checksums, under 'sha256'. "
            f"Received: preset={os.fspath(preset)!r}"
        )
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(
                f"A preset must hold the file {name}. Received: "
                f"preset={os.fspath(preset)!r}, which has "
                f"{sorted(p.name for p in folder.iterdir())}"
            )
        found, expected = checksum(folder / name), checksums.get(name)
        if found != expected:
            raise ValueError(
                f"{name} of preset={os.fspath(preset)!r} is damaged or was "
                f"changed: its SHA-256 is {found}, and {METADATA} says "
                f"{expected}"
            )


def _read_json(
    folder: Path, name: str, preset: str | os.PathLike[str]
) -> dict[str, Any]:
    """The content of a file, which must be a JSON object."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        content = None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} of preset={os.fspath(preset)!r} cannot be read: {error}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"A preset must hold the file {name}, an object in JSON. Received: "
            f"preset={os.fspath(preset)!r}, which has "
            f"{sorted(p.name for p in folder.iterdir())}"
        )
    return content


def _card(model: keras.Model, name: str) -> str:
    """A card with what can be read from the network."""
    inputs = ", ".join(f"`{tuple(x.shape)}`" for x in model.inputs)
    outputs = ", ".join(f"`{tuple(x.shape)}`" for x in model.outputs)
    return (
        "---\nlibrary_name: keras-equiattn\n---\n\n"
        f"# {name}\n\n| | |\n|---|---|\n"
        f"| parameters | {model.count_params():,} |\n"
        f"| inputs | {inputs} |\n"
        f"| outputs | {outputs} |\n\n"
        "```python\n"
        "from keras_equiattn.applications import from_preset\n\n"
        f'model = from_preset("./{name}")\n'
        "```\n"
    )
