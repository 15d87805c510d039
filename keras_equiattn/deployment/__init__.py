"""Deployment of networks: plain ones, for other programs and machines.

`network` walks through the graph, `rewriting` has the tools for rewriting a
layer, `convolutions`, `pixels`, `values` and `attention` rewrite layers, and
`folding` makes normalization a part of convolutions. `formats` writes networks
as files of other programs, and `runtimes` runs such files. `quantization` makes
networks that compute with the whole numbers of `integers`, `exactness` knows
which calls are exact without them, and `integer_onnx` writes their integers;
`certification` measures how exact a file is. Nothing here is needed to train.
"""

# These modules register how layers are rewritten.
import keras_equiattn.deployment.attention
import keras_equiattn.deployment.convolutions
import keras_equiattn.deployment.pixels
import keras_equiattn.deployment.values  # noqa: F401
from keras_equiattn.deployment.certification import certificate
from keras_equiattn.deployment.formats import export
from keras_equiattn.deployment.network import plain
from keras_equiattn.deployment.quantization import quantize
from keras_equiattn.deployment.runtimes import load_exported

__all__ = ["certificate", "export", "load_exported", "plain", "quantize"]
