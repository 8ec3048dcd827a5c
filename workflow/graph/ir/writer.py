"""The base class of everything that writes nodes.

Its four subclasses differ in where nodes are put and how they are named: `Editor` appends to a graph, `Replacement`
collects the nodes that replace one node, `Rewriter` maintains an index of producers and readers, and `optim.builder`
starts from an empty graph. onnx_ir has similar writers, but needs sympy (30 MB, two seconds to import), works on a
converted graph (conversion takes seven times as long as our sort), and lacks the bodies of ONNX's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Fresh = Callable[[str], str]
"""Makes an unused value name from a hint."""


class Writer:
    """Each method adds nodes after the existing ones, and returns the names of the new values."""

    _standard: str | None = ""
    """ONNX's own domain in a node: empty or absent. Both mean the same but are serialised to different bytes."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def fresh(self, hint: str) -> str:
        """An unused name, derived from `hint`."""
        raise NotImplementedError

    def _title(self, operator: str, outputs: Sequence[str]) -> str:
        """The name of a node."""
        return f"{next(output for output in outputs if output)}/{operator}"

    def _enter(self, node: onnx.NodeProto) -> None:
        """Insert a new node."""
        self.graph.node.append(node)

    def __call__(
        self, operator: str, *inputs: str, output: str | None = None, domain: str = "", **attributes: Any
    ) -> str:
        """A node with one output, named `output` if given."""
        return self.write(operator, inputs, [output or self.fresh(operator)], domain, **attributes)[0]

    def write(
        self, operator: str, inputs: Iterable[str], outputs: Sequence[str], domain: str | None = "", **attributes: Any
    ) -> list[str]:
        """A node with its outputs named; an empty name leaves an optional one out."""
        name, domain = self._title(operator, outputs), domain or self._standard
        self._enter(helper.make_node(operator, list(inputs), outputs, name, domain=domain, **attributes))
        return list(outputs)

    def constant(self, value: Any, dtype: Any = "float32") -> str:
        """An initializer of this value; equal values share one."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.fresh("constant")
            self.graph.initializer.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """An int64 vector constant, such as a shape or axes."""
        return self.constant(values, "int64")

    def cast(self, value: str, data_type: int = TensorProto.FLOAT) -> str:
        """The value cast to another element type."""
        return self("Cast", value, to=data_type)
