"""Makes any model equivariant as a black box, by a group that acts around it.

`OrbitAverage` shows the model every pose of an image, `Canonicalization` one
that it chooses; `base` has what they share, and `symmetrize` makes a model of
either. Nothing here may look into the model.
"""

from keras_equiattn.symmetrization.api import symmetrize
from keras_equiattn.symmetrization.canonical import Canonicalization
from keras_equiattn.symmetrization.orbit import OrbitAverage

__all__ = ["Canonicalization", "OrbitAverage", "symmetrize"]
