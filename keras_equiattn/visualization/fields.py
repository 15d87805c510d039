"""The effective attention of a layer as a map over the image."""

import dataclasses
from typing import Any

import numpy as np

from keras_equiattn.visualization.sites import Maps
from keras_equiattn.visualization.sites import Pitch
from keras_equiattn.visualization.sites import Site

# A map that varies by less is called uniform, and drawn as such.
UNIFORM = 1e-3


def limits(low: float, high: float) -> tuple[float, float, str]:
    """The ends of a scale of colours for these values, and a text on them."""
    text = f"attention {low:.4g} to {high:.4g}"
    if high - low < UNIFORM:
        text += ", uniform"
        # On a scale of their own, rounding errors would look like attention.
        low, high = (low + high - UNIFORM) / 2, (low + high + UNIFORM) / 2
    return low, high, text


@dataclasses.dataclass
class Field:
    """The effective attention of a layer, averaged over its channels.

    Attributes:
        layer: name of the layer.
        values: `(batch, height, width, h)`, one `h` for attention on images.
        on_group: whether there is a group axis.
        pitch: rows and columns of the image per pixel.
        of_output: whether the map is of the output of the layer and not of its
            input.
    """

    layer: str
    values: np.ndarray
    on_group: bool
    pitch: Pitch
    of_output: bool

    @classmethod
    def of(cls, layer: str, site: Site, maps: Maps) -> "Field":
        if "effective" not in maps:
            raise ValueError(
                f"Layer '{layer}' returns no map \"effective\" to draw, but "
                f"{', '.join(map(repr, maps))}.{_instead(maps)}"
            )
        values = maps["effective"].mean(-1)
        on_group = values.ndim == 4
        if not on_group:
            values = values[..., None]
        # A map of its input, or of its output?
        size = tuple(site.tensors[0].shape[1:])
        first = site.operation.data_format == "channels_first"
        of_output = values.shape[1:3] != (size[1:3] if first else size[:2])
        return cls(layer, values, on_group, site.pitches[of_output], of_output)

    def require_group_axis(self, name: str, value: Any) -> None:
        if not self.on_group:
            raise ValueError(
                f"`{name}` must be None: the map of '{self.layer}' has no "
                f"group axis. Received: {value!r}"
            )

    def extent(self, size: tuple[int, int]) -> tuple[float, ...]:
        """Left, right, bottom, top in pixels of the image, centred on it."""
        (rows, columns), (height, width) = self.values.shape[1:3], size
        y, x = rows * self.pitch[0] / 2, columns * self.pitch[1] / 2
        middle = (height - 1) / 2, (width - 1) / 2
        return middle[1] - x, middle[1] + x, middle[0] + y, middle[0] - y


def _instead(*maps: Maps) -> str:
    """A hint at the function that draws windows, if the maps are of windows."""
    if not any({"window", "image"} & set(found) for found in maps):
        return ""
    return " `plot_window_attention` draws what a pixel attends to."


def most_varied(maps: dict[str, Maps]) -> str:
    """The layer whose map has the largest standard deviation over space."""
    spreads = {
        name: float(found["effective"].mean(-1).std(axis=(1, 2)).max())
        for name, found in maps.items()
        if "effective" in found
    }
    if not spreads:
        raise ValueError(
            'No attentive layer of the model returns an "effective" map.'
            + _instead(*maps.values())
        )
    return max(spreads, key=lambda name: spreads[name])
