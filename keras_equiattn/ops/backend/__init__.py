"""The only modules that import a backend, for speed or memory.

`target` says where a computation runs. The other modules have what `keras.ops`
lacks or is slow at on one of the backends: custom gradients (`autodiff`), loops
(`loops`), sums (`reductions`), sums in place (`memory`), random numbers that
can be drawn again (`random`), and PyTorch's compilers (`inductor`, `dynamo`).

Nothing here may know what attention, a window or a group is, and no other
module of `ops` may import a backend. Which form of an operator runs is chosen
in the `dispatch` modules of the operators, where its thresholds stand.
"""

from keras_equiattn.ops.backend.autodiff import custom_vjp
from keras_equiattn.ops.backend.autodiff import signature
from keras_equiattn.ops.backend.autodiff import vjp
from keras_equiattn.ops.backend.autodiff import without_gradient
from keras_equiattn.ops.backend.dynamo import in_one_piece
from keras_equiattn.ops.backend.dynamo import is_in_dynamo
from keras_equiattn.ops.backend.dynamo import remember
from keras_equiattn.ops.backend.inductor import compiled_part
from keras_equiattn.ops.backend.loops import by_parts
from keras_equiattn.ops.backend.loops import one_by_one
from keras_equiattn.ops.backend.loops import scan
from keras_equiattn.ops.backend.loops import scan_groups
from keras_equiattn.ops.backend.loops import steps
from keras_equiattn.ops.backend.memory import add_at
from keras_equiattn.ops.backend.memory import add_product
from keras_equiattn.ops.backend.memory import added
from keras_equiattn.ops.backend.memory import clamped
from keras_equiattn.ops.backend.memory import constant
from keras_equiattn.ops.backend.memory import exp_below
from keras_equiattn.ops.backend.memory import filled
from keras_equiattn.ops.backend.memory import for_products
from keras_equiattn.ops.backend.memory import masked
from keras_equiattn.ops.backend.memory import maximum
from keras_equiattn.ops.backend.memory import multiplied
from keras_equiattn.ops.backend.memory import part_at
from keras_equiattn.ops.backend.memory import parted
from keras_equiattn.ops.backend.memory import product
from keras_equiattn.ops.backend.memory import put_at
from keras_equiattn.ops.backend.memory import remainder
from keras_equiattn.ops.backend.memory import rolled
from keras_equiattn.ops.backend.memory import sum_at
from keras_equiattn.ops.backend.memory import sum_of_views
from keras_equiattn.ops.backend.memory import times_matrix
from keras_equiattn.ops.backend.memory import with_an_image
from keras_equiattn.ops.backend.random import dropout_factors
from keras_equiattn.ops.backend.random import next_seed
from keras_equiattn.ops.backend.random import prepared_seed
from keras_equiattn.ops.backend.random import seed_as_floats
from keras_equiattn.ops.backend.reductions import einsum_in_full_precision
from keras_equiattn.ops.backend.reductions import largest
from keras_equiattn.ops.backend.reductions import softmax_gradient
from keras_equiattn.ops.backend.reductions import softmax_in_one_reduction
from keras_equiattn.ops.backend.reductions import sums_together
from keras_equiattn.ops.backend.target import find_target
from keras_equiattn.ops.backend.target import has_gradients
from keras_equiattn.ops.backend.target import may_be_sharded
from keras_equiattn.ops.backend.target import portable
from keras_equiattn.ops.backend.target import Target

__all__ = [
    "Target",
    "add_at",
    "add_product",
    "added",
    "by_parts",
    "clamped",
    "compiled_part",
    "constant",
    "custom_vjp",
    "dropout_factors",
    "einsum_in_full_precision",
    "exp_below",
    "filled",
    "find_target",
    "for_products",
    "has_gradients",
    "in_one_piece",
    "is_in_dynamo",
    "largest",
    "masked",
    "maximum",
    "may_be_sharded",
    "multiplied",
    "next_seed",
    "one_by_one",
    "part_at",
    "parted",
    "portable",
    "prepared_seed",
    "product",
    "put_at",
    "remainder",
    "remember",
    "rolled",
    "scan",
    "scan_groups",
    "seed_as_floats",
    "signature",
    "softmax_gradient",
    "softmax_in_one_reduction",
    "steps",
    "sum_at",
    "sum_of_views",
    "sums_together",
    "times_matrix",
    "vjp",
    "with_an_image",
    "without_gradient",
]
