"""Turns convolutions of whole numbers in ONNX files into integer ones.

`quantize` makes networks whose sums are of whole numbers in float32. Where a
convolution of levels gives nothing but levels, ONNX has an operator that takes
and gives integers of 8 bits, and processors multiply more of them at once.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import numpy as np

# The unsigned level that stands for zero, for levels with these limits:
# onnxruntime convolves only tensors of one type, with or without a sign.
ZEROS = {(-128.0, 127.0): 128, (0.0, 255.0): 0}
# Operators that give the same whether levels are made before or after them.
MOVES = ("MaxPool", "Reshape", "Transpose")


def with_integers(model: Any) -> Any:
    """A model of ONNX that convolves integers where it has whole numbers.

    Args:
        model: an `onnx.ModelProto`. It is changed.

    Returns:
        The model.
    """
    graph = model.graph
    rewriting = _Rewriting(graph)
    for node in list(graph.node):
        rewriting.rewrite(node)
    nodes = list(_needed(rewriting.nodes, [x.name for x in graph.output]))
    used = {name for node in nodes for name in node.input}
    constants = [x for x in rewriting.constants if x.name in used]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend(constants)
    return model


class _Twin(NamedTuple):
    """A tensor of integers beside one of levels in floats.

    Attributes:
        name: the name of the tensor.
        step: the step of the levels.
        constants: the names of the step and of the level that stands for zero.
    """

    name: str
    step: float
    constants: list[str]


class _Convolution(NamedTuple):
    """A convolution of levels, and the nodes that make levels of its result.

    Attributes:
        node: the convolution.
        moves: nodes that move numbers, or take the largest, in the order in
            which the result of the convolution passes them. They give the same
            result for levels.
        kernel: whole numbers.
        bias: whole numbers.
        scale: the factors of the sums.
    """

    node: Any
    moves: list[Any]
    kernel: np.ndarray
    bias: np.ndarray
    scale: np.ndarray


class _Rewriting:
    """Goes through a graph once, in its order.

    Levels get a twin, a tensor of integers. Nodes that take floats take them as
    before, or take the integers converted back to floats. Nodes whose results
    are not used in the end are left out.

    Attributes:
        nodes: the nodes of the new graph.
        constants: the initializers of the new graph.
    """

    def __init__(self, graph: Any) -> None:
        self.nodes: list[Any] = []
        self.constants = list(graph.initializer)
        self._initializers = {x.name: x for x in graph.initializer}
        self._sources = {y: node for node in graph.node for y in node.output}
        self._uses = Counter(x for node in graph.node for x in node.input)
        self._uses.update(x.name for x in graph.output)
        self._twins: dict[str, _Twin] = {}

    def rewrite(self, node: Any) -> None:
        """Adds a node, and a twin if it gives levels."""
        self.nodes.append(node)
        if node.op_type == "Clip":
            self._make_levels(node)
        elif node.op_type == "Transpose" and node.input[0] in self._twins:
            twin = self._twins[node.input[0]]
            moved = twin._replace(name=f"{node.output[0]}_integers")
            self._add(node, [twin.name], moved.name)
            self._twins[node.output[0]] = moved

    def _make_levels(self, clip: Any) -> None:
        """Makes the twin of the levels of `Clip(Round(x / step))`."""
        division = self._before(self._before(clip, "Round"), "Div")
        limits = [self._value(name) for name in clip.input[1:]]
        step = self._value(division.input[1]) if division else None
        if step is None or step.size != 1 or any(x is None for x in limits):
            return
        zero = ZEROS.get(tuple(map(float, limits)))  # type: ignore[arg-type]
        if zero is None:
            return
        name = f"{clip.output[0]}_integers"
        step = step.reshape(())
        constants = self._constants(name, step, np.array(zero, "uint8"))
        twin = _Twin(name, float(step), constants)
        convolution = self._convolution(division)
        if convolution is None:
            inputs = [division.input[0], *constants]
            self._add("QuantizeLinear", inputs, name)
        else:
            self._convolve(convolution, twin)
            # Nodes that take floats get the same levels, converted back.
            self.nodes.remove(clip)
            one = self._constants(f"{name}_levels", np.array(1, "float32"))
            inputs = [name, *one, constants[1]]
            self._add("DequantizeLinear", inputs, clip.output[0])
        self._twins[clip.output[0]] = twin

    def _convolution(self, division: Any) -> _Convolution | None:
        """The convolution of levels before a division, if only that uses it.

        The nodes between them are those of an `IntegerConv2D` after its sums.
        """
        last, moves = division, []
        while source := self._before(last, *MOVES, "Relu", alone=True):
            last = source
            # Unsigned levels are clipped at zero anyway.
            if source.op_type != "Relu":
                moves.append(source)
        scaling = self._before(last, "Mul", alone=True)
        rounding = self._before(scaling, "Round", alone=True)
        addition = self._before(rounding, "Add", alone=True)
        order = self._before(addition, "Transpose", alone=True)
        node = self._before(order, "Conv", alone=True)
        moves = [order, *reversed(moves)]
        if node is None or node.input[0] not in self._twins:
            return None
        kernel = self._value(node.input[1])
        bias = self._value(addition.input[1])
        scale = self._value(scaling.input[1])
        if kernel is None or bias is None or scale is None:
            return None
        whole = (kernel == np.rint(kernel)).all() and abs(kernel).max() < 128
        return _Convolution(node, moves, kernel, bias, scale) if whole else None

    def _convolve(self, found: _Convolution, twin: _Twin) -> None:
        """Adds a convolution of integers, whose result is the twin."""
        levels = self._twins[found.node.input[0]]
        count = len(found.kernel)
        factor = found.scale.ravel() / np.float32(levels.step)
        weights = self._constants(
            f"{twin.name}_weights",
            found.kernel.astype("int8"),
            np.broadcast_to(factor, count).astype("float32"),
            np.zeros(count, "int8"),
            np.broadcast_to(found.bias.ravel(), count).astype("int32"),
        )
        sums = f"{twin.name}_convolved"
        inputs = [levels.name, *levels.constants, *weights[:3]]
        inputs += [*twin.constants, weights[3]]
        self._add("QLinearConv", inputs, sums, found.node.attribute)
        for n, move in enumerate(found.moves, 1):
            last = n == len(found.moves)
            moved = twin.name if last else f"{sums}_{n}"
            self._add(move, [sums, *move.input[1:]], moved)
            sums = moved

    def _before(self, node: Any, *operators: str, alone: bool = False) -> Any:
        """The node that makes the first input of another one.

        Args:
            node: the other one; None gives None.
            *operators: the operators that the node may have.
            alone: whether no other node may take the result of the node.

        Returns:
            The node; None if it is not as asked for.
        """
        source = node and self._sources.get(node.input[0])
        if not source or source.op_type not in operators:
            return None
        return None if alone and self._uses[node.input[0]] > 1 else source

    def _value(self, name: str) -> np.ndarray | None:
        """The value of a constant; None for anything else.

        The converter may have left a cast or a transposition after it.
        """
        from onnx import helper
        from onnx import numpy_helper

        if name in self._initializers:
            return numpy_helper.to_array(self._initializers[name])
        source = self._sources.get(name)
        if source is None or source.op_type not in ("Cast", "Transpose"):
            return None
        value = self._value(source.input[0])
        if value is None:
            return None
        (option,) = map(helper.get_attribute_value, source.attribute[:1])
        if source.op_type == "Transpose":
            return value.transpose(option)
        return value.astype(helper.tensor_dtype_to_np_dtype(option))

    def _constants(self, name: str, *values: np.ndarray) -> list[str]:
        """Adds constants, and returns their names."""
        from onnx import numpy_helper

        names = [f"{name}_{n}" for n in range(len(values))]
        self.constants += map(numpy_helper.from_array, values, names)
        return names

    def _add(
        self,
        kind: Any,
        inputs: list[str],
        output: str,
        attributes: Any = (),
    ) -> None:
        """Adds a node with this operator, or with that of another node."""
        from onnx import helper

        if not isinstance(kind, str):
            kind, attributes = kind.op_type, kind.attribute
        name = f"{output}_{kind}"
        node = helper.make_node(kind, inputs, [output], name=name)
        node.attribute.extend(attributes)
        self.nodes.append(node)


def _needed(nodes: list[Any], outputs: list[str]) -> Iterator[Any]:
    """The nodes that the outputs depend on, in their order."""
    wanted = set(outputs)
    needed = []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            needed.append(node)
    return reversed(needed)
