"""How much networks of ACmix rely on attention and on convolution."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_equiattn.layers.acmix.two_paths import TwoPaths
from keras_equiattn.visualization import drawing

# The colours of the rates of attention and of convolution.
COLORS = ("tab:orange", "tab:blue")


def path_rates(model: keras.Model) -> dict[str, tuple[float, float]]:
    """The learned rates of the layers of ACmix in a model.

    Args:
        model: a Keras model, also with models and wrappers in it, such as
            `TimeDistributed`. Layers within other layers are not seen.

    Returns:
        A dict from names of layers, in their order in the model, to the rates
        of attention and of convolution. A layer `inner` of a nested model or
        wrapper `outer` is `"outer/inner"`.

    Raises:
        ValueError: if no layer has learned rates.

    Example:
        >>> from keras_equiattn.layers import ACmix2D
        >>> from keras_equiattn.visualization import path_rates
        >>> inputs = keras.Input((8, 8, 3))
        >>> model = keras.Model(inputs, ACmix2D(4, name="mix")(inputs))
        >>> path_rates(model)
        {'mix': (0.5, 0.5)}

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), figure 5
    """
    found = {
        name: rates
        for layer in model.layers
        for name, rates in _rates(layer, layer.name)
    }
    if not found:
        raise ValueError(
            f"Model '{model.name}' has no learned rates: none of its layers is "
            "an ACmix layer with both paths and rates='learned'."
        )
    return found


def plot_path_rates(
    model: keras.Model, size: tuple[float, float] = (6.0, 3.0)
) -> Any:
    """Draws the learned rates of the layers of ACmix, first to last.

    The picture shows absolute values, since the last weights of a path can
    absorb the sign of its rate.

    Args:
        model: see `path_rates`.
        size: the size of the figure, in inches.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: without matplotlib.
        ValueError: if no layer has learned rates.

    Example:
        >>> from keras_equiattn.layers import ACmix2D
        >>> from keras_equiattn.visualization import plot_path_rates
        >>> inputs = keras.Input((8, 8, 3))
        >>> model = keras.Model(inputs, ACmix2D(4, name="mix")(inputs))
        >>> figure = plot_path_rates(model)
        >>> len(figure.axes[0].lines)
        2

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), figure 5
    """
    figure_class, _ = drawing.matplotlib_parts()
    found = path_rates(model)
    figure = figure_class(figsize=size, layout="constrained")
    panel = figure.subplots()
    for label, color, values in zip(
        ("attention", "convolution"),
        COLORS,
        zip(*found.values(), strict=True),
        strict=True,
    ):
        heights = [abs(value) for value in values]
        panel.plot(heights, marker="o", color=color, label=label)
    panel.set_xticks(range(len(found)), list(found), rotation=90)
    panel.set(ylabel="rate, absolute", title=model.name)
    panel.set_ylim(bottom=0)
    panel.legend()
    return figure


def _rates(
    layer: keras.layers.Layer, name: str
) -> Iterator[tuple[str, tuple[float, float]]]:
    inner = []
    if isinstance(layer, TwoPaths) and layer.learns_rates:
        if not layer.built:
            raise ValueError(f"Layer '{name}' has no rates before it is built.")
        rates = (layer.attention_rate, layer.convolution_rate)
        first, second = (
            float(keras.ops.convert_to_numpy(rate)) for rate in rates
        )
        yield name, (first, second)
    elif isinstance(layer, keras.Model):
        inner = layer.layers
    elif isinstance(layer, keras.layers.Wrapper):
        inner = [layer.layer]
    for each in inner:
        yield from _rates(each, f"{name}/{each.name}")
