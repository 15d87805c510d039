"""Numbers computed by other people's code; see the README beside this."""

from pathlib import Path

import numpy as np


def load_vectors(name):
    """The arrays of one file, by name."""
    with np.load(Path(__file__).parent / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}
