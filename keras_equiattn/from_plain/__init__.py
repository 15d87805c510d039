"""Converts a plain Keras network to an equivariant one of the same topology.

`network` walks through the graph, `conversion` has the tools of a converter,
`convolutions`, `pixels` and `values` have the converters for the layers of
Keras, and `summary` says what became of each layer. New operators do not belong
here: a converter only chooses layers of `keras_equiattn.layers` or of Keras.
"""

# These modules register the converters.
import keras_equiattn.from_plain.convolutions
import keras_equiattn.from_plain.pixels
import keras_equiattn.from_plain.values  # noqa: F401
from keras_equiattn.from_plain.conversion import Conversion
from keras_equiattn.from_plain.conversion import register_conversion
from keras_equiattn.from_plain.network import conversion_summary
from keras_equiattn.from_plain.network import ConversionError
from keras_equiattn.from_plain.network import equivariant
from keras_equiattn.from_plain.summary import ConversionSummary
from keras_equiattn.from_plain.summary import ConvertedLayer

__all__ = [
    "Conversion",
    "ConversionError",
    "ConversionSummary",
    "ConvertedLayer",
    "conversion_summary",
    "equivariant",
    "register_conversion",
]
