"""Recognises Gelu in any form that exporters write, and gives it a fast forward and backward pass.

Called by `rewrites` on the training graph: `fuse` replaces the formula by one node before the graph is differentiated,
`unfuse` afterwards writes that node and its gradient in vectorised operators. ONNX Runtime's own gradient kernels of
Gelu are single-threaded, at 5 to 25 ns per element; the gradient of the separate nodes makes twice the necessary passes
over memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import Editor, constants_of
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.ir.origin import inherit
from ortflow.workflow.graph.ir.stops import stops_gradient

Polynomial = dict[tuple[int, int], float]
"""Powers of (x, t) -> coefficient; t is the Erf or Tanh of the formula."""

_SLOPE = math.sqrt(2 / math.pi)
_CUBE = 0.044715
_INNER: dict[str, Polynomial] = {
    "Erf": {(1, 0): math.sqrt(0.5)},
    "Tanh": {(1, 0): _SLOPE, (3, 0): _SLOPE * _CUBE},
}
_WHOLE: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
"""Gelu(x) = x/2 + x/2 * t, with t = erf(x/sqrt(2)), or its approximation by tanh (Hendrycks & Gimpel 2016)."""
_FUSED = {"Erf": "Gelu", "Tanh": "FastGelu"}
_HOPS = 6


def fuse(graph: onnx.GraphProto) -> None:
    """Replace each such formula by com.microsoft's Gelu or FastGelu, in place."""
    formulas = _Formulas(graph)
    is_changed = False
    for node in list(graph.node):
        if node.op_type not in _INNER or node.domain != "":
            continue
        inner, t = node.input[0], node.output[0]
        x = next((x for x in formulas.ancestors(inner) if _same(formulas.of(inner, x, t), _INNER[node.op_type])), None)
        root = formulas.root(x, t) if x is not None else None
        if x is None or root is None:
            continue
        name = root.output[0]
        fused = onnx.helper.make_node(_FUSED[node.op_type], [x], [name], name=f"{node.name}/Gelu", domain=MICROSOFT)
        inherit([fused], root)
        root.CopyFrom(fused)
        is_changed = True
    if is_changed:
        prune(graph)


