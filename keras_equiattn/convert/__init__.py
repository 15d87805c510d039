"""Loads weights that the papers' own code has trained into our models.

The public functions are in this file. `reading` reads files and assigns arrays;
one file for each authors' code says where our variables come from. Nothing here
may build a network: `applications` says which converter belongs to which
network.
"""

import os
from collections.abc import Mapping
from typing import Any

import keras

from keras_equiattn.convert.from_acmix import acmix_buffers
from keras_equiattn.convert.from_acmix import acmix_kind
from keras_equiattn.convert.from_acmix import acmix_parts
from keras_equiattn.convert.from_acmix import split_maps
from keras_equiattn.convert.from_att_gconvs import att_gconvs_parts
from keras_equiattn.convert.from_att_gconvs import model_kind
from keras_equiattn.convert.from_att_gconvs import state_kind
from keras_equiattn.convert.from_g_selfatt import check_buffers
from keras_equiattn.convert.from_g_selfatt import EPSILON
from keras_equiattn.convert.from_g_selfatt import gsa_buffers
from keras_equiattn.convert.from_g_selfatt import gsa_kind
from keras_equiattn.convert.from_g_selfatt import gsa_parts
from keras_equiattn.convert.from_octic_vits import octic_arrays
from keras_equiattn.convert.from_octic_vits import octic_kind
from keras_equiattn.convert.from_octic_vits import octic_looks
from keras_equiattn.convert.from_octic_vits import octic_parts
from keras_equiattn.convert.reading import assign
from keras_equiattn.convert.reading import check
from keras_equiattn.convert.reading import read

__all__ = [
    "G_SELFATT_EPSILON",
    "G_SELFATT_ROT_MNIST",
    "acmix",
    "att_gconvs",
    "g_selfatt",
    "octic_vits",
]

G_SELFATT_EPSILON: float = EPSILON
"""The `epsilon` of a `GSANet` that `g_selfatt` loads into: 1e-12."""

G_SELFATT_ROT_MNIST: tuple[float, float] = (0.1307, 0.3081)
"""The `normalization` of rotated MNIST in the code of `g_selfatt`."""


def att_gconvs(
    model: keras.Model, state: Mapping[str, Any] | str | os.PathLike[str]
) -> keras.Model:
    """Loads weights of Romero et al. 2020 into a model, in place.

    It is for the networks of "Attentive Group Equivariant Convolutional
    Networks", trained with the authors' PyTorch code. The model must have the
    same architecture: group, widths, attention. It then computes the same
    function, to rounding. The exception is `attention="full"` or `"channel"` on
    p4m: theirs is not equivariant there, ours is.

    Images must be scaled as in their training: pass `normalization` to the
    network. The authors' networks for rotated MNIST were trained on digits
    with rows and columns exchanged.

    Layers find their weights by name, as `RotMNISTCNN`, `AllCNNC`, `ResNet44`
    and `PCamDenseNet` name them: `conv3` takes those of the authors' module
    `c3`, `block1_bn` those of `block_layers.0.bn`. An `InputAttention` named
    `<layer>_attention` takes them from the same module as `<layer>`. A layer
    of another name takes the module of that name, for networks of your own.

    Args:
        model: a built model of this library's convolutions, attention layers
            and Keras' `BatchNormalization`, on z2, p4 or p4m.
        state: a mapping of the authors' names to arrays (NumPy or PyTorch), or
            the path of a file that holds one: `.npz`, or with PyTorch
            installed `.pth`, `.pt` or `.bin`. The mapping may lie under
            "state_dict" or "model", and all names may begin with "module.".

    Returns:
        The model.

    Raises:
        ValueError: for a model or file of another kind, and for weights that
            are missing, not used, or of another shape. The model is then as
            it was.
        ImportError: for a PyTorch file if PyTorch is not installed.

    Example:
        >>> import numpy as np
        >>> from keras_equiattn import layers
        >>> model = keras.Sequential([
        ...     keras.Input((28, 28, 1)),
        ...     layers.LiftingConv2D(10, 3, use_bias=False, name="conv1"),
        ... ])
        >>> state = {"c1.weight": np.ones((10, 1, 3, 3), "float32")}
        >>> float(att_gconvs(model, state).get_weights()[0].sum())
        90.0

    References:
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830) and the
          authors' code, https://github.com/dwromero/att_gconvs
    """
    parts = att_gconvs_parts(model)
    arrays = read(state)
    check(model, parts, arrays, state_kind(arrays), model_kind(model))
    assign(parts, arrays)
    return model


