"""Small networks of group self-attention, and weights that reveal errors."""

import numpy as np
from layer_contract import as_array

# Two blocks, the second of which has a shortcut of its own.
TINY = {
    "kernel_size": 3,
    "filters": 6,
    "block_sizes": (1, 1),
    "expansion": (1, 2),
    "crops": (1, 0),
    "num_heads": 2,
    "input_shape": (6, 6, 2),
    "classes": 3,
}


# One block with everything that a block can have, which compiles faster.
BLOCK = {
    **TINY,
    "block_sizes": (1,),
    "expansion": 2,
    "crops": 1,
    "norm_between": True,
    "last_pool": True,
}


# Of few channels, for images of the real size.
NARROW = {"filters": 6, "num_heads": 1, "kernel_size": 3}


def strong_attention(model):
    """Moves gains and shifts away from one and zero, and scores apart.

    The shifts are small: where maps are normalised again and again, large
    shifts leave little of the image. Kernels are drawn anew, the same on every
    backend.
    """
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        if len(variable.shape) == 1 or variable.name.endswith("bias"):
            start = 1.0 if variable.name.endswith("gamma") else 0.0
            values = start + rng.uniform(-0.3, 0.3, variable.shape)
        else:
            values = rng.normal(0, as_array(variable).std(), variable.shape)
        variable.assign(values)
    for layer in model.layers:
        if hasattr(layer, "query_kernel"):
            for kernel in (layer.query_kernel, layer.key_kernel):
                kernel.assign(6 * kernel)


END = ["logits", "logits_sum", "group_max", "flatten", "predictions"]
