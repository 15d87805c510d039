"""Plain networks of different topology, and their outputs in every pose."""

import keras
import numpy as np
import oracles
from keras.layers import Activation
from keras.layers import Add
from keras.layers import AveragePooling2D
from keras.layers import BatchNormalization
from keras.layers import Concatenate
from keras.layers import Conv2D
from keras.layers import Conv2DTranspose
from keras.layers import Cropping2D
from keras.layers import Dense
from keras.layers import DepthwiseConv2D
from keras.layers import Dropout
from keras.layers import Flatten
from keras.layers import GlobalAveragePooling2D
from keras.layers import GlobalMaxPooling2D
from keras.layers import LayerNormalization
from keras.layers import MaxPooling2D
from keras.layers import Multiply
from keras.layers import PReLU
from keras.layers import ReLU
from keras.layers import Rescaling
from keras.layers import Reshape
from keras.layers import SeparableConv2D
from keras.layers import Softmax
from keras.layers import UpSampling2D
from keras.layers import ZeroPadding2D
from layer_contract import as_array

SIDE = 9


def image_input(side=SIDE, channels=2):
    return keras.Input((side, side, channels))


def sequential():
    return keras.Sequential(
        [
            image_input(),
            Conv2D(4, 3, padding="same", activation="relu"),
            BatchNormalization(),
            Conv2D(3, 3, strides=2, use_bias=False),
            PReLU(shared_axes=[1, 2]),
            GlobalAveragePooling2D(name="pool"),
            Dropout(0.5),
            Dense(3),
        ]
    )


def residual():
    inputs = image_input()
    x = ZeroPadding2D(1)(inputs)
    x = shortcut = Conv2D(4, 3)(x)
    x = BatchNormalization()(x)
    x = ReLU()(x)
    x = Conv2D(4, 3, strides=2, padding="same")(x)
    x = Add()([x, Conv2D(4, 1, strides=2)(shortcut)])
    x = x * 0.5 + keras.ops.tanh(x)
    x = MaxPooling2D(3, 2, padding="same")(x)
    x = GlobalMaxPooling2D(name="pool")(x)
    return keras.Model(inputs, Dense(3, activation="softmax")(x))


def squeeze_excite():
    inputs = image_input()
    x = Rescaling([0.5, 0.3], [0.0, 0.1])(inputs)
    x = Conv2D(4, 3, activation="silu")(x)
    x = DepthwiseConv2D(3, padding="same", depth_multiplier=2)(x)
    x = Conv2D(8, 3, groups=8, padding="same", activation="gelu")(x)
    gate = GlobalAveragePooling2D()(x)
    gate = Reshape((1, 1, 8))(gate)
    gate = Conv2D(2, 1, activation="relu")(gate)
    gate = Conv2D(8, 1, activation="hard_sigmoid")(gate)
    x = Multiply()([x, gate])
    gate = GlobalAveragePooling2D()(x)
    gate = Dense(3, activation="relu")(gate)
    gate = Reshape((1, 1, 8))(Dense(8, activation="sigmoid")(gate))
    x = Multiply()([x, gate])
    x = LayerNormalization(epsilon=1e-2)(x)
    x = Dense(5, activation="relu")(x)
    x = GlobalAveragePooling2D(keepdims=True, name="pool")(x)
    x = Conv2D(6, 1, activation="tanh")(x)
    x = Flatten()(Conv2D(3, 1)(x))
    return keras.Model(inputs, Activation("softmax")(x))


def u_net():
    inputs = image_input(8)
    x = Concatenate()([inputs, Conv2D(3, 3, padding="same")(inputs)])
    fine = SeparableConv2D(
        4, 3, padding="same", depth_multiplier=2, activation="relu"
    )(x)
    x = MaxPooling2D(2)(fine)
    x = Conv2D(6, 3, padding="same", activation="relu")(x)
    coarse = AveragePooling2D(2)(x)
    x = UpSampling2D(2, interpolation="bilinear")(coarse)
    x = Concatenate()([x, MaxPooling2D(2)(fine)])
    x = Conv2DTranspose(4, 4, strides=2, padding="same")(x)
    x = Cropping2D(1)(ZeroPadding2D(2)(Add()([x, fine])))
    x = Conv2D(3, 3)(x)
    return keras.Model(inputs, Softmax()(x))


def features():
    inputs = image_input(8)
    x = Conv2D(4, 3, padding="same")(inputs)
    x = Add()([x, Conv2D(4, 3, padding="same", activation="relu")(x)])
    y = AveragePooling2D(3, 1, padding="same")(x)
    outputs = {"fine": ReLU()(x), "pooled": GlobalAveragePooling2D()(y)}
    return keras.Model(inputs, outputs)


def siamese():
    tower = keras.Sequential(
        [
            keras.Input((None, None, 2)),
            Conv2D(4, 3, strides=2, activation="relu"),
            BatchNormalization(),
            Conv2D(3, 3, activation="relu"),
            GlobalAveragePooling2D(),
        ],
        name="tower",
    )
    first, second = image_input(), image_input()
    age = keras.Input((2,))
    x = keras.ops.square(tower(first) - tower(second, training=False))
    x = Concatenate()([x, Dense(2, activation="tanh")(age)])
    x = Dense(4, activation="relu")(x)
    return keras.Model([first, second, age], Dense(2)(x))


NETWORKS = (
    sequential,
    residual,
    squeeze_excite,
    u_net,
    features,
    siamese,
)


def with_random_weights(model, seed=0):
    """The same model; its outputs depend on all weights and on the image."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        if "seed" in weight.name:
            continue
        if "kernel" in weight.name:
            # Depthwise kernels see one channel each.
            axes = -2 if weight.shape[-1] == 1 else -1
            fan_in = np.prod(weight.shape[:axes])
            weight.assign(rng.normal(size=weight.shape) * fan_in**-0.5)
        elif weight.name in ("gamma", "moving_variance", "variance"):
            weight.assign(rng.uniform(0.5, 1.5, weight.shape))
        else:
            weight.assign(rng.normal(size=weight.shape) * 0.3)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # it keeps a copy of its weights
    return model


def images_for(model, seed=1):
    """What the model takes: three images, or as many rows of numbers."""
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(3, *x.shape[1:])).astype("float32")
        for x in model.inputs
    ]


def turned(inputs, group, element):
    """Images in another pose, and numbers as they are."""
    return [
        np.stack([oracles.turn(image, group, element) for image in x])
        if x.ndim == 4
        else x
        for x in inputs
    ]


def outputs_of(model, inputs):
    """The arrays that a model returns for these inputs."""
    y = model(inputs if len(inputs) > 1 else inputs[0], training=False)
    return [as_array(array) for array in keras.tree.flatten(y)]


def in_every_pose(model, inputs, group):
    """Outputs of a plain network for each pose, with images turned back.

    The first axis is that of the group.
    """
    every = []
    for element in range(oracles.order(group)):
        inverse = oracles.relative(group, element, 0)
        outputs = outputs_of(model, turned(inputs, group, inverse))
        every.append(turned(outputs, group, element))
    return [np.stack(poses) for poses in zip(*every, strict=True)]
