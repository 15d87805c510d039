"""Finds the attentive layers in the graph of a model, and reads their maps."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn.graphs import has_graph
from keras_equiattn.graphs import layers_within
from keras_equiattn.graphs import nodes
from keras_equiattn.layers.base.attention_layer import AttentionLayer

Pitch = tuple[float, float]
Maps = dict[str, np.ndarray]


@dataclasses.dataclass
class Site:
    """Where a graph calls an attentive layer, or a model that has some.

    Attributes:
        operation: the layer or the model.
        tensors: its symbolic inputs.
        outputs: its symbolic outputs.
        keywords: names of the last inputs, which are passed by keyword.
        pitches: rows and columns of the image per pixel, before and after.
        inner: the sites within a model, by name; empty for a layer.
    """

    operation: Any
    tensors: list[Any]
    outputs: list[Any]
    keywords: list[str]
    pitches: tuple[Pitch, Pitch]
    inner: "Sites"


Sites = dict[str, Site]


class _Reader(keras.Model):
    """A model from the input of another to the maps of its layers by name."""

    def __init__(
        self,
        model: keras.Model,
        sites: Sites,
        query: tuple[int, int] | None = None,
    ) -> None:
        # Inputs keep their dtype: the layers know theirs.
        super().__init__(name="attention_maps", autocast=False)
        self.query = query
        self.names = list(sites)
        self.counts = [len(site.tensors) for site in sites.values()]
        self.keywords = [site.keywords for site in sites.values()]
        tensors = [tensor for s in sites.values() for tensor in s.tensors]
        self.before = keras.Model(model.inputs, tensors, name="before")
        self.parts = [
            _Reader(site.operation, site.inner, query)
            if site.inner
            else site.operation
            for site in sites.values()
        ]
        self.built = True

    def call(self, inputs: list[Any]) -> dict[str, dict[str, Any]]:
        values = iter(keras.tree.flatten(self.before(inputs, training=False)))
        found: dict[str, dict[str, Any]] = {}
        for name, part, count, keywords in zip(
            self.names, self.parts, self.counts, self.keywords, strict=True
        ):
            own = [next(values) for _ in range(count)]
            if isinstance(part, _Reader):
                inner = part(own)
                found |= {f"{name}/{key}": inner[key] for key in inner}
            else:
                split = count - len(keywords)
                _, found[name] = part(
                    *own[:split],
                    **dict(zip(keywords, own[split:], strict=True)),
                    return_attention_maps=True,
                    query=self.query,
                )
        return found


def read(
    model: keras.Model,
    images: Any,
    sites: Sites,
    query: tuple[int, int] | None = None,
) -> dict[str, Maps]:
    """The maps of the sites for a batch of images."""
    if len(model.inputs) != 1:
        raise ValueError(
            f"`model` must have one input. Received: '{model.name}' with "
            f"{len(model.inputs)}"
        )
    images = keras.ops.convert_to_numpy(images)
    (expected,) = model.inputs
    if images.ndim != len(expected.shape):
        raise ValueError(
            f"`images` must be a batch of rank {len(expected.shape)}: the "
            f"model '{model.name}' takes {tuple(expected.shape)}. "
            f"Received: shape {images.shape}"
        )
    if not sites:
        return {}
    # Compiled: the first time, eager operations take longer on all backends.
    found = _Reader(model, sites, query).predict_on_batch(images)
    return {
        name: {key: _wide(value) for key, value in found[name].items()}
        for name in leaves(sites)
    }


def find(model: keras.Model) -> Sites:
    """All sites of a model."""
    if not has_graph(model):
        raise ValueError(
            "`model` must be a functional or Sequential Keras model that is "
            "built: layers are found in its graph, which subclassed models do "
            f"not have. Received: {model!r}"
        )
    sites, _ = _sites(model)
    if not sites:
        raise ValueError(
            f"Model '{model.name}' has no attentive layers: none of its "
            "layers is a `keras_equiattn.layers.base.AttentionLayer` with a "
            "path of attention."
        )
    return sites


def select(sites: Sites, layers: str | Iterable[str] | None) -> Sites:
    """The sites of some layers, by full names."""
    if layers is None:
        return sites
    wanted = [layers] if isinstance(layers, str) else list(layers)
    for name in wanted:
        _checks.known_name(name, "attentive layer", leaves(sites))
    return _keep(sites, wanted)


def _sites(
    model: keras.Model, pitch: Pitch = (1.0, 1.0)
) -> tuple[Sites, Pitch]:
    """Sites in the order of execution, and the pitch of the output."""
    sites: Sites = {}
    pitches = {id(tensor): pitch for tensor in model.inputs}
    for node in nodes(model):
        if node.is_input:
            continue
        operation, tensors = node.operation, list(node.input_tensors)
        before = max(pitches[id(tensor)] for tensor in tensors)
        after = _after(operation, before)
        inner: Sites = {}
        attentive = _attends(operation)
        if not attentive and has_graph(operation):
            inner, after = _sites(operation, before)
        elif not attentive and _hides_attention(operation):
            raise ValueError(
                f"Layer '{operation.name}' of '{model.name}' calls attentive "
                "layers in its own code, where they cannot be found. Build it "
                "as a functional model."
            )
        if attentive or inner:
            name, uses = operation.name, 1
            while name in sites:
                uses += 1
                name = f"{operation.name}#{uses}"
            keywords = [
                key
                for key, value in node.arguments.kwargs.items()
                if keras.backend.is_keras_tensor(value)
            ]
            sites[name] = Site(
                operation,
                tensors,
                list(node.outputs),
                keywords,
                (before, after),
                inner,
            )
        pitches |= {id(tensor): after for tensor in node.outputs}
    return sites, max(pitches[id(tensor)] for tensor in model.outputs)


def _after(operation: Any, pitch: Pitch) -> Pitch:
    """The pitch after an operation: strides widen it, upsampling narrows it."""
    name = type(operation).__name__
    upsampling = "UpSampling" in name
    steps = getattr(operation, "size" if upsampling else "strides", None)
    steps = steps or getattr(operation, "pool_size", None) or 1
    steps = np.atleast_1d(steps).astype(float)
    if upsampling or "Transpose" in name:
        steps = 1 / steps
    return pitch[0] * float(steps[0]), pitch[1] * float(steps[:2][-1])


def _attends(operation: Any) -> bool:
    """Whether it has maps: attention may be left out of its paths."""
    return isinstance(operation, AttentionLayer) and operation.attends


def _hides_attention(operation: Any) -> bool:
    return isinstance(operation, keras.Layer) and any(
        _attends(layer)
        for layer in layers_within(operation)
        if layer is not operation
    )


def leaves(sites: Sites, prefix: str = "") -> Sites:
    """The attentive layers by full names."""
    found: Sites = {}
    for name, site in sites.items():
        if site.inner:
            found |= leaves(site.inner, f"{prefix}{name}/")
        else:
            found[prefix + name] = site
    return found


def _keep(sites: Sites, wanted: list[str], prefix: str = "") -> Sites:
    kept = {}
    for name, site in sites.items():
        inner = _keep(site.inner, wanted, f"{prefix}{name}/")
        if inner or prefix + name in wanted:
            kept[name] = dataclasses.replace(site, inner=inner)
    return kept


def _wide(values: np.ndarray) -> np.ndarray:
    """Half precision as float32, in which it can be drawn and summed."""
    values = np.asarray(values)
    return values.astype("float32") if values.itemsize < 4 else values
