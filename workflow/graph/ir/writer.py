"""The one writer of nodes. What is written differs in where nodes go and how they are called, so it has four kinds.

`Editor` lets a graph grow, `Replacement` collects what stands in for one node, `Rewriter` keeps track of who reads what
while nodes are dropped and added, and `optim.builder` begins with an empty graph. onnx_ir has writers, a sort and a
prune, too; it is not used because it needs sympy (30 MB, two seconds to import), knows a graph only after a conversion
that takes seven times as long as our sort, and has no bodies of ONNX's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Fresh = Callable[[str], str]
"""Makes a value name that the graph does not have yet, from a hint."""


class Writer:
    """Each method adds nodes behind those that are there, and returns the names of the new values."""

    _standard: str | None = ""
    """ONNX's own domain in a node: empty text or nothing, which read the same and are not the same bytes."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def fresh(self, hint: str) -> str:
        """A name that no value has yet, for one that `hint` describes."""
        raise NotImplementedError

    def _title(self, operator: str, outputs: Sequence[str]) -> str:
        """The name of a node."""
        return f"{next(output for output in outputs if output)}/{operator}"

    def _enter(self, node: onnx.NodeProto) -> None:
        """Put a new node where it belongs."""
        self.graph.node.append(node)

    def __call__(
        self, operator: str, *inputs: str, output: str | None = None, domain: str = "", **attributes: Any
    ) -> str:
        """A node with one output, named `output` where given."""
        return self.write(operator, inputs, [output or self.fresh(operator)], domain, **attributes)[0]

    def write(
        self, operator: str, inputs: Iterable[str], outputs: Sequence[str], domain: str | None = "", **attributes: Any
    ) -> list[str]:
        """A node with its outputs named; an empty name leaves an optional one out."""
        name, domain = self._title(operator, outputs), domain or self._standard
        self._enter(helper.make_node(operator, list(inputs), outputs, name, domain=domain, **attributes))
        return list(outputs)

    def constant(self, value: Any, dtype: Any = "float32") -> str:
        """An initializer of the value; the same one for equal values."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.fresh("constant")
            self.graph.initializer.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """An int64 constant of one axis: shapes, axes."""
        return self.constant(values, "int64")

    def cast(self, value: str, data_type: int = TensorProto.FLOAT) -> str:
        """The value in another element type."""
        return self("Cast", value, to=data_type)
