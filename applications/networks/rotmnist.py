"""The rotated MNIST network of the group convolution papers."""

from pathlib import Path

import keras

from keras_equiattn import _checks
from keras_equiattn import convert
from keras_equiattn import groups
from keras_equiattn.applications.networks.common import convolution
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common import pretrained
from keras_equiattn.applications.networks.common.convolution import (
    AttentionSettings,
)
from keras_equiattn.applications.networks.common.network import Network
from keras_equiattn.applications.networks.common.network import variants
from keras_equiattn.applications.registry import register
from keras_equiattn.layers import GroupPooling
from keras_equiattn.ops.group.linear import ELEMENTWISE_ACTIVATIONS

PLANAR_WIDTH = 20
DROPOUT = 0.3


def _shipped(
    downsampling: str, networks: dict[tuple[str, str | None, int], str]
) -> pretrained.Shipped:
    """The presets of networks, by (group, attention, filters)."""
    return {
        (*settings, downsampling): {
            "rot_mnist": pretrained.ShippedWeights(
                network,
                normalization=(0.1309, 0.2901),
                input_shape=(28, 28, 1),
                classes=10,
            )
        }
        for settings, network in networks.items()
    }


# The weights that are shipped, by the size of the kernels and the activation.
SHIPPED: dict[tuple[int, str], pretrained.Shipped] = {
    (3, "relu"): _shipped(
        "exact",
        {
            ("p4", None, 10): "rotmnist_p4cnn",
            ("p4", "input", 10): "rotmnist_p4cnn_input",
            ("p4", "co", 10): "rotmnist_p4cnn_co",
            ("p4", "spatial", 10): "rotmnist_p4cnn_spatial",
            ("p4", "full", 10): "rotmnist_p4cnn_full",
            ("p4", None, 15): "rotmnist_p4cnn_big15",
            ("p8", "input", 9): "rotmnist_p8cnn_input",
            ("p16", None, 6): "rotmnist_p16cnn",
        },
    ),
    (5, "relu"): _shipped("exact", {("p16", None, 6): "rotmnist_p16cnn_5x5"}),
    (3, "silu"): _shipped(
        "antialiased", {("p8", None, 9): "rotmnist_p8cnn_smooth"}
    ),
}


# The operators of the papers. By default p8 and p16 have others.
PAPER = {"downsampling": "exact", "activation": "relu"}


