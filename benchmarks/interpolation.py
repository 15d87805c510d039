"""How equivariant are groups that do not act on the grid?

    python benchmarks/interpolation.py

Measures `LiftingConv2D` for p8, p12 and p16 on smooth images that vanish
towards the border, with random filters and with filters blurred by a Gaussian
of one pixel. The error is relative to the largest output. "grid" is the worst
over turns by multiples of 90 degrees, "between" the worst over all others. The
last column turns the images alone, there and back: what interpolating the
image costs by itself. Writes `benchmarks/results/interpolation-<date>.json`.
"""

import datetime
import json
from pathlib import Path

import numpy as np
from keras import ops
from scipy import ndimage

from keras_equiattn import groups
from keras_equiattn.applications.training import reporting
from keras_equiattn.layers import LiftingConv2D
from keras_equiattn.ops import group_action
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

RESULTS = Path(__file__).parent / "results"
SIZE = 41


def smooth_images(seed: int = 0) -> np.ndarray:
    """Blurred noise within a disc, `(4, SIZE, SIZE, 1)`."""
    noise = np.random.default_rng(seed).normal(size=(4, SIZE, SIZE))
    blurred = ndimage.gaussian_filter(noise, (0, 2, 2))
    radius = np.hypot(*(np.indices((SIZE, SIZE)) - SIZE // 2))
    window = np.clip((SIZE / 2 - 6 - radius) / 4, 0, 1)
    return (blurred * window)[..., None].astype("float32")


def measure(name: str, size: int, blurred: bool) -> dict[str, object]:
    group = groups.get(name)
    layer = LiftingConv2D(8, size, padding="same", use_bias=False, group=group)
    images = smooth_images()
    layer.build(images.shape)
    kernel = np.random.default_rng(1).normal(size=layer.kernel.shape)
    if blurred:
        kernel = ndimage.gaussian_filter(kernel, (1, 1, 0, 0))
    layer.set_weights([kernel])
    errors = equivariance_error(layer, group, images)
    grid = group.grid_elements
    between = np.setdiff1d(np.arange(group.order), grid)
    there = group_action(images, group, between[0])
    back = group_action(there, group, group.inverse[between[0]])
    return {
        "group": name,
        "kernel_size": size,
        "filters": "blurred" if blurred else "random",
        "grid": float(errors[grid].max()),
        "between": float(errors[between].max()),
        "image_there_and_back": relative_difference(
            ops.convert_to_numpy(back), images
        ),
    }


def main() -> None:
    rows = [
        measure(name, size, blurred)
        for name in ("p8", "p12", "p16")
        for size in (3, 5, 7)
        for blurred in (False, True)
    ]
    for row in rows:
        print(
            f"{row['group']:4} {row['kernel_size']} x {row['kernel_size']} "
            f"{row['filters']:8} grid {row['grid']:.1e} "
            f"between {row['between']:.2f} "
            f"image {row['image_there_and_back']:.2f}"
        )
    results = {
        "benchmark": "relative equivariance error of LiftingConv2D",
        "rows": rows,
        "hardware": reporting.hardware(),
        "versions": reporting.versions(),
    }
    date = datetime.date.today().isoformat()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"interpolation-{date}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
