"""What a layer sends to the device that it computes on, and waits for."""

import keras
import numpy as np
import pytest
from families import FAMILIES

from keras_equiattn import layers

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="Compilers keep the constants of what they compile.",
)

# What takes other constants than the layers of `FAMILIES`.
OTHERS = {
    "asc_border": (
        lambda: layers.AffineSelfConv2D(
            4, kernel_size=3, num_heads=2, group="p2", border="mask"
        ),
        (4, 4, 2, 2),
    ),
    "attentive_lifting": (
        lambda: layers.AttentiveLiftingConv2D(
            2, 3, group="p8", attention_kernel_size=3, reduction_ratio=1
        ),
        (5, 5, 2),
    ),
    "lifting_dropout": (
        lambda: layers.LiftingSelfAttention2D(
            2, 2, 1, None, "p8", attention_dropout=0.5
        ),
        (4, 4, 2),
    ),
    "gsa_dropout": (
        lambda: layers.GroupSelfAttention2D(
            2, 3, 1, 3, "p2", attention_dropout=0.5
        ),
        (4, 4, 2, 2),
    ),
    "gsa_lines": (
        lambda: layers.GroupSelfAttention2D(2, 3, 1, None, "p2"),
        (2, 11, 2, 2),
    ),
    "acmix_strides": (
        lambda: layers.ACmix2D(
            4, num_heads=2, attention_kernel_size=3, strides=2, group="p2"
        ),
        (5, 5, 2, 2),
    ),
    "acmix_shifted": (
        lambda: layers.WindowACmix2D(
            4, 2, window_size=2, shift=1, attention_dropout=0.5
        ),
        (4, 4, 4),
    ),
    "gsa_plain": (
        lambda: layers.GroupSelfAttention2D(2, 3, 1, 3, "p2", recompute=False),
        (4, 4, 2, 2),
    ),
    "pooling": (lambda: layers.GroupPooling("max"), (4, 4, 2, 2)),
    "up_sampling": (
        lambda: layers.SpatialUpSampling2D(2, interpolation="bilinear"),
        (4, 4, 4, 2),
    ),
    "angle": (lambda: layers.GroupToAngle2D(group="p4"), (4, 4, 4, 2)),
    "dense": (lambda: layers.GroupDense(4, "p4"), (4, 4, 4, 2)),
}
CASES = {**FAMILIES, **OTHERS}


@pytest.mark.parametrize(
    "policy",
    ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.sweep)],
)
@pytest.mark.parametrize("name", CASES)
def test_steps_send_nothing(name, policy):
    """No number and no table goes to the device, and no number comes back.

    On a GPU each would be a copy, and the host would wait for what comes back.
    The first step may send tables, which are kept.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sent = []

    class Transfers(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments, options=None):
            # Tensors made of numbers or arrays, and numbers made of tensors.
            if function.overloadpacket in (
                torch.ops.aten.lift_fresh,
                torch.ops.aten.scalar_tensor,
                torch.ops.aten._local_scalar_dense,
            ):
                sent.append(str(function))
            return function(*arguments, **(options or {}))

    make, shape = CASES[name]
    keras.config.set_dtype_policy(policy)
    layer = make()
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    x = torch.tensor(x, requires_grad=True)

    def step():
        y = layer(x, training=True)
        weights = [v.value for v in layer.trainable_variables]
        torch.autograd.grad(y.sum(), [x, *weights])

    step()
    with Transfers():
        step()
    assert not sent
    with Transfers():
        torch.tensor(2.0).item()
    assert len(sent) == 2
