"""The parts of `OcticViT`: layers on tokens in the octic basis.

"Octic" refers to the eight turns and mirrors of a square, p4m. A feature map
has a value for each of them; the octic basis has eight sums of these values
instead. Four sums keep or change their sign when the group acts on the image
(A1, A2, B1, B2). The other four are two vectors of the plane, which turn with
the image (E). Linear maps that commute with the group mix the channels of each
of A1, A2, B1 and B2, and the two vectors with each other. They have an eighth
of the weights of a plain map, and take 5.33 times fewer multiplications.

The weights that the authors publish are for this basis. Its vectors differ from
those of `ops.regular_basis`, though they span the same space, and normalisation
and attention act in it too, so these layers share no code with
`ops.group_linear`.

A tensor of tokens is `(batch, tokens, 8, channels)`. On its axis 2 are A1, A2,
B1 and B2, then the first components of both vectors, then the second ones.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.applications.networks.common import transformers
from keras_equiattn.ops.group.kernels import kernel_orbit

GROUP = groups.get("p4m")
SIGNS = 4  # A1, A2, B1, B2
PLANE = 2  # components of a vector, and how many vectors there are
# The epsilon of the layer normalisations on the group, as the authors have it.
EPSILON = 1e-5


@functools.cache
def octic_basis() -> np.ndarray:
    """The orthogonal matrix `(8, 8)` from values on p4m to the basis.

    The group acts on vectors as on the plane, `(right, up)`. The vectors of the
    identity are `(1, 1)` and `(1, -1)`, so that all entries have the same
    absolute value.
    """
    # Offsets of images are (down, right).
    right_up = np.array([[0, 1], [-1, 0]])
    matrices = right_up @ GROUP.matrices @ right_up.T
    mirrored = np.linalg.det(matrices)
    turned = matrices[:, 0, 0] ** 2 - matrices[:, 0, 1] ** 2
    vectors = matrices @ np.array([[1, 1], [1, -1]])
    rows = [np.ones(GROUP.order), mirrored, turned, mirrored * turned]
    rows += list(vectors.reshape(GROUP.order, PLANE * PLANE).T)
    return np.rint(rows) / np.sqrt(GROUP.order)


def to_octic(x: Any) -> Any:
    """Converts values at elements, on axis 2, to the octic basis."""
    basis = ops.convert_to_tensor(octic_basis(), x.dtype)
    return ops.einsum("ig,bngc->bnic", basis, x)


def to_regular(x: Any) -> Any:
    """Converts values in the octic basis to values at elements."""
    basis = ops.convert_to_tensor(octic_basis(), x.dtype)
    return ops.einsum("ig,bnic->bngc", basis, x)


def split(x: Any) -> tuple[Any, Any]:
    """`(batch, tokens, 4, C)`, and the vectors `(batch, tokens, 2, 2 C)`."""
    tokens, _, channels = x.shape[1:]
    vectors = ops.reshape(
        x[:, :, SIGNS:], (-1, tokens, PLANE, PLANE * channels)
    )
    return x[:, :, :SIGNS], vectors


def join(signs: Any, vectors: Any) -> Any:
    """The inverse of `split`."""
    vectors = ops.reshape(vectors, (-1, *signs.shape[1:]))
    return ops.concatenate([signs, vectors], axis=2)


class _SameShape(keras.layers.Layer):
    """A layer whose output has the shape of its input."""

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tuple(input_shape)


class _Scale(_SameShape):
    """Learned factors with the same initial value.

    Args:
        initial: the initial value of the factors.
    """

    def __init__(self, initial: float = 1e-4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial = initial

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "initial": self.initial}


def _add_factors(layer: Any, channels: int, initial: float) -> None:
    """A factor per channel, the same for both components of a vector."""
    start = keras.initializers.Constant(initial)
    layer.gamma_signs = layer.add_weight(
        shape=(SIGNS, channels), initializer=start, name="gamma_signs"
    )
    layer.gamma_vectors = layer.add_weight(
        shape=(PLANE * channels,), initializer=start, name="gamma_vectors"
    )


@keras.saving.register_keras_serializable("keras_equiattn")
class OcticEmbedding(keras.layers.Layer):
    """Adds learned positions and puts a class token before the patches.

    The position embedding is the orbit of one learned image: a feature map that
    does not change when the group acts on it. The class token is the same in
    every pose.

    Input shape: `(batch, size, size, 8, channels)`, a feature map on p4m.

    Output shape: `(batch, 1 + size * size, 8, channels)`, in the octic basis.
    """

    def build(self, input_shape: Any) -> None:
        _, rows, columns, _, channels = input_shape
        normal = keras.initializers.TruncatedNormal
        # The authors' embedding has six parts, which start with 0.11; the image
        # that they make together starts with 0.14.
        self.positions = self.add_weight(
            shape=(rows, columns, channels),
            initializer=normal(stddev=0.14),
            name="positions",
        )
        self.class_token = self.add_weight(
            shape=(channels,),
            initializer=normal(stddev=0.16),
            name="class_token",
        )

    def call(self, inputs: Any) -> Any:
        _, rows, columns, order, channels = inputs.shape
        positions = kernel_orbit(self.positions, GROUP, group_axis=False)
        x = inputs + ops.transpose(positions, (1, 2, 0, 3))
        x = to_octic(ops.reshape(x, (-1, rows * columns, order, channels)))
        token = ops.pad(self.class_token[None], [[0, order - 1], [0, 0]])
        token = ops.zeros_like(x[:, :1]) + token
        return ops.concatenate([token, x], axis=1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        batch, rows, columns, order, channels = input_shape
        return (batch, 1 + rows * columns, order, channels)


@keras.saving.register_keras_serializable("keras_equiattn")
class OcticNormalization(_SameShape):
    """Layer normalisation in the octic basis, as Nordström et al. have it.

    The mean over channels is subtracted from each of the eight sums. All are
    divided by one deviation: the root of an eighth of the sum of the variances
    of A1, A2, B1 and B2 and the mean variance of the two components of the
    vectors.
    """

    def build(self, input_shape: Any) -> None:
        _add_factors(self, input_shape[-1], 1.0)
        self.beta = self.add_weight(
            shape=(input_shape[-1],), initializer="zeros", name="beta"
        )

    def call(self, inputs: Any) -> Any:
        # Under half precision variances are computed in float32, as in Keras.
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        signs, vectors = split(ops.cast(inputs, dtype))
        signs = signs - ops.mean(signs, axis=-1, keepdims=True)
        vectors = vectors - ops.mean(vectors, axis=-1, keepdims=True)
        variance = ops.sum(
            ops.mean(ops.square(signs), axis=-1, keepdims=True),
            axis=2,
            keepdims=True,
        ) + ops.mean(ops.square(vectors), axis=(2, 3), keepdims=True)
        factor = ops.rsqrt((variance + EPSILON) / GROUP.order)
        x = join(
            signs * factor * ops.cast(self.gamma_signs, dtype),
            vectors * factor * ops.cast(self.gamma_vectors, dtype),
        )
        return ops.cast(x + _first(ops.cast(self.beta, dtype)), inputs.dtype)


@keras.saving.register_keras_serializable("keras_equiattn")
class OcticScale(_Scale):
    """A learned factor for each channel in the octic basis: LayerScale."""

    def build(self, input_shape: Any) -> None:
        _add_factors(self, input_shape[-1], self.initial)

    def call(self, inputs: Any) -> Any:
        signs, vectors = split(inputs)
        return join(signs * self.gamma_signs, vectors * self.gamma_vectors)


@keras.saving.register_keras_serializable("keras_equiattn")
class ChannelScale(_Scale):
    """A learned factor for each channel, the last axis: LayerScale."""

    def build(self, input_shape: Any) -> None:
        self.gamma = self.add_weight(
            shape=(input_shape[-1],),
            initializer=keras.initializers.Constant(self.initial),
            name="gamma",
        )

    def call(self, inputs: Any) -> Any:
        return inputs * self.gamma


@keras.saving.register_keras_serializable("keras_equiattn")
class OcticDense(keras.layers.Layer):
    """The linear map of the channels that commutes with the group.

    Args:
        units: output channels.
    """

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = _checks.integer(units, "units")

    def build(self, input_shape: Any) -> None:
        channels, units = input_shape[-1], self.units
        normal = transformers.small_normal
        self.kernel_signs = self.add_weight(
            shape=(SIGNS, channels, units),
            initializer=normal(),
            name="kernel_signs",
        )
        self.kernel_vectors = self.add_weight(
            shape=(PLANE * channels, PLANE * units),
            initializer=normal(),
            name="kernel_vectors",
        )
        self.bias = self.add_weight(
            shape=(units,), initializer="zeros", name="bias"
        )

    def call(self, inputs: Any) -> Any:
        signs, vectors = split(inputs)
        return join(
            ops.einsum("bnic,icd->bnid", signs, self.kernel_signs),
            ops.matmul(vectors, self.kernel_vectors),
        ) + _first(self.bias)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("keras_equiattn")
class OcticActivation(_SameShape):
    """The exact GELU of the values at the elements of the group."""

    def call(self, inputs: Any) -> Any:
        return to_octic(ops.gelu(to_regular(inputs), approximate=False))


@keras.saving.register_keras_serializable("keras_equiattn")
class OcticAttention(_SameShape):
    """Attention of all tokens to each other, with invariant scores.

    Args:
        num_heads: heads; the channels must be divisible by it.
    """

    def __init__(self, num_heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_heads = _checks.integer(num_heads, "num_heads")

    def build(self, input_shape: Any) -> None:
        channels = input_shape[-1]
        if channels % self.num_heads:
            raise ValueError(
                "The channels must be divisible by `num_heads`. Received: "
                f"channels={channels}, num_heads={self.num_heads}"
            )
        for name in ("query", "key", "value", "projection"):
            dense = OcticDense(channels, dtype=self.dtype_policy, name=name)
            dense.build(input_shape)
            setattr(self, name, dense)

    def call(self, inputs: Any) -> Any:
        maps = (self.query, self.key, self.value)
        query, key, value = (self._heads(dense(inputs)) for dense in maps)
        # Scaling the query first keeps the product in the range of half
        # precision.
        query = query * query.shape[-1] ** -0.5
        x = ops.dot_product_attention(query, key, value, scale=1.0)
        return self.projection(self._tokens(x, inputs.shape))

    def _heads(self, x: Any) -> Any:
        """`(batch, tokens, heads, 8 C / heads)`."""
        found = []
        for part in split(x):
            tokens, rows, channels = part.shape[1:]
            of_head = self.num_heads, channels // self.num_heads
            part = ops.reshape(part, (-1, tokens, rows, *of_head))
            part = ops.swapaxes(part, 2, 3)
            shape = -1, tokens, self.num_heads, rows * of_head[1]
            found.append(ops.reshape(part, shape))
        return ops.concatenate(found, axis=-1)

    def _tokens(self, x: Any, shape: Any) -> Any:
        """The inverse of `_heads`."""
        tokens, _, channels = shape[1:]
        found = []
        halves = ops.split(x, 2, -1)
        for half, rows in zip(halves, (SIGNS, PLANE), strict=True):
            size = SIGNS * channels // self.num_heads // rows
            half = ops.reshape(half, (-1, tokens, self.num_heads, rows, size))
            half = ops.swapaxes(half, 2, 3)
            shape = -1, tokens, rows, self.num_heads * size
            found.append(ops.reshape(half, shape))
        return join(*found)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_heads": self.num_heads}


@keras.saving.register_keras_serializable("keras_equiattn")
class OcticInvariants(keras.layers.Layer):
    """Invariants of each channel, which no turn and no mirror changes.

    Args:
        kind: "power_spectrum" for A1, the absolute values of A2, B1 and B2 and
            the lengths of both vectors: 6 numbers. "polynomial" for 32 products
            of up to five of the eight sums, which also keep the signs of A2,
            B1, B2 and the vectors relative to each other.

    Output shape: `(batch, tokens, 6 * channels)` or 32 times the channels.
    """

    def __init__(self, kind: str = "power_spectrum", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = _checks.choice(kind, "kind", tuple(INVARIANTS))

    def call(self, inputs: Any) -> Any:
        # Squares and products leave the range of half precision.
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        signs, vectors = split(ops.cast(inputs, dtype))
        return ops.cast(INVARIANTS[self.kind][1](signs, vectors), inputs.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        batch, tokens, _, channels = input_shape
        return (batch, tokens, INVARIANTS[self.kind][0] * channels)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "kind": self.kind}


def _power_spectrum(signs: Any, vectors: Any) -> Any:
    """`(batch, tokens, 6 C)`: absolute values and lengths."""
    signs = ops.concatenate([signs[:, :, :1], ops.abs(signs[:, :, 1:])], 2)
    squares = ops.sum(ops.square(vectors), axis=2)
    # The square root has no gradient at zero.
    some = squares > 0
    lengths = ops.sqrt(ops.where(some, squares, 1.0))
    lengths = ops.where(some, lengths, 0.0)
    _, tokens, rows, channels = signs.shape
    signs = ops.reshape(signs, (-1, tokens, rows * channels))
    return ops.concatenate([signs, lengths], axis=-1)


def _polynomials(signs: Any, vectors: Any) -> Any:
    """`(batch, tokens, 32 C)`: products that are invariant."""
    a1, a2, b1, b2 = (signs[:, :, row] for row in range(SIGNS))
    # The components of the first vector `v` and of the second one `w`.
    v1, w1 = ops.split(vectors[:, :, 0], 2, axis=-1)
    v2, w2 = ops.split(vectors[:, :, 1], 2, axis=-1)
    # Products of two components: each changes its sign as one of the four does.
    as_a1 = [w1 * w1 + w2 * w2, v1 * w1 + v2 * w2, v1 * v1 + v2 * v2]
    as_b1 = [w1 * w1 - w2 * w2, v1 * w1 - v2 * w2, v1 * v1 - v2 * v2]
    as_b2 = [w1 * w2, v2 * w1 + v1 * w2, v1 * v2]
    as_a2 = v2 * w1 - v1 * w2
    # Products of four components, as A1 and as A2. They are written out, since
    # under TensorFlow a power with exponent zero has the gradient NaN at zero.
    powers = [
        (w1 * w1 * w1 * w1, w2 * w2 * w2 * w2),
        (v1 * w1 * w1 * w1, v2 * w2 * w2 * w2),
        (v1 * v1 * w1 * w1, v2 * v2 * w2 * w2),
        (v1 * v1 * v1 * w1, v2 * v2 * v2 * w2),
        (v1 * v1 * v1 * v1, v2 * v2 * v2 * v2),
    ]
    mixed = [
        w1 * w2 * (w1 * w1 - w2 * w2),
        v2 * w1 * w1 * w1 - v1 * w2 * w2 * w2,
        v1 * v2 * (w1 * w1 - w2 * w2),
        v1 * v1 * v2 * w1 - v1 * v2 * v2 * w2,
        v1 * v2 * (v1 * v1 - v2 * v2),
    ]
    found = [
        a1,
        *as_a1,
        b2 * b2,
        b1 * b1,
        a2 * a2,
        *(b2 * product for product in as_b2),
        *(b1 * product for product in as_b1),
        a2 * as_a2,
        a2 * b1 * b2,
        *(first + second for first, second in powers),
        b1 * b2 * as_a2,
        *(a2 * b2 * product for product in as_b1),
        *(a2 * b1 * product for product in as_b2),
        *(a2 * product for product in mixed),
    ]
    return ops.concatenate(found, axis=-1)


# The number of invariants of a channel, and the function that computes them.
INVARIANTS: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "power_spectrum": (6, _power_spectrum),
    "polynomial": (32, _polynomials),
}


@keras.saving.register_keras_serializable("keras_equiattn")
class OcticChannels(keras.layers.Layer):
    """Flattens the eight sums to plain channels, one vector after the other.

    Output shape: `(batch, tokens, 8 * channels)`.
    """

    def call(self, inputs: Any) -> Any:
        tokens, order, channels = inputs.shape[1:]
        signs, vectors = split(inputs)
        vectors = ops.reshape(vectors, (-1, tokens, PLANE, PLANE, channels))
        vectors = ops.transpose(vectors, (0, 1, 3, 2, 4))
        return ops.reshape(join(signs, vectors), (-1, tokens, order * channels))

    def compute_output_shape(self, input_shape: Any) -> Any:
        batch, tokens, order, channels = input_shape
        return (batch, tokens, order * channels)


def _first(bias: Any) -> Any:
    """A bias as `(8, channels)`: an equivariant one is zero except in A1."""
    return ops.pad(bias[None], [[0, GROUP.order - 1], [0, 0]])
