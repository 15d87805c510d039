"""How layers that move, add or remove pixels are converted."""

import itertools
from typing import Any

import keras

from keras_equiattn import layers
from keras_equiattn.from_plain.conversion import Conversion
from keras_equiattn.from_plain.conversion import register_conversion
from keras_equiattn.from_plain.strides import exactness
from keras_equiattn.from_plain.strides import fitting_window
from keras_equiattn.from_plain.strides import refuse_strides


@register_conversion(keras.layers.MaxPooling2D, keras.layers.AveragePooling2D)
def pooling(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    size, window, strides = x.shape[1:3], layer.pool_size, layer.strides
    exact = exactness(to, size, window, strides, 1, layer.padding)
    mode = "max" if isinstance(layer, keras.layers.MaxPooling2D) else "mean"
    if exact and layer.padding == "valid":
        options = {"exact": exact, **to.common()}
        return to.apply(
            layers.SpatialPooling2D(window, strides, mode, **options), x
        )
    if exact is True or to.keep:
        return padded_pooling(layer, x, to)
    fitting = fitting_window(to, size, strides)
    if to.inflate or fitting is None:
        refuse_strides(to, size, window, strides, 1, layer.padding)
    to.note(
        f"Its windows have {fitting} pixels in place of {window}, and no "
        "padding, which is exact on this size."
    )
    new = layers.SpatialPooling2D(fitting, strides, mode, **to.common())
    return to.apply(new, x)


def padded_pooling(layer: Any, x: Any, to: Conversion) -> Any:
    """Pooling by Keras, which can pad; feature maps are pooled pose by pose."""
    if len(x.shape) == 4:
        return to.like(layer, x)
    kind: Any = keras.layers.AveragePooling3D
    if isinstance(layer, keras.layers.MaxPooling2D):
        kind = keras.layers.MaxPooling3D
    new = kind(
        (*layer.pool_size, 1),
        (*layer.strides, 1),
        padding=layer.padding,
        data_format="channels_last",
        **to.named(),
    )
    return to.apply(new, x)


@register_conversion(
    keras.layers.GlobalAveragePooling2D, keras.layers.GlobalMaxPooling2D
)
def global_pooling(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    if len(x.shape) == 4:
        return to.like(layer, x)
    average = isinstance(layer, keras.layers.GlobalAveragePooling2D)
    mode = "mean" if average else "max"
    return to.apply(layers.GlobalSpatialPooling2D(mode, **to.common()), x)


@register_conversion(keras.layers.UpSampling2D)
def upsampling(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    if layer.interpolation not in ("nearest", "bilinear"):
        to.refuse(
            f"it has interpolation='{layer.interpolation}'. Take 'nearest' or "
            "'bilinear'."
        )
    if layer.interpolation == "nearest" and not to.group.acts_on_grid:
        to.note(
            "It repeats pixels as squares, which is far off between the "
            "quarter turns; interpolation='bilinear' is closer there."
        )
    new = layers.SpatialUpSampling2D(
        layer.size, layer.interpolation, **to.common()
    )
    return to.apply(new, x)


@register_conversion(keras.layers.ZeroPadding2D)
def zero_padding(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    sides = tuple(map(tuple, layer.padding))
    if not falls_onto_itself(sides, to):
        if to.keep:
            to.note("It stays, and is not exactly equivariant.")
        elif to.inflate:
            to.refuse(
                f"it does not pad all sides alike (padding={sides}). Many "
                "networks pad all sides alike if the size is odd, so another "
                "size of the input may help."
            )
        else:
            most = max(itertools.chain.from_iterable(sides))
            to.note(f"It adds {most} pixels at every side in place of {sides}.")
            sides = ((most, most), (most, most))
    (top, bottom), (left, right) = sides
    if (top, left) == (bottom, right) and (top == left or not to.keep):
        new: Any = layers.SpatialPadding2D((top, left), **to.common())
    elif len(x.shape) == 4:
        return to.like(layer, x)
    else:
        new = keras.layers.ZeroPadding3D((*sides, (0, 0)), **to.named())
    return to.apply(new, x)


@register_conversion(keras.layers.Cropping2D)
def cropping(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    sides = tuple(map(tuple, layer.cropping))
    if not falls_onto_itself(sides, to):
        if not to.keep:
            to.refuse(
                "it does not crop all sides alike "
                f"(cropping={sides}). Remove the same number at all of them."
            )
        to.note("It stays, and is not exactly equivariant.")
    if len(x.shape) == 4:
        return to.like(layer, x)
    new = keras.layers.Cropping3D((*sides, (0, 0)), **to.named())
    return to.apply(new, x)


def falls_onto_itself(
    sides: tuple[tuple[int, ...], ...], to: Conversion
) -> bool:
    """Whether the group maps the rows and columns at the sides onto themselves.

    Args:
        sides: how many there are at the top and the bottom, and at the left and
            the right.
        to: the conversion, which has the group.
    """
    if to.group.name == "z2":
        return True
    (top, bottom), (left, right) = sides
    if to.group.name == "z2m":
        return left == right
    if to.group.quarter_turns:
        return len({top, bottom, left, right}) == 1
    return top == bottom and left == right


@register_conversion(
    keras.layers.Flatten, keras.layers.Permute, keras.layers.Reshape
)
def reshaping(layer: Any, x: Any, to: Conversion) -> Any:
    """Only numbers without pixels may be reshaped."""
    (plain,) = to.input_shapes
    pixels = [tuple(plain[1:]), tuple(to.output_shape[1:])]
    lists = [[n for n in shape if n != 1] for shape in pixels]
    if lists[0] == lists[1] and len(lists[0]) <= 1:
        return x if len(x.shape) == 5 else to.like(layer, x)
    pooled = None
    if len(to.output_shape) == 2 and len(x.shape) == 5:
        size = (x.shape[0], 1, 1, to.group.order, x.shape[-1])
        pooled = keras.KerasTensor(size, x.dtype)
    to.refuse(
        "it gives every pixel a place of its own, which the pixel leaves when "
        "the image is turned. Take `GlobalAveragePooling2D` in its place.",
        instead=pooled,
    )


@register_conversion(
    keras.layers.RandomBrightness,
    keras.layers.RandomContrast,
    keras.layers.RandomFlip,
    keras.layers.RandomRotation,
    keras.layers.RandomTranslation,
    keras.layers.RandomZoom,
)
def augmentation(layer: Any, x: Any, to: Conversion) -> Any:
    if len(x.shape) != 4:
        to.refuse("it changes images. Put it before the first convolution.")
    return to.like(layer, x)
