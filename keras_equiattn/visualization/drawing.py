"""Parts of the pictures: names, images, frames, where a window lies."""

import dataclasses
import math
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.visualization.sites import Site

# The colour of the frame around a pixel.
MARK = "tab:orange"


def matplotlib_parts() -> tuple[Any, Any]:
    """Matplotlib's `Figure`, without pyplot or a window, and `Normalize`."""
    try:
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib, which is not installed: "
            'pip install "keras-equiattn[viz]"'
        ) from error
    return Figure, Normalize


def one_image(image: Any) -> np.ndarray:
    pixels = np.asarray(keras.ops.convert_to_numpy(image))
    if pixels.ndim == 4 and len(pixels) == 1:
        pixels = pixels[0]
    if pixels.ndim != 3:
        raise ValueError(
            "`image` must be one image (height, width, channels). "
            f"Received: shape {pixels.shape}"
        )
    return pixels


def element_name(group: str | groups.Group, element: int) -> str:
    """The action of an element in words: "90°", "mirror", "mirror, 90°".

    Args:
        group: a group or its name.
        element: index of the element.
    """
    group = groups.get(group)
    mirror, turn = divmod(group.check_element(element), group.rotations)
    angle = f"{360 * turn / group.rotations:g}°"
    if not mirror:
        return angle
    return f"mirror, {angle}" if turn else "mirror"


def displayed(images: np.ndarray) -> np.ndarray:
    """Values in [0, 1], one or three channels."""
    images = images.astype("float64")
    if images.shape[-1] not in (1, 3):
        images = images.mean(-1, keepdims=True)
    low, high = images.min(), images.max()
    if low < 0 or high > 1:
        images = (images - low) / (high - low or 1)
    return images


def draw_image(panel: Any, pixels: np.ndarray) -> None:
    panel.imshow(
        pixels if pixels.shape[-1] == 3 else pixels[..., 0],
        cmap="gray",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    frame(panel, pixels)


def frame(panel: Any, pixels: np.ndarray) -> None:
    """Limits the view to the image, however far a map reaches."""
    height, width = pixels.shape[:2]
    panel.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    panel.set(xticks=[], yticks=[])


@dataclasses.dataclass
class Place:
    """A pixel of a layer, and its window, in the image.

    Attributes:
        pixel: row and column in the image.
        query: row and column of the pixel in the map of the layer.
        own: left, right, bottom and top of the pixel in the image.
        window: left, right, bottom and top of its window, or of the whole map.
        whole: whether the window is the whole map.
    """

    pixel: tuple[int, int]
    query: tuple[int, int]
    own: tuple[float, ...]
    window: tuple[float, ...]
    whole: bool

    @classmethod
    def of(
        cls, site: Site, size: tuple[int, ...], pixel: tuple[int, int]
    ) -> "Place":
        """The pixel of the layer that covers this one of the image.

        Raises:
            ValueError: for a pixel outside of the image, or outside of the part
                of it that the map of the layer covers.
        """
        try:
            place = [_checks.integer(n, "pixel", 0) for n in pixel]
        except (TypeError, ValueError):
            place = []
        if len(place) != 2 or place[0] >= size[0] or place[1] >= size[1]:
            raise ValueError(
                "`pixel` must be (row, column) within the image of size "
                f"{tuple(size)}. Received: {pixel!r}"
            )
        layer, pitches = site.operation, site.pitches[0]
        shape = tuple(site.tensors[0].shape[1:])
        if layer.data_format == "channels_first":
            shape = shape[1:]
        query, middle, halves, centres, reaches = [], [], [], [], []
        covered = []
        for axis in (0, 1):
            pitch = pitches[axis]
            count = shape[axis] or math.ceil(size[axis] / pitch)
            # Maps lie centred on the image.
            start = (size[axis] - count * pitch) / 2
            first = max(math.floor(start), 0)
            last = min(math.ceil(start + count * pitch), size[axis]) - 1
            covered.append((first, last))
            # If a map leaves out an odd number of pixels, half of a pixel is
            # covered at its border.
            n = int((place[axis] + 0.5 - start) // pitch)
            n = min(max(n, 0), count - 1)
            window = layer.window
            stride = 1 if window is None else window.strides[axis]
            # With strides the query sits on the first of its pixels.
            query.append(n // stride)
            middle.append(start + (n - n % stride + 0.5) * pitch - 0.5)
            halves.append(pitch / 2)
            if window is None:
                centres.append((size[axis] - 1) / 2)
                reaches.append(count * pitch / 2)
            else:
                reach = window.size[axis] * window.dilation_rate[axis]
                centres.append(middle[axis])
                reaches.append(reach * pitch / 2)
        if not all(
            first <= n <= last
            for n, (first, last) in zip(place, covered, strict=True)
        ):
            rows, columns = (f"{first} to {last}" for first, last in covered)
            raise ValueError(
                f"`pixel` must be one that the map of '{layer.name}' covers: "
                f"rows {rows} and columns {columns} of the image. "
                f"Received: {pixel!r}"
            )
        return cls(
            (place[0], place[1]),
            (query[0], query[1]),
            _box(middle, halves),
            _box(centres, reaches),
            layer.window is None,
        )

    def mark(self, panel: Any) -> None:
        """Draws a frame around the pixel."""
        left, right, bottom, top = self.own
        panel.plot(
            [left, right, right, left, left],
            [top, top, bottom, bottom, top],
            color=MARK,
            linewidth=1.5,
        )

    def zoom(self, panel: Any) -> None:
        """Shows the window, and half as much on each side."""
        if self.whole:
            return
        left, right, bottom, top = self.window
        x, y = (right - left) / 2, (bottom - top) / 2
        panel.set(xlim=(left - x, right + x), ylim=(bottom + y, top - y))


def _box(middle: list[float], reach: list[float]) -> tuple[float, ...]:
    """Left, right, bottom and top."""
    return (
        middle[1] - reach[1],
        middle[1] + reach[1],
        middle[0] + reach[0],
        middle[0] - reach[0],
    )
