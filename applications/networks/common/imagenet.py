"""The arguments, first and last layers that networks for ImageNet share."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common import pretrained
from keras_equiattn.applications.registry import Variants

# How a network without a classifier ends.
POOLING = (None, "avg", "max")
# The beginnings of residual and self-attention networks.
STEMS = ("imagenet", "cifar")
# PyTorch's default, which the authors use.
BATCH_NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Frame:
    """The arguments that all networks for ImageNet have around their stages.

    Attributes:
        include_top: whether the network ends with a classifier.
        weights: None (random) or the path of a weights file.
        input_shape: `(height, width, channels)`; height and width may be None
            where the network takes images of any size.
        pooling: the end of a network without classifier: None for feature maps,
            "avg" or "max" for their mean or maximum over space.
        classes: number of classes.
        classifier_activation: activation of the classifier; None for logits.
        name: name of the model; None for the title of the network.
        normalization: `(mean, std)` of images, see `ends.check_normalization`.
        features_only: whether the model returns the feature maps of all
            stages. This needs `include_top=False` and no pooling.

    Raises:
        ValueError: if an argument has a value that is not accepted.
    """

    include_top: bool
    weights: str | Path | None
    input_shape: tuple[int | None, int | None, int]
    pooling: str | None
    classes: int
    classifier_activation: str | None
    name: str | None
    normalization: ends.Statistics | None
    features_only: bool

    def __post_init__(self) -> None:
        _checks.flag(self.include_top, "include_top")
        _checks.choice(self.pooling, "pooling", POOLING)
        _checks.integer(self.classes, "classes")
        ends.check_activation(self.classifier_activation)
        _checks.flag(self.features_only, "features_only")
        if self.features_only and (self.include_top or self.pooling):
            raise ValueError(
                "`features_only` must be False with a classifier or pooling. "
                "Received: features_only=True, "
                f"include_top={self.include_top}, pooling={self.pooling!r}"
            )

    def build(self, title: str, stages: Callable[[Any], Any]) -> keras.Model:
        """Returns the model of a network.

        Args:
            title: the name of the network in messages. In lower case it is the
                name of a model that was not given one.
            stages: a function from normalised images `(batch, height, width,
                channels)` to the feature maps of the stages, a list, and to
                the vector `(batch, channels)` that the classifier takes. None
                means the mean over space of the last map.

        Raises:
            ValueError: if an argument has a value that is not accepted.
        """
        shape = ends.check_image_shape(self.input_shape, any_size=True)
        pretrained.check_weights(self.weights, {}, title, shape, self.classes)
        statistics = ends.check_normalization(self.normalization, shape[-1])
        inputs = keras.Input(shape, name="image")
        outputs = self._end(*stages(ends.normalize(inputs, statistics)))
        model = keras.Model(inputs, outputs, name=self.name or title.lower())
        pretrained.load_weights(model, self.weights, {})
        return model

    def _end(self, features: list[Any], summary: Any) -> Any:
        if self.features_only:
            return features
        *_, x = features
        if self.include_top:
            x = _pooled(x, "mean") if summary is None else summary
            x = ends.logits(x, self.classes)
            return ends.predictions(x, self.classifier_activation)
        if self.pooling is None:
            return x
        return _pooled(x, "max" if self.pooling == "max" else "mean")


def with_plain(name: str, plain: str, **arguments: Any) -> Variants:
    """Returns the variants of a network with ACmix: itself and the plain one.

    Args:
        name: the name of the network with ACmix.
        plain: the `mixer` of the plain network, with which its name ends.
        **arguments: other arguments of both networks.
    """
    return {name: arguments, f"{name}_{plain}": {"mixer": plain, **arguments}}


def title(plain: str, mixer: str) -> str:
    """Returns the name of a network: "ACmixSAN10", or plain "SAN10"."""
    return f"ACmix{plain}" if mixer == "acmix" else plain


def paths(mixer: str) -> str:
    """Returns the `paths` of an ACmix layer: both, or only attention."""
    return "both" if mixer == "acmix" else "attention"


def batch_norm(x: Any, name: str, relu: str | None = None) -> Any:
    """Applies batch normalisation with the authors' constants, and ReLU.

    Args:
        x: images; channels are the last axis.
        name: name of the layer.
        relu: name of the ReLU that follows; None for none.
    """
    x = keras.layers.BatchNormalization(
        momentum=0.9, epsilon=BATCH_NORM_EPSILON, name=name
    )(x)
    return x if relu is None else keras.layers.ReLU(name=relu)(x)


def _pooled(x: Any, kind: str) -> Any:
    layer = {
        "mean": keras.layers.GlobalAveragePooling2D,
        "max": keras.layers.GlobalMaxPooling2D,
    }[kind]
    return layer(
        data_format="channels_last",
        dtype=ends.end_dtype(),
        name=f"global_{kind}",
    )(x)