def g_selfatt(
    model: keras.Model, state: Mapping[str, Any] | str | os.PathLike[str]
) -> keras.Model:
    """Loads weights of Romero and Cordonnier 2021 into a `GSANet`, in place.

    It is for the networks of "Group Equivariant Stand-Alone Self-Attention for
    Vision", trained with the authors' PyTorch code. The model must have the
    same architecture, with `epsilon=G_SELFATT_EPSILON`, which is 1e-12, also
    with `norm="batch"`: the encoding of positions has it, too.

    On z2 the model computes the same function, to rounding. On other groups
    it does not: their attention on the group takes the embedding of relative
    elements where it is not equivariant, ours at `g^-1 m`, see
    `GroupSelfAttention2D`. It computes what their code would compute with that
    index corrected.

    Images must be scaled as in their training: pass `normalization` to the
    network, for rotated MNIST `G_SELFATT_ROT_MNIST`, which is `(0.1307,
    0.3081)`. Like those of attentive group convolution, the authors' networks
    for rotated MNIST are trained on digits with rows and columns exchanged, as
    in the original file. Layers find their weights by name, as `GSANet` names
    them.

    The `state_dict()` of their network also stores at which positions every
    element sees the neighbours of a pixel, and which elements it sees
    (`row_indices`, `col_indices`, `g_indices`, and `group.` for the group
    itself). These must be those of the group and the window of `model`. Where
    they are left out, as an `.npz` file may do, group and window are checked by
    shapes alone: p4 and p2m, or windows of two sizes, cannot be told apart.
    Other `crops` are noticed only where layers attend to whole maps, and an
    `activation_function` other than their "Swish", which is SiLU, is never
    noticed.

    Args:
        model: a `GSANet`.
        state: a mapping or a file, see `att_gconvs`.

    Returns:
        The model.

    Raises:
        ValueError: for a model or file of another kind, for weights that are
            missing, not used, or of another shape, and for those of another
            group or window. The model is then as it was.
        ImportError: for a PyTorch file if PyTorch is not installed.

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977) and
          the authors' code, https://github.com/dwromero/g_selfatt
    """
    parts = gsa_parts(model)
    arrays = read(state)
    orders = [
        len(array)
        for key, array in arrays.items()
        if key.endswith("group_embedding.weight") and array.ndim
    ]
    looks = gsa_kind(orders[0]) if orders else None
    kind = gsa_kind(model.get_layer("lift").group.order)
    buffers = gsa_buffers(model)
    check(model, parts, arrays, looks, kind, buffers)
    check_buffers(model, buffers, arrays)
    assign(parts, arrays)
    return model


def acmix(
    model: keras.Model, state: Mapping[str, Any] | str | os.PathLike[str]
) -> keras.Model:
    """Loads weights of Pan et al. 2022 into an `ACmixSwin`, in place.

    It is for the Swin transformers of "On the Integration of Self-Attention and
    Convolution", trained with the authors' PyTorch code, and with
    `mixer="attention"` for those of Swin itself. The model must have the same
    architecture: depths, patches, windows, classes. It then computes the same
    function, to rounding.

    Images must be scaled as in their training: pass `normalization` to the
    network, `((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))` for ImageNet.
    Layers find their weights by name, as `ACmixSwinTiny` names them. The images
    may have another size if the windows stay the same.

    Args:
        model: an `ACmixSwinTiny` or `ACmixSwinSmall`; without the top, the
            classifier of the file is left out.
        state: a mapping or a file, see `att_gconvs`.

    Returns:
        The model.

    Raises:
        ValueError: for a model or file of another kind, and for weights that
            are missing, not used, or of another shape. The model is then as
            it was.
        ImportError: for a PyTorch file if PyTorch is not installed.

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556) and the
          authors' code, https://github.com/LeapLabTHU/ACmix
    """
    parts = acmix_parts(model)
    arrays = split_maps(read(state))
    looks = None
    if any(".attn.query." in key for key in arrays):
        looks = acmix_kind(any(".dep_conv." in key for key in arrays))
    kind = acmix_kind(any(".dep_conv." in key for key in parts))
    check(model, parts, arrays, looks, kind, acmix_buffers(model, arrays))
    assign(parts, arrays)
    return model


def octic_vits(
    model: keras.Model, state: Mapping[str, Any] | str | os.PathLike[str]
) -> keras.Model:
    """Loads weights of Nordström et al. 2025 into an `OcticViT`, in place.

    It is for the networks of "Octic Vision Transformers", hybrid and invariant,
    as the authors' PyTorch code saves them after a training as DeiT III or
    DINOv2. The model must have the same architecture, for which `OcticViT` has
    a table; those of DINOv2 have no classifier. It then computes the same
    function, to rounding. A file does not tell the number of heads: theirs have
    16. A file holds positions for one size of images. Register tokens are
    refused.

    Images must be scaled as in their training: pass `normalization` to the
    network, `((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))` for ImageNet.
    Layers find their weights by name, as `OcticViT` names them.

    Args:
        model: an `OcticViT`; without the top, the classifier of the file is
            left out.
        state: a mapping or a file, see `att_gconvs`.

    Returns:
        The model.

    Raises:
        ValueError: for a model or file of another kind, and for weights that
            are missing, not used, or of another shape. The model is then as
            it was.
        ImportError: for a PyTorch file if PyTorch is not installed.

    References:
        - [Nordström et al., 2025](https://arxiv.org/abs/2505.15441) and the
          authors' code, https://github.com/davnords/octic-vits
    """
    parts = octic_parts(model)
    arrays = octic_arrays(model, read(state))
    check(model, parts, arrays, octic_looks(arrays), octic_kind(model))
    assign(parts, arrays)
    return model
