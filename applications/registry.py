"""The networks by name: who registers them, and how they are found.

A network registers its own variants next to its constructor:

    @register({"mynet_p4": {"group": "p4"}, "mynet_p4m": {"group": "p4m"}})
    def MyNet(group, input_shape=(32, 32, 3), classes=10, name=None): ...
"""

import difflib
import fnmatch
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import TypeAlias
from typing import TypeVar

import keras

Constructor = TypeVar("Constructor", bound=Callable[..., keras.Model])
# Names of networks, and the arguments that make a constructor build each.
Variants: TypeAlias = Mapping[str, Mapping[str, Any]]

_MODELS: dict[str, tuple[Callable[..., keras.Model], Mapping[str, Any]]] = {}


def register(variants: Variants) -> Callable[[Constructor], Constructor]:
    """Returns a decorator that registers variants of a network.

    Args:
        variants: the name of each variant, and the arguments with which the
            constructor builds it. The constructor must also take `name`.

    Returns:
        A decorator that gives back the constructor as it is.

    Raises:
        ValueError: if another network has one of the names.
    """

    def add(constructor: Constructor) -> Constructor:
        taken = sorted(_MODELS.keys() & variants.keys())
        if taken:
            raise ValueError(
                f"A network called '{taken[0]}' is registered already."
            )
        for name, arguments in variants.items():
            _MODELS[name] = constructor, arguments
        return constructor

    return add


def list_models(pattern: str = "*") -> list[str]:
    """Returns the names that `get_model` accepts, in alphabetical order.

    Args:
        pattern: only names that match this pattern are listed. `*` stands for
            any characters, `?` for one character, `[ab]` for one of several,
            as in a shell: `list_models("resnet29_*")`.

    Returns:
        The names. The list is empty if no name matches.
    """
    return sorted(fnmatch.filter(_MODELS, pattern))


def get_model(name: str, **overrides: Any) -> keras.Model:
    """Builds a registered network.

    Args:
        name: one of `list_models()`.
        **overrides: arguments of the network's constructor, which replace the
            registered ones: `classes`, `input_shape`, `normalization`,
            `weights`, ...

    Returns:
        A functional `keras.Model`.

    Raises:
        ValueError: if there is no network of this name (the message lists
            names that are close to it), or if the constructor refuses an
            argument.
    """
    constructor, arguments = _MODELS[check_name(name)]
    return constructor(**{"name": name, **arguments, **overrides})


def check_name(name: Any) -> str:
    """Returns the name of a registered network, or raises.

    Raises:
        ValueError: if there is no network of this name. The message lists
            names that are close to it.
    """
    if name in _MODELS:
        return str(name)
    close = difflib.get_close_matches(str(name), _MODELS, n=5)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ValueError(
        f"Unknown model '{name}'.{hint} The {len(_MODELS)} names are what "
        "`keras_equiattn.applications.list_models()` returns."
    )
