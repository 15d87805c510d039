"""Plain architectures of different shape, with the sizes that suit them."""

import functools

import keras
from keras import layers


def application(name, **options):
    """A network of `keras.applications`, with random weights."""
    build = getattr(keras.applications, name)

    def built(size):
        return build(weights=None, input_shape=(size, size, 3), **options)

    return built


def digits(size):
    """The convolutional network of Keras' first examples."""
    return keras.Sequential(
        [
            keras.Input((size, size, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )


def all_convolutional(size):
    inputs = x = keras.Input((size, size, 3))
    for filters, strides in ((96, 1), (96, 2), (192, 1), (192, 2), (192, 1)):
        x = layers.Conv2D(
            filters, 3, strides, padding="same", activation="relu"
        )(x)
    x = layers.Conv2D(10, 1, activation="relu")(x)
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(x))


def u_net(size, upsampling=None):
    inputs = x = keras.Input((size, size, 1))
    skips = []
    for filters in (16, 32):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(64, 3, padding="same", activation="relu")(x)
    for filters, skip in zip((32, 16), reversed(skips), strict=True):
        if upsampling:
            x = layers.UpSampling2D(2, interpolation=upsampling)(x)
        else:
            x = layers.Conv2DTranspose(filters, 2, 2)(x)
        x = layers.Concatenate()([x, skip])
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(2, 1, activation="softmax")(x))


def autoencoder(size):
    inputs = x = keras.Input((size, size, 1))
    for filters in (16, 32):
        x = layers.Conv2D(filters, 3, 2, padding="same", activation="relu")(x)
    for filters in (32, 16):
        x = layers.Conv2DTranspose(
            filters, 3, 2, padding="same", activation="relu"
        )(x)
    x = layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x)
    return keras.Model(inputs, x)


def conv_mixer(size):
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(64, 2, 2, activation="gelu")(inputs)
    for _ in range(4):
        y = layers.DepthwiseConv2D(5, padding="same", activation="gelu")(x)
        x = layers.Add()([x, layers.BatchNormalization()(y)])
        x = layers.Conv2D(64, 1, activation="gelu")(x)
        x = layers.BatchNormalization()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def vision_transformer(size):
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(32, 4, 4, name="patches")(inputs)
    x = layers.Reshape((-1, 32), name="tokens")(x)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 16)(y, y)])
        y = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(32)(y)])
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def pixel_attention(size):
    """Self-attention between the pixels of a small feature map."""
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(32, 3, padding="same")(inputs)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 16, name="mha")(x, x)])
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(x))


def residual(size, normalization):
    """A small residual network with another normalisation."""
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(32, 3, padding="same")(inputs)
    for _ in range(2):
        y = layers.Conv2D(32, 3, padding="same")(x)
        y = layers.ReLU()(normalization()(y))
        x = layers.Add()([x, layers.Conv2D(32, 3, padding="same")(y)])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def res_next(size):
    return residual(
        size, lambda: layers.Conv2D(32, 3, padding="same", groups=8)
    )


def siamese(size):
    tower = keras.Sequential(
        [
            keras.Input((size, size, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
        ],
        name="tower",
    )
    pair = [keras.Input((size, size, 1)) for _ in range(2)]
    x = layers.Multiply()([tower(image) for image in pair])
    return keras.Model(pair, layers.Dense(1)(x))


def detector(size):
    """Two outputs for every pixel, from a feature pyramid."""
    inputs = keras.Input((size, size, 3))
    fine = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    coarse = layers.Conv2D(16, 3, padding="same", activation="relu")(
        layers.AveragePooling2D(2)(fine)
    )
    x = layers.Add()([fine, layers.UpSampling2D(2)(coarse)])
    outputs = {
        "scores": layers.Conv2D(3, 1, name="scores")(x),
        "sizes": layers.Conv2D(1, 1, activation="softplus", name="sizes")(x),
    }
    return keras.Model(inputs, outputs)


# Name, size of the image, and what builds it.
ARCHITECTURES = {
    "ConvNeXtTiny": (224, application("ConvNeXtTiny")),
    "DenseNet121": (225, application("DenseNet121")),
    "EfficientNetB0": (225, application("EfficientNetB0")),
    "EfficientNetV2B0": (225, application("EfficientNetV2B0")),
    "InceptionResNetV2": (299, application("InceptionResNetV2")),
    "InceptionV3": (299, application("InceptionV3")),
    "MobileNet": (224, application("MobileNet")),
    "MobileNetV2": (225, application("MobileNetV2")),
    "MobileNetV3Small": (225, application("MobileNetV3Small")),
    "NASNetMobile": (224, application("NASNetMobile")),
    "ResNet50": (225, application("ResNet50")),
    "ResNet50V2": (225, application("ResNet50V2")),
    "VGG16": (224, application("VGG16")),
    "VGG16, `include_top=False`": (
        224,
        application("VGG16", include_top=False, pooling="avg"),
    ),
    "Xception": (299, application("Xception")),
    "digits with `Flatten`": (28, digits),
    "All-CNN": (32, all_convolutional),
    "U-Net, transposed convolutions": (32, u_net),
    "U-Net, bilinear": (32, functools.partial(u_net, upsampling="bilinear")),
    "autoencoder": (28, autoencoder),
    "ConvMixer": (32, conv_mixer),
    "ResNet, group normalisation": (
        32,
        functools.partial(
            residual, normalization=lambda: layers.GroupNormalization(8)
        ),
    ),
    "ResNeXt": (32, res_next),
    "Siamese": (28, siamese),
    "pyramid with two heads": (32, detector),
    "vision transformer": (32, vision_transformer),
    "attention between pixels": (8, pixel_attention),
}
