"""The networks by name: who registers them, and how they are found.

A network registers its own variants next to its constructor:

    @register({"mynet_p4": {"group": "p4"}, "mynet_p4m": {"group": "p4m"}})
    def MyNet(group, input_shape=(32, 32, 3), classes=10, name=None): ...

It also says there which function of `keras_equiattn.convert` loads the weights
that the code of a paper's authors has trained.
"""

import difflib
import fnmatch
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple
from typing import TypeAlias
from typing import TypeVar

import keras

Constructor = TypeVar("Constructor", bound=Callable[..., keras.Model])
# Names of networks, and the arguments that make a constructor build each.
Variants: TypeAlias = Mapping[str, Mapping[str, Any]]
Converter: TypeAlias = Callable[..., keras.Model]


class _Registered(NamedTuple):
    """A registered network.

    Attributes:
        constructor: builds it.
        arguments: the arguments with which the constructor builds it.
        converter: loads the authors' weights, a function of a model and a
            file; None if there are none that it could load.
        of_authors: arguments of the constructor for a network into which the
            converter can load.
    """

    constructor: Callable[..., keras.Model]
    arguments: Mapping[str, Any]
    converter: Converter | None
    of_authors: Mapping[str, Any]


_MODELS: dict[str, _Registered] = {}


def register(
    variants: Variants, converter: Converter | None = None, **of_authors: Any
) -> Callable[[Constructor], Constructor]:
    """Returns a decorator that registers variants of a network.

    Args:
        variants: the name of each variant, and the arguments with which the
            constructor builds it. The constructor must also take `name`.
        converter: the function of `keras_equiattn.convert` that loads weights
            of the authors' code into these networks.
        **of_authors: arguments of the constructor for networks into which the
            converter can load.

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
            _MODELS[name] = _Registered(
                constructor, arguments, converter, of_authors
            )
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
    found = _MODELS[check_name(name)]
    return found.constructor(**{"name": name, **found.arguments, **overrides})


def converter_of(name: str) -> tuple[Converter, dict[str, Any]]:
    """Returns the function that loads the authors' weights of a network.

    Args:
        name: one of `list_models()`.

    Returns:
        A function of `keras_equiattn.convert`, and the arguments that
        `get_model` needs for a network into which that function can load.

    Raises:
        ValueError: if there is no network of this name, or none of the
            formats that `keras_equiattn.convert` reads has its weights.

    Example:
        >>> from keras_equiattn import applications
        >>> load, arguments = applications.converter_of("gsanet_rotmnist_p4")
        >>> load.__name__, arguments["epsilon"]
        ('g_selfatt', 1e-12)
    """
    found = _MODELS[check_name(name)]
    if found.converter is None:
        raise ValueError(
            "Weights of the authors can be loaded into networks of attentive "
            "group convolution on z2, p4 and p4m, of group self-attention, "
            f"and into Swin and octic vision transformers. Received: {name!r}"
        )
    return found.converter, dict(found.of_authors)


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