def unfuse(graph: onnx.GraphProto) -> None:
    """Replace each fused node that has a gradient, and the gradient, by vectorised operators, in place.

    So are nodes whose values are recomputed for the backward pass: the gradient is that of the second computation, and
    both have to give the same bits.
    """
    edit = Editor(graph)
    gradients: dict[tuple[str, str], list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type in ("GeluGrad", "FastGeluGrad") and node.domain == MICROSOFT:
            gradients.setdefault((node.op_type, node.input[1]), []).append(node)
    kinds = {kind for kind, _ in gradients}
    for node in list(graph.node):
        if node.op_type not in _FUSED.values() or node.domain != MICROSOFT or len(node.input) > 1:
            continue
        kind = f"{node.op_type}Grad"
        candidates = gradients.get((kind, node.input[0]))
        if kind in kinds:
            gradient = candidates.pop() if candidates else None
            ends = (gradient.input[0], gradient.output[0]) if gradient is not None else None
            write = _exact if node.op_type == "Gelu" else _approximate
            write(edit, node.input[0], node.output[0], ends)
            graph.node.remove(node)
            if gradient is not None:
                graph.node.remove(gradient)
    sort_nodes(graph)


def _exact(edit: Editor, x: str, y: str, ends: tuple[str, str] | None) -> None:
    """y = x F(x), dx = dy (F(x) + x f(x)), with F the normal distribution and f its density; `ends` are dy and dx."""
    half = edit.constant(0.5)
    erf = edit("Erf", edit("Mul", x, edit.constant(math.sqrt(0.5))))
    below = edit("Add", edit("Mul", erf, half), half)
    edit("Mul", x, below, output=y)
    if ends is None:
        return
    dy, dx = ends
    exponent = edit("Mul", edit("Mul", x, x), edit.constant(-0.5))
    density = edit("Mul", edit("Exp", exponent), edit.constant(1 / math.sqrt(2 * math.pi)))
    edit("Mul", edit("Add", edit("Mul", density, x), below), dy, output=dx)


def _approximate(edit: Editor, x: str, y: str, ends: tuple[str, str] | None) -> None:
    """y = x s(u), dx = dy s(u) + dy x u' s'(u), with s the sigmoid, u = 2 sqrt(2/pi) (x + 0.044715 x^3)."""
    linear, square = edit.constant(2 * _SLOPE), edit("Mul", x, x)
    steep = edit("Add", edit("Mul", square, edit.constant(2 * _SLOPE * _CUBE)), linear)
    # (1 + tanh(v)) / 2 is s(2 v).
    s = edit("Sigmoid", edit("Mul", steep, x))
    edit("Mul", x, s, output=y)
    if ends is None:
        return
    dy, dx = ends
    slope = edit("Add", edit("Mul", square, edit.constant(6 * _SLOPE * _CUBE)), linear)
    outer = edit("Mul", edit("Mul", slope, x), dy)
    bent = edit("SigmoidGrad", outer, s, domain=MICROSOFT)
    edit("Add", edit("Mul", dy, s), bent, output=dx)


class _Formulas:
    """Represents values of a graph as polynomials in two of them."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._makers = walk.producers(graph)
        self._readers = walk.consumers(graph)
        self._outputs = {value.name for value in graph.output}
        self._numbers = {name: float(v.reshape(-1)[0]) for name, v in constants_of(graph).items() if v.size == 1}

    def ancestors(self, name: str) -> Iterator[str]:
        """Values that `name` is computed from, nearest first."""
        visited, layer = {name}, [name]
        for _ in range(_HOPS):
            layer = [i for n in layer if n in self._makers for i in self._makers[n].input if i not in self._numbers]
            for value in layer:
                if value not in visited:
                    yield value
                    visited.add(value)

    def root(self, x: str, t: str) -> onnx.NodeProto | None:
        """The node whose value is Gelu(x), found by following the single readers from t on."""
        value = t
        for _ in range(_HOPS):
            readers = self._readers.get(value, [])
            nodes = {id(node): node for node, _ in readers}
            if len(nodes) != 1 or value in self._outputs:
                return None
            (node,) = nodes.values()
            value = node.output[0]
            if _same(self.of(value, x, t), _WHOLE):
                return node
        return None

    def of(self, name: str, x: str, t: str, depth: int = 2 * _HOPS) -> Polynomial | None:
        """The value as a polynomial in x and t; None if it is not one."""
        if name in (x, t):
            return {(1, 0) if name == x else (0, 1): 1.0}
        if name in self._numbers:
            return {(0, 0): self._numbers[name]}
        node = self._makers.get(name)
        if node is None or node.domain != "" or depth == 0 or node.op_type not in (*_OPERATORS, "Identity"):
            return None
        if stops_gradient(node):
            return None
        parts = []
        for part in node.input:
            polynomial = self.of(part, x, t, depth - 1)
            if polynomial is None:
                return None
            parts.append(polynomial)
        return parts[0] if node.op_type == "Identity" else _OPERATORS[node.op_type](*parts)


def _add(a: Polynomial, b: Polynomial) -> Polynomial:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}


def _multiply(a: Polynomial, b: Polynomial) -> Polynomial | None:
    product: Polynomial = {}
    for (i, j), coefficient in a.items():
        for (k, m), right in b.items():
            product[i + k, j + m] = product.get((i + k, j + m), 0.0) + coefficient * right
    return product if len(product) <= 8 else None


def _divide(a: Polynomial, b: Polynomial) -> Polynomial | None:
    return {key: value / b[0, 0] for key, value in a.items()} if set(b) == {(0, 0)} and b[0, 0] != 0 else None


def _power(a: Polynomial, b: Polynomial) -> Polynomial | None:
    if set(b) != {(0, 0)} or b[0, 0] not in (2.0, 3.0):
        return None
    square = _multiply(a, a)
    return square if b[0, 0] == 2.0 or square is None else _multiply(square, a)


_OPERATORS: dict[str, Callable[[Polynomial, Polynomial], Polynomial | None]] = {
    "Add": _add,
    "Mul": _multiply,
    "Div": _divide,
    "Pow": _power,
}


def _same(a: Polynomial | None, b: Mapping[tuple[int, int], float]) -> bool:
    """Whether two polynomials are equal to six digits; exporters write the constants in fp32."""
    if a is None:
        return False
    keys = {**a, **b}
    return all(np.isclose(a.get(key, 0.0), b.get(key, 0.0), rtol=1e-6, atol=1e-9) for key in keys)
