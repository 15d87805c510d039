"""Wraps any model in an equivariant one."""

from collections.abc import Callable
from collections.abc import Sequence

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.ops._types import Tensor
from keras_equiattn.symmetrization.base import Symmetrized
from keras_equiattn.symmetrization.canonical import Canonicalization
from keras_equiattn.symmetrization.orbit import AVERAGES
from keras_equiattn.symmetrization.orbit import OrbitAverage


def symmetrize(
    model: Callable[[Tensor], Tensor],
    group: str | groups.Group = "p4",
    output: str = "invariant",
    average: str = "logits",
    *,
    canonicalizer: Callable[[Tensor], Tensor] | None = None,
    prior: float = 1.0,
    input_shape: Sequence[int | None] | None = None,
    batch_poses: int | None = None,
    data_format: str | None = None,
    name: str | None = None,
) -> keras.Model:
    """Makes a model exactly equivariant, by a mean over poses or a chosen pose.

    With an average over the orbit, `F(x) = 1 / order * sum_h L_h f(L_h^-1 x)`:
    the model sees the image in every pose, its outputs are turned back, and
    their mean is returned. The result costs `order` times as much.

    With `average="canonical"`, `F(x) = L_c f(L_c^-1 x)`: a small equivariant
    network chooses a pose `c` of the image, the model sees the image in that
    pose alone, and its output is turned back. The result costs one call of the
    model and one of the small network, which has to be trained first: see
    `prior`.

    The model may be any model, trained or not, and the result can be trained
    like any other.

    Args:
        model: a Keras model or layer, or a function of a tensor, that returns
            a tensor. A function cannot be saved.
        group: a group that acts on the grid (z2m, p2, p2m, p4 or p4m), or its
            name.
        output: the kind of outputs of the model. "invariant": numbers for the
            image, which do not turn; "image": an image that turns with the
            input, such as scores of each pixel; "vector": fields of vectors,
            with two channels for each one, see `layers.GroupToVector2D`.
        average: "logits": the mean of what the model returns; "probabilities":
            the logarithm of the mean of the softmax, for a model that returns
            logits along the channels (it is refused with output "vector");
            "canonical": the output for the chosen pose.
        canonicalizer: the model that chooses the pose, for "canonical" alone.
            It takes images to scores `(batch, order)` and is equivariant, which
            means that for an image turned by `g` the score of `h` is the one
            that `g^-1 h` had. Such scores are the mean over pixels and channels
            of a feature map on the group. None is a network of three
            convolutions that sees the image at no more than 24 x 24 pixels. For
            images with three channels it takes at most 4 million multiply-adds
            for p4 and 14 million for p4m, and has 5,800 and 11,000 weights.
        prior: for "canonical" alone, the weight in training of a loss that is
            large where training images are not left as they are. Above zero,
            `fit` on upright images teaches the canonicalizer which way is up.
            Zero is for training images that come in all poses.
        input_shape: height, width and channels in the order of `data_format`.
            Needed where the model does not say it.
        batch_poses: how many poses the model sees at a time, as one batch. None
            is all of them. Fewer take less memory. Not for "canonical".
        data_format: the data format of the images, "channels_last",
            "channels_first" or None (what `keras.config.image_data_format()`
            says).
        name: the name of the new model.

    Returns:
        A functional model with the same inputs and outputs. Its layer
        `OrbitAverage` or `Canonicalization` has the weights of `model`, which
        are not copied.

    Symmetry:
        The output is invariant, or turns with the input, to rounding, for every
        element of the group and every size that the model takes. With
        "canonical" this holds for all images whose pose is chosen clearly, and
        for symmetric images: `Canonicalization` has the proof.

    Raises:
        ValueError: for bad arguments, and for images that are not square if
            the group holds quarter turns and the model sees several poses at a
            time, or one that is chosen.

    Example:
        >>> plain = keras.Sequential([
        ...     keras.Input((8, 8, 1)),
        ...     keras.layers.Flatten(),
        ...     keras.layers.Dense(3),
        ... ])
        >>> turned = symmetrize(plain, "p4")
        >>> turned.output_shape
        (None, 3)
        >>> plain.trainable = False
        >>> chooses = symmetrize(plain, "p4", average="canonical")
        >>> chooses.compile("adam", "mse")  # and fit it on upright images

    References:
        - [Puny et al., 2022](https://arxiv.org/abs/2110.03336), on averages
          over a group and over frames
        - [Kaba et al., 2023](https://arxiv.org/abs/2211.06489), on learned
          canonicalization
        - [Mondal et al., 2023](https://arxiv.org/abs/2310.01647), on the prior
    """
    _checks.choice(average, "average", (*AVERAGES, "canonical"))
    layer: Symmetrized
    if average == "canonical":
        if batch_poses is not None:
            raise ValueError(
                "With `average='canonical'` the model sees one pose of each "
                "image, and `batch_poses` has no meaning. Received: "
                f"batch_poses={batch_poses!r}"
            )
        layer = Canonicalization(
            model, group, output, canonicalizer, prior, data_format
        )
    else:
        if canonicalizer is not None:
            raise ValueError(
                "`canonicalizer` is for `average='canonical'`, which chooses a "
                f"pose. Received: average={average!r}"
            )
        layer = OrbitAverage(
            model, group, output, average, batch_poses, data_format
        )
    if input_shape is None:
        known = getattr(model, "input_shape", None)
        if not isinstance(known, tuple) or len(known) != 4:
            raise ValueError(
                "`symmetrize` takes a model of one image, and needs its "
                "`input_shape` where the model does not say it. Received: a "
                f"model with the input shape {known}"
            )
        input_shape = known[1:]
    inputs = keras.Input(tuple(input_shape))
    return keras.Model(inputs, layer(inputs), name=name)
