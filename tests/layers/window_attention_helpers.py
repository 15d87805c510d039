"""Layers of attention over windows with random weights, and their oracle."""

import numpy as np
import oracles
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import weights_of

from keras_equiattn.layers import AffineSelfConv2D
from keras_equiattn.layers import SimpleAffineSelfConv2D
from keras_equiattn.layers import StandAloneSelfAttention2D

LAYERS = (AffineSelfConv2D, SimpleAffineSelfConv2D, StandAloneSelfAttention2D)


def random_layer(layer, channels=3, seed=0, **arguments):
    """Built, with every weight drawn anew."""
    arguments = {"kernel_size": 3, "dtype": DTYPE, **arguments}
    made = layer(data_format="channels_last", **arguments)
    made.build((None, None, None, made.group.order, channels))
    rng = np.random.default_rng(seed)
    for variable in made.weights:
        variable.assign(0.7 * rng.normal(size=variable.shape))
    return made


def values_of(layer):
    """Weights by name, those of the window for each of its pixels."""
    found, (size, _) = weights_of(layer), layer.kernel_size
    if layer.filter_basis == "pixel":
        return found
    basis = np.linalg.qr(oracles.harmonics(size, multiplied=True))[0]
    for name, axis in (("psi", 1), ("beta", 0), ("embedding", 0)):
        for key in (name, f"key_{name}", f"value_{name}"):
            if key in found:
                pixels = layer.filters_of(getattr(layer, key), size, axis)
                found[key] = as_array(pixels)
                # They consist of steerable filters alone.
                flat = np.moveaxis(found[key], (axis, axis + 1), (0, 1))
                flat = flat.reshape(size * size, -1)
                np.testing.assert_allclose(
                    basis @ (basis.T @ flat), flat, atol=1e-5
                )
    return found


def oracle(layer, x):
    """Output and weights by loops over the group and the window."""
    w, group = values_of(layer), layer.group.name
    scale = layer.scale or layer.num_heads / layer.filters

    def linear(name):
        return oracles.group_linear(
            x, w[f"{name}_kernel"], w[f"{name}_bias"], group
        )

    if isinstance(layer, SimpleAffineSelfConv2D):
        keys = values = linear("input")
        of_keys = of_values = w["psi"], w["beta"]
        middle = tuple(n // 2 for n in layer.kernel_size)
        query = oracles.affine_query(
            keys, w["psi"][:, middle[0], middle[1]], w["beta"][middle], group
        )
    else:
        query, keys, values = map(linear, ("query", "key", "value"))
        if isinstance(layer, AffineSelfConv2D):
            query = oracles.affine_query(
                query, w["query_psi"], w["query_beta"], group
            )
            of_keys = w["key_psi"], w["key_beta"]
            of_values = w["value_psi"], w["value_beta"]
        elif "embedding" in w:
            of_keys = None, w["embedding"]
            of_values = None, 0 * w["embedding"]
        else:
            rows, columns = w["row_embedding"], w["column_embedding"]
            half = rows.shape[1] // layer.num_heads
            beta = np.zeros((*layer.kernel_size, layer.filters))
            for c in range(layer.filters):
                head, place = divmod(c, 2 * half)
                if place < half:
                    beta[:, :, c] = rows[:, None, head * half + place]
                else:
                    beta[:, :, c] = columns[:, head * half + place - half]
            of_keys, of_values = (None, beta), (None, 0 * beta)
    y, maps = oracles.affine_attention(
        query,
        keys,
        values,
        of_keys,
        of_values,
        group,
        layer.num_heads,
        scale,
        layer.border,
        layer.window_shape,
    )
    return oracles.group_linear(y, w["output_kernel"], None, group), maps


def tolerance():
    return 1e-12 if DTYPE == "float64" else 1e-5
