"""Writes the small graphs of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.domains import CPU_DOMAIN, MICROSOFT
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.in_place import late_reader
from ortflow.workflow.graph.ir.writer import Writer

# The first in which every reduction takes its axes as an input, and Split a number of outputs.
OPSET = 18
ROW = 64
"""Number of elements summed in fp32 before the sum continues in double; every segment's length is a multiple of it."""


class Builder(Writer):
    """Collects the inputs, nodes and outputs of one graph; nodes have no names."""

    def __init__(self, name: str, *, kernels: bool = False, domains: Sequence[str] = ()) -> None:
        self._domains = [*domains, *([CPU_DOMAIN] if kernels else [])]
        self.kernels = kernels
        """Whether our own operators may be used."""
        self.square_sums: dict[str, str] = {}
        """Each value that `square_sum` has made -> the vector."""
        super().__init__(onnx.GraphProto(name=name))

    def input(self, name: str, count: int | str, element: int = TensorProto.FLOAT) -> str:
        """A graph input with one axis."""
        self.graph.input.append(helper.make_tensor_value_info(name, element, [count]))
        return name

    def output(self, name: str, count: int | str, element: int = TensorProto.FLOAT) -> None:
        """Declare the value `name` a graph output with one axis."""
        self.graph.output.append(helper.make_tensor_value_info(name, element, [count]))

    def fresh(self, hint: str) -> str:
        """A name with the number of the node or the constant."""
        return f"{hint}.{len(self.graph.initializer if hint == 'constant' else self.graph.node)}"

    def _title(self, operator: str, outputs: Sequence[str]) -> str:
        return ""

    def own(self, operator: str, values: str, element: int) -> str:
        """A node of the first of `domains` with one described output [1]; returns the output's name."""
        name = self(operator, values, domain=self._domains[0])
        self.graph.value_info.append(helper.make_tensor_value_info(name, element, [1]))
        return name

    def rate(self, scale: float) -> str:
        """The learning rate of a segment, fp32 [1]."""
        if scale == 1:
            return "learning_rate"
        return self("Mul", "learning_rate", self.constant([scale], "float32"))

    def square_sum(self, values: str, output: str | None = None) -> str:
        """Sum of squares, double [1], of a vector whose length is a multiple of `ROW`.

        ReduceL2 adds in fp32 and is off by 1% to 4% at 100 M elements. Rows of 64 summed in fp32, and their sums in
        double, have an error of 3e-7 and use both threads. Rules take the norm of a tensor from here, so that ranks
        that hold pieces of it can add up their sums.
        """
        rows = self("Reshape", values, self.constant([-1, ROW], "int64"))
        squares = self("ReduceSumSquare", rows, self.constant([1], "int64"), keepdims=0)
        total = self("ReduceSum", self("Cast", squares, to=TensorProto.DOUBLE), keepdims=1, output=output)
        self.square_sums[total] = values
        return total

    def root(self, values: str) -> str:
        """Square root of doubles, in fp32."""
        return self("Cast", self("Sqrt", values), to=TensorProto.FLOAT)

    def model(self) -> onnx.ModelProto:
        """The finished model.

        Raises AssertionError if a buffer is read behind the node that writes it: an error of the rule that appended it.
        """
        late = late_reader(self.graph)
        if late is not None:
            reader, buffer = late
            raise AssertionError(f"{walk.called(reader)} may read {buffer!r} of the graph {self.graph.name!r} too late")
        domains = (("", OPSET), (MICROSOFT, 1), *((domain, 1) for domain in self._domains))
        return helper.make_model(
            self.graph,
            opset_imports=[helper.make_opsetid(*domain) for domain in domains],
            # ONNX Runtime 1.19.2 reads versions up to 10.
            ir_version=8,
            producer_name="ortflow",
        )
