"""The tools for rewriting a layer, and the registry of rewritings."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from keras_equiattn.deployment.feature_maps import FeatureMap
from keras_equiattn.graphs import layers_within
from keras_equiattn.graphs import Rewriting

# Takes the layer, what stands for its inputs, and the `PlainRewriting`; returns
# what stands for its output.
Rewriter = Callable[..., Any]

_rewriters: dict[type, Rewriter] = {}


def rewrites(*classes: type) -> Callable[[Rewriter], Rewriter]:
    """Registers how `plain` rewrites the layers of these classes."""

    def register(rewriter: Rewriter) -> Rewriter:
        _rewriters.update(dict.fromkeys(classes, rewriter))
        return rewriter

    return register


def rewriter_of(operation: Any) -> Rewriter | None:
    """The rewriting of layers of exactly this class; None if there is none."""
    return _rewriters.get(type(operation))


class PlainRewriting(Rewriting):
    """Makes layers of Keras in place of the layers of this library.

    Attributes:
        kept: the names and classes of the layers of this library that stay.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.kept: dict[str, str] = {}

    def apply(
        self,
        layer: keras.layers.Layer,
        *inputs: Any,
        weights: Sequence[Any] = (),
    ) -> Any:
        """Calls a new layer, or that of an earlier call, and sets its weights.

        Args:
            layer: a layer of Keras that is not built.
            *inputs: the inputs of the layer; several are passed as a list.
            weights: the values of its weights.
        """
        layer, is_new = self.shared(layer)
        y = layer(inputs[0] if len(inputs) == 1 else list(inputs))
        if is_new and layer.weights:
            layer.set_weights(
                [keras.ops.convert_to_numpy(weight) for weight in weights]
            )
        return y

    def copy(self, inputs: Sequence[Any]) -> list[Any]:
        """Calls a copy of the layer or operation of the first network.

        Args:
            inputs: the inputs, each as in the first network.

        Returns:
            All its outputs.
        """
        tensors = [x.map if isinstance(x, FeatureMap) else x for x in inputs]
        return [self.value(x) for x in self.copied(tensors)]

    def copied(self, tensors: Sequence[Any]) -> list[Any]:
        """`copy` of tensors, which may have other axes than in the network."""
        if not isinstance(self.source, keras.layers.Layer):
            return self.call(tensors)
        args, kwargs = self.arguments(tensors)
        layer, is_new = self.shared(self._made_again())
        y = layer(*args, **kwargs)
        if is_new:
            copy_weights(self.source, layer)
            own = filter(is_own, layers_within(layer))
            kinds = [type(each).__name__ for each in own]
            if kinds:
                self.kept[layer.name] = ", ".join(dict.fromkeys(kinds))
        return keras.tree.flatten(y)

    def _made_again(self) -> keras.layers.Layer:
        """A layer like the source; the source itself if it is a `Lambda`."""
        source = self.source
        if isinstance(source, keras.layers.Lambda):
            return source
        config = {**source.get_config(), "name": self.name()}
        try:
            return type(source).from_config(config)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Layer '{source.name}' ({type(source).__name__}) cannot be "
                "made again from its config. Functions that it holds must be "
                "registered by `keras.saving.register_keras_serializable`, and "
                "may not be lambdas."
            ) from error

    @property
    def has_options(self) -> bool:
        """Whether the call has other arguments than tensors."""
        args, kwargs = self.arguments(self.node.input_tensors)
        values = keras.tree.flatten([args, kwargs])
        given = [v for v in values if v is not None and v is not False]
        return len(given) > len(self.node.input_tensors)

    def value(self, x: Any) -> Any:
        """The value in place of a tensor: a feature map if it has five axes."""
        is_map = len(x.shape) == 5 and None not in x.shape[3:]
        return self.feature_map(x) if is_map else x

    def feature_map(self, x: Any) -> FeatureMap:
        """A feature map on a group, from one of its forms.

        Args:
            x: a feature map, or a tensor of five axes.
        """
        if isinstance(x, FeatureMap):
            return x
        return FeatureMap(int(x.shape[3]), self.reshaped, map=x)

    def folded(self, image: Any, order: int) -> FeatureMap:
        """A feature map from its folded form."""
        return FeatureMap(order, self.reshaped, image=image)

    def reshaped(
        self, x: Any, shape: tuple[int | None, ...], suffix: str = "reshaped"
    ) -> Any:
        """Reshapes all axes but that of the batch.

        Args:
            x: a tensor.
            shape: the sizes of the new axes, with at most one None.
            suffix: the suffix of the name of the layer.
        """
        # Not shared: only some calls of a layer need it.
        name = self.name(suffix)
        self._names.add(name)
        target = tuple(-1 if n is None else n for n in shape)
        return keras.layers.Reshape(target, name=name, dtype=x.dtype)(x)

    def dense(self, x: Any, kernel: Any, activation: str | None = None) -> Any:
        """A linear map of the last axis without a bias.

        Args:
            x: a tensor.
            kernel: `(channels, units)`.
            activation: the name of the activation of the result, or None.
        """
        layer = keras.layers.Dense(
            kernel.shape[-1],
            activation=activation,
            use_bias=False,
            **self.named("dense"),
        )
        return self.apply(layer, x, weights=[kernel])

    def activation(self, x: Any, name: str) -> Any:
        """Applies an activation of Keras."""
        layer = keras.layers.Activation(name, **self.named(name))
        return self.apply(layer, x)

    def negative(self, x: Any) -> Any:
        """`-x`."""
        layer = keras.layers.Rescaling(-1.0, **self.named("negative"))
        return self.apply(layer, x)

    def product(self, *factors: Any) -> Any:
        """The product of tensors that broadcast."""
        layer = keras.layers.Multiply(**self.named("product"))
        return self.apply(layer, *factors)

    def sum(self, *terms: Any) -> Any:
        """The sum of tensors that broadcast."""
        return self.apply(keras.layers.Add(**self.named("sum")), *terms)


def copy_weights(source: Any, layer: Any) -> None:
    """Gives a layer the weights of another one of the same kind."""
    layer.set_weights(source.get_weights())
    for each in layers_within(layer):
        if isinstance(each, keras.layers.Normalization):
            each.finalize_state()


def is_own(layer: Any) -> bool:
    """Whether a layer is of this library, or extends one that is."""
    kinds = type(layer).__mro__
    return any(c.__module__.split(".")[0] == "keras_equiattn" for c in kinds)
