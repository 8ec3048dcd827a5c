"""One fixed sequence in place of random numbers, the same in a PyTorch module and in its ONNX file.

Called by `ortflow.exporter.file_check`: otherwise the two could not be compared with their dropout. Element i of a
tensor of uniform numbers is ((40503 i + 12345) mod 65536 + 1/2) / 65536, which is exact in single precision. Other
random numbers are computed from it, as in the exporter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import attributes_of, replace

if TYPE_CHECKING:
    import torch

_FACTOR, _START, _COUNT = 40503, 12345, 65536
_WIDTH = math.sqrt(12)
"""A uniform number has a standard deviation of 1/sqrt(12)."""


class NotFixed(Exception):
    """A random operator has no fixed form here; the message names it."""


def fixed_in_pytorch() -> Any:
    """A context in which PyTorch's random operators return the fixed sequence. Raises NotFixed if one cannot."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    def uniform(template: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(template.numel(), device=template.device) * _FACTOR + _START
        return ((numbers % _COUNT).double() + 0.5).div(_COUNT).reshape(template.shape)

    def bernoulli(x: torch.Tensor, p: Any, generator: Any = None) -> torch.Tensor:
        return (uniform(x) < p).to(x.dtype)

    def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        """That of GPUs."""
        if not train:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = uniform(x) < 1 - p
        return x * mask / (1 - p), mask

    in_place: dict[Any, Callable[..., torch.Tensor]] = {
        aten.bernoulli_.float: lambda x, p=0.5, **_: bernoulli(x, p),
        aten.bernoulli_.Tensor: lambda x, p, **_: bernoulli(x, p),
        aten.uniform_.default: lambda x, low=0.0, high=1.0, **_: uniform(x) * (high - low) + low,
        aten.normal_.default: lambda x, mean=0.0, std=1.0, **_: (uniform(x) - 0.5) * _WIDTH * std + mean,
        aten.exponential_.default: lambda x, rate=1.0, **_: uniform(x).log() / -rate,
    }
    created: dict[Any, Callable[..., Any]] = {
        aten.bernoulli.default: lambda x, **_: bernoulli(x, x),
        aten.bernoulli.p: lambda x, p, **_: bernoulli(x, p),
        aten.native_dropout.default: native_dropout,
    }
    drawn: dict[Any, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
        aten.rand.default: (aten.empty.memory_format, uniform),
        aten.randn.default: (aten.empty.memory_format, lambda x: (uniform(x) - 0.5) * _WIDTH),
        aten.rand_like.default: (aten.empty_like.default, uniform),
        aten.randn_like.default: (aten.empty_like.default, lambda x: (uniform(x) - 0.5) * _WIDTH),
    }

    class Fixed(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in in_place:
                return args[0].copy_(in_place[func](*args, **kwargs))
            if func in created:
                return created[func](*args, **kwargs)
            if func in drawn:
                empty, fill = drawn[func]
                tensor = empty(*args, **kwargs)
                return tensor.copy_(fill(tensor))
            if func == aten.topk.default:
                return _first_of_equals(*args, **kwargs)
            if func == aten.sort.default:
                x, dim, descending = _bound(args, kwargs, dim=-1, descending=False)
                return x.sort(stable=True, dim=dim, descending=descending)
            if torch.Tag.nondeterministic_seeded in func.tags and not _is_unused(func, args):
                raise NotFixed(str(func))
            return func(*args, **kwargs)

    return Fixed()


def _bound(args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """The first argument, and those after it by their defaults."""
    options = dict(zip(defaults, args[1:], strict=False)) | kwargs
    return [args[0], *({**defaults, **options}[name] for name in defaults)]


def _first_of_equals(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.topk` that chooses the first of equal elements, as ONNX Runtime does; PyTorch's has no order."""
    values, places = x.sort(stable=True, dim=dim, descending=largest)
    return (values, places) if x.ndim == 0 else (values.narrow(dim, 0, k), places.narrow(dim, 0, k))


def _is_unused(func: Any, args: Any) -> bool:
    """Whether an operator that may be random, such as attention with dropout, has the probability 0."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout", "p"):
            value = args[place] if place < len(args) else argument.default_value
            return not value
    return False


def fix_in_onnx(graph: onnx.GraphProto) -> None:
    """Replace the graph's random nodes by the fixed sequence, in place. Raises NotFixed if one has no fixed form."""
    for node in walk.nodes(graph.node):
        for subgraph in walk.subgraphs(node):
            for inner in walk.nodes(subgraph.node):
                if inner.op_type in (*_FORMS, "Multinomial", "RandomUniform", "RandomNormal"):
                    raise NotFixed(f"{inner.op_type} inside {node.op_type}")
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.domain == "" and node.op_type in ("Multinomial", "RandomUniform", "RandomNormal"):
            raise NotFixed(node.op_type)
        nodes += _FORMS[node.op_type](node) if node.domain == "" and node.op_type in _FORMS else [node]
    replace(graph.node, nodes)


class _Nodes:
    """The nodes that replace a random one."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.node, self.nodes, self._prefix = node, list[onnx.NodeProto](), f"{node.output[0]}.fixed"

    def __call__(self, op_type: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], f"{name}/{op_type}", **attributes))
        return name

    def number(self, value: float, dtype: Any = np.float32) -> str:
        return self("Constant", value=numpy_helper.from_array(np.array(value, dtype)))

    def uniform(self, template: str) -> str:
        """The fixed sequence in the shape of a value."""
        int64 = np.int64
        places = self("Range", self.number(0, int64), self("Size", template), self.number(1, int64))
        numbers = self("Add", self("Mul", places, self.number(_FACTOR, int64)), self.number(_START, int64))
        halves = self("Cast", self("Mod", numbers, self.number(_COUNT, int64)), to=TensorProto.FLOAT)
        shares = self("Div", self("Add", halves, self.number(0.5)), self.number(_COUNT))
        return self("Reshape", shares, self("Shape", template))

    def moved(self, value: str, factor: float, term: float) -> list[onnx.NodeProto]:
        self("Add", self("Mul", value, self.number(factor)), self.number(term), output=self.node.output[0])
        return self.nodes


def _dropout(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    w, x = _Nodes(node), node.input[0]
    ratio = node.input[1] if len(node.input) > 1 and node.input[1] else w.number(0.5)
    keep_probability = w("Sub", w.number(1.0), ratio)
    mask = w("Less", w.uniform(x), keep_probability, output=node.output[1] if len(node.output) > 1 else "")
    w("Mul", x, w("Div", w("Cast", mask, to=TensorProto.FLOAT), keep_probability), output=node.output[0])
    return w.nodes


def _bernoulli(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    w = _Nodes(node)
    kind = attributes_of(node).get("dtype", TensorProto.FLOAT)
    w("Cast", w("Less", w.uniform(node.input[0]), node.input[0]), output=node.output[0], to=kind)
    return w.nodes


def _uniform_like(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    w, flags = _Nodes(node), attributes_of(node)
    low, high = flags.get("low", 0.0), flags.get("high", 1.0)
    return w.moved(w.uniform(node.input[0]), high - low, low)


def _normal_like(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    w, flags = _Nodes(node), attributes_of(node)
    mean, scale = flags.get("mean", 0.0), flags.get("scale", 1.0)
    return w.moved(w("Sub", w.uniform(node.input[0]), w.number(0.5)), _WIDTH * scale, mean)


_FORMS = {
    "Dropout": _dropout,
    "Bernoulli": _bernoulli,
    "RandomUniformLike": _uniform_like,
    "RandomNormalLike": _normal_like,
}
