"""Group-equivariant layers for Keras 3: the plane with its symmetries."""

from importlib.metadata import version

from keras_equiattn import config
from keras_equiattn import convert
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn import losses
from keras_equiattn import ops
from keras_equiattn import testing
from keras_equiattn import visualization
from keras_equiattn.deployment import certificate
from keras_equiattn.deployment import export
from keras_equiattn.deployment import load_exported
from keras_equiattn.deployment import plain
from keras_equiattn.deployment import quantize
from keras_equiattn.from_plain import conversion_summary
from keras_equiattn.from_plain import equivariant
from keras_equiattn.from_plain import register_conversion
from keras_equiattn.report import equivariance_report
from keras_equiattn.symmetrization import symmetrize

__version__ = version("keras-equiattn")
__all__ = [
    "certificate",
    "config",
    "conversion_summary",
    "convert",
    "equivariance_report",
    "equivariant",
    "export",
    "groups",
    "layers",
    "load_exported",
    "losses",
    "ops",
    "plain",
    "quantize",
    "register_conversion",
    "symmetrize",
    "testing",
    "visualization",
]
