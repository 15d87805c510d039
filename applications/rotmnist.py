"""The rotated MNIST network of the group convolution papers."""

from pathlib import Path

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.applications import building
from keras_equiattn.layers import GroupPooling
from keras_equiattn.layers import SpatialPooling2D

PLANAR_WIDTH = 20
DROPOUT = 0.3

# By (group, filters), then by name.
SHIPPED = {
    ("p4", 10): {
        "rot_mnist": building.ShippedWeights(
            "rotmnist_p4cnn-rot_mnist.weights.h5",
            normalization=(0.1309, 0.2901),
            input_shape=(28, 28, 1),
            classes=10,
        )
    }
}


def RotMNISTCNN(
    group: str | groups.Group = "p4",
    attention: str | None = None,
    filters: int | None = None,
    input_shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    classifier_activation: str | None = None,
    normalization: building.Statistics | None = None,
    weights: str | Path | None = None,
    name: str | None = None,
) -> keras.Model:
    """The seven-layer network for rotated MNIST, for any group.

    Six 3 x 3 convolutions, each with batch normalisation, ReLU and dropout
    0.3 (the second with 2 x 2 max pooling instead of dropout), then a 4 x 4
    convolution to the classes and the maximum over the group. No padding, no
    bias. With `group="p4"` it has 24,610 trainable parameters, the z2 network
    with its 20 filters 21,620 (`count_params()` adds the moving statistics of
    the batch normalisation).

    Args:
        group: a group or its name.
        attention: None; attentive variants are not part of this release.
        filters: width of the six hidden layers. None is the paper's: 20 for
            z2, 10 for p4, 7 for p4m, 20 / sqrt(order) for others. 11, 15 and
            19 on p4 are the paper's wider baselines.
        input_shape: `(28, 28, channels)`: the last kernel must see exactly
            4 x 4 pixels.
        classes: number of classes.
        classifier_activation: None returns logits.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel: the network subtracts and divides first. None is the
            identity, or what shipped weights were trained with.
        weights: None (random), the name of shipped weights ("rot_mnist") or
            the path of a weights file.
        name: name of the model.

    Returns:
        A functional `keras.Model` from images `(batch, 28, 28, channels)` to
        logits `(batch, classes)`.

    Symmetry:
        The logits do not change when the image is acted on by the group; to
        rounding for groups on the grid, for the others under their 90-degree
        subgroup.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576),
          section 8.1
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), appendix
          B.1. As in their code the kernels start uniform within
          `1 / sqrt(channels k^2)`: the order is not in this fan-in.
    """
    group = groups.get(group)
    _checks.choice(attention, "attention", building.ATTENTION)
    if filters is None:
        filters = building.group_width(PLANAR_WIDTH, group)
    filters = _checks.integer(filters, "filters")
    classes = _checks.integer(classes, "classes")
    keras.activations.get(classifier_activation)  # raises for unknown ones
    input_shape = building.check_image_shape(input_shape)
    if input_shape[:2] != (28, 28):
        raise ValueError(
            "`input_shape` must be (28, 28, channels): the last kernel sees "
            f"exactly 4 x 4 pixels. Received: {input_shape}"
        )
    shipped = SHIPPED.get((group.name, filters), {})
    found = building.check_weights(
        weights, shipped, "RotMNISTCNN", input_shape, classes
    )
    if found and normalization is None:
        normalization = found.normalization
    statistics = building.check_normalization(normalization, input_shape[-1])

    inputs = keras.Input(input_shape, name="image")
    x = building.normalize(inputs, statistics)
    for index in range(1, 8):
        last = index == 7
        x = building.group_convolution(
            x,
            classes if last else filters,
            4 if last else 3,
            group=group,
            attention=attention,
            settings=_attention(index, attention),
            kernel_initializer=_kernel_initializer(group, lifting=index == 1),
            name=f"conv{index}",
        )
        if last:
            break
        x = keras.layers.BatchNormalization(
            momentum=0.9, epsilon=2e-5, name=f"bn{index}"
        )(x)
        x = keras.layers.ReLU(name=f"relu{index}")(x)
        if index == 2:
            x = SpatialPooling2D(
                2, group=group, data_format="channels_last", name="pool2"
            )(x)
        else:
            x = keras.layers.Dropout(DROPOUT, name=f"dropout{index}")(x)
    x = GroupPooling("max", data_format="channels_last", name="group_max")(x)
    x = keras.layers.Flatten(data_format="channels_last", name="flatten")(x)
    outputs = building.predictions(x, classifier_activation)
    suffix = f"_{attention}" if attention else ""
    model = keras.Model(
        inputs, outputs, name=name or f"rotmnist_{group.name}cnn{suffix}"
    )
    building.load_weights(model, weights, shipped)
    return model


def _attention(index: int, attention: str | None) -> building.AttentionSettings:
    """The authors' settings; the first layer has one or three channels."""
    if index > 1:
        return building.AttentionSettings(reduction_ratio=2)
    # Wide on the image, which only their code says.
    return building.AttentionSettings(
        reduction_ratio=1, dilation_rate=4 if attention == "input" else 1
    )


def _kernel_initializer(
    group: groups.Group, lifting: bool = False
) -> keras.initializers.Initializer:
    """Normal for the planar network, else uniform, as the authors start."""
    if group.order == 1:
        return keras.initializers.VarianceScaling(1.0, "fan_in", "normal")
    # Their fan-in leaves out the order, ours has it where the kernel has it.
    order = 1 if lifting else group.order
    return keras.initializers.VarianceScaling(order / 3, "fan_in", "uniform")