@register(
    {  # not in the papers; the authors' code has no steerable filters
        "rotmnist_p8cnn_smooth": {"group": "p8"},
        "rotmnist_p16cnn_smooth": {"group": "p16"},
        "rotmnist_p16cnn_5x5_smooth": {"group": "p16", "kernel_size": 5},
        "rotmnist_p8cnn": {"group": "p8", **PAPER},
        "rotmnist_p8cnn_small5": {"group": "p8", "filters": 5, **PAPER},
        "rotmnist_p8cnn_big10": {"group": "p8", "filters": 10, **PAPER},
        "rotmnist_p8cnn_full_small2": {
            "group": "p8",
            "attention": "full",
            "filters": 2,
            **PAPER,
        },
        "rotmnist_p8cnn_input": {
            "group": "p8",
            "attention": "input",
            **PAPER,
        },
        "rotmnist_p8cnn_input_late_dropout": {
            "group": "p8",
            "attention": "input",
            "dropout_after_attention": True,
            **PAPER,
        },
        "rotmnist_p16cnn": {"group": "p16", **PAPER},
        "rotmnist_p16cnn_big8": {"group": "p16", "filters": 8, **PAPER},
        "rotmnist_p16cnn_input_small5": {
            "group": "p16",
            "attention": "input",
            "filters": 5,
            **PAPER,
        },
        "rotmnist_p16cnn_5x5": {"group": "p16", "kernel_size": 5, **PAPER},
        "rotmnist_p16cnn_5x5_big20": {
            "group": "p16",
            "kernel_size": 5,
            "filters": 20,
            **PAPER,
        },
    },
)
@register(
    {
        **variants(
            "rotmnist_{}cnn",
            "z2 p4 p4_full p4_channel p4_spatial p4_input p4_co p4m",
        ),
        "rotmnist_p4cnn_input_late_dropout": {  # not in the papers
            "group": "p4",
            "attention": "input",
            "dropout_after_attention": True,
        },
        **{  # the paper's wider baselines
            f"rotmnist_p4cnn_big{width}": {"group": "p4", "filters": width}
            for width in (11, 15, 19)
        },
    },
    convert.att_gconvs,
)
def RotMNISTCNN(
    group: str | groups.Group = "p4",
    attention: str | None = None,
    filters: int | None = None,
    input_shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    classifier_activation: str | None = None,
    normalization: ends.Statistics | None = None,
    downsampling: str | None = None,
    weights: str | Path | None = None,
    name: str | None = None,
    kernel_size: int = 3,
    activation: str | None = None,
    dropout_after_attention: bool = False,
) -> keras.Model:
    """The seven-layer network for rotated MNIST, for any group.

    The network has six 3 x 3 convolutions, each with batch normalisation,
    `activation` and dropout 0.3 (the second with pooling instead of dropout: a
    maximum over 2 x 2 pixels unless `downsampling` says otherwise), then a 4 x
    4 convolution to the classes and the maximum over the group. There is no
    bias, and no padding except for some values of `kernel_size` and
    `downsampling`. The z2 network with its 20 filters has 21,620 trainable
    parameters (`count_params()` adds the moving statistics of the batch
    normalisation). Those of the p4 network depend on its attention:

    | None | `"full"` | `"channel"` | `"spatial"` | `"input"` | `"co"` |
    |---|---|---|---|---|---|
    | 24,610 | 73,130 | 48,630 | 49,110 | 29,462 | 24,851 |

    Layers are called `conv1`, `bn1`, `relu1`, `dropout1`, `conv2`, `bn2`,
    `relu2`, `pool2`, ..., `conv7`, `group_max`, `flatten`, `predictions`;
    another activation has its own name in place of `relu`.
    Input attention comes before a convolution as `<its name>_attention`.

    Args:
        group: a group or its name.
        attention: the attention of every convolution. None, "full", "channel"
            or "spatial" (on the responses, `AttentiveGroupConv2D`), "input"
            (`InputAttention`) or "co" (`CoAttentiveGroupConv2D`).
        filters: width of the six hidden layers. None is the paper's: 20 for
            z2, 10 for p4 and 7 for p4m. For other groups on the grid it is 20 /
            sqrt(order). For p8, p12, p16 and their mirrored forms it is 20 /
            sqrt(2 order / 3), such as 9 for p8 and 6 for p16, since a steerable
            filter of 3 x 3 pixels has 6 parameters in place of 9. So all groups
            have about as many parameters with `kernel_size=3`. 11, 15 and 19 on
            p4 are the paper's wider baselines.
        input_shape: `(28, 28, channels)`: the last kernel must see exactly
            4 x 4 pixels.
        classes: number of classes.
        classifier_activation: None returns logits.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity, or what shipped weights were trained with.
        downsampling: None is "antialiased" for groups with turns between the
            quarter turns (p8, p12, p16 and their mirrored forms), and "exact"
            for all others. "exact" pools in the second layer. "antialiased"
            pads one mirrored pixel (a layer `<name of the pooling>_pad`) and
            takes binomial means of 4 x 4 pixels instead. "strided" gives the
            convolution strides of 2: an approximate network as in the paper's
            appendix C.
        weights: None (random), the name of shipped weights ("rot_mnist") or
            the path of a weights file. Shipped weights for p16, and for p8 with
            input attention, need `downsampling="exact", activation="relu"`.
            `from_preset` sets these arguments itself. Other files must come
            from a network with the same arguments: one with another activation
            or downsampling loads without an error.
        name: name of the model. By default it has the group, the attention and
            the downsampling, but not the activation.
        kernel_size: rows and columns of the six hidden kernels, an odd number
            from 3 on. Maps keep the sizes of the paper's network: layers `pad1`
            to `pad6` add one pixel of zeros on each side for kernels of 5 x 5,
            two for 7 x 7, after normalisation and before input attention.
            Steerable filters of p8, p12 and p16 tell more angles apart with 5 x
            5 pixels than with 3 x 3.
        activation: what follows batch normalisation: "relu" as in the papers,
            "elu", "gelu", "leaky_relu", "sigmoid", "silu" or "tanh". None is
            "silu" for groups with turns between the quarter turns, where it
            loses less than ReLU, and "relu" for all others.
        dropout_after_attention: whether each dropout comes between input
            attention and the convolution, as in `conv2_attention`, `dropout1`,
            `conv2`. Attention then sees all values in training too. False
            places dropout before attention, as the authors' code does. Weights
            fit both networks, but the shipped ones were trained with False.
            Only `attention="input"` accepts True.

    Returns:
        A functional `keras.Model` from images `(batch, 28, 28, channels)` to
        logits `(batch, classes)`.

    Symmetry:
        Unless downsampling is strided, the logits do not change when the group
        acts on the image: up to rounding for groups on the grid, and for other
        groups only under their 90-degree subgroup.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576),
          section 8.1
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), appendix
          B.1. As in their code the kernels start uniform within
          `1 / sqrt(channels k^2)`: the order is not in this fan-in. Attention
          reduces channels by 2, but not those of the image, and input attention
          on the image has a spatial kernel dilated 4 times, as only their code
          shows.
    """
    group = groups.get(group)
    late_dropout = _checks.flag(
        dropout_after_attention, "dropout_after_attention"
    )
    _checks.choice(activation, "activation", (None, *ELEMENTWISE_ACTIVATIONS))
    if activation is None:
        activation = "relu" if group.acts_on_grid else "silu"
    if _checks.integer(kernel_size, "kernel_size", 3) % 2 == 0:
        raise ValueError(
            f"`kernel_size` must be odd, 3 or more. Received: {kernel_size}"
        )
    if filters is None:
        filters = convolution.group_width(PLANAR_WIDTH, group)
    network = Network(
        "RotMNISTCNN",
        group=group,
        attention=attention,
        filters=filters,
        input_shape=input_shape,
        classes=classes,
        classifier_activation=classifier_activation,
        normalization=normalization,
        downsampling=downsampling,
        weights=weights,
        planar=lambda: keras.initializers.VarianceScaling(
            1.0, "fan_in", "normal"
        ),
        shipped=(
            None if late_dropout else SHIPPED.get((kernel_size, activation))
        ),
    )
    if late_dropout and attention != "input":
        raise ValueError(
            "`dropout_after_attention` must be False unless `attention` is "
            "'input'. Received: dropout_after_attention=True, "
            f"attention={attention!r}"
        )
    if network.input_shape[:2] != (28, 28):
        raise ValueError(
            "`input_shape` must be (28, 28, channels): the last kernel sees "
            f"exactly 4 x 4 pixels. Received: {network.input_shape}"
        )

    inputs, x = network.start()
    after_attention = None  # the dropout that the next layer applies
    for index in range(1, 7):
        strided = index == 2 and not network.exact
        if kernel_size > 3:
            x = network.pad(x, kernel_size // 2 - 1, f"pad{index}")
        x = network.convolution(
            x,
            network.filters,
            kernel_size,
            _attention(index, attention),
            strides=2 if strided else 1,
            exact=not strided,
            name=f"conv{index}",
            after_attention=after_attention,
        )
        x = convolution.batch_norm_activation(x, f"{{}}{index}", activation)
        after_attention = None
        if index != 2:
            # It is made here in both cases, so that layers draw the same seeds.
            dropout = keras.layers.Dropout(DROPOUT, name=f"dropout{index}")
            if late_dropout:
                after_attention = dropout
            else:
                x = dropout(x)
        elif network.exact:
            x = network.pool(x, "pool2")
    x = network.convolution(
        x,
        network.classes,
        4,
        _attention(7, attention),
        rescaled=False,
        name="conv7",
        after_attention=after_attention,
    )
    x = GroupPooling("max", data_format="channels_last", name="group_max")(x)
    x = keras.layers.Flatten(data_format="channels_last", name="flatten")(x)
    name = name or f"rotmnist_{group.name}cnn{network.suffix}"
    return network.finish(inputs, x, name)


def _attention(index: int, attention: str | None) -> AttentionSettings:
    """The authors' settings; the first layer has one or three channels."""
    if index > 1:
        return AttentionSettings(reduction_ratio=2)
    # Dilated on the image, as only their code shows.
    return AttentionSettings(
        reduction_ratio=1, dilation_rate=4 if attention == "input" else 1
    )
