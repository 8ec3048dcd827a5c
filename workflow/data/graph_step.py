"""An ONNX graph as a transform: columns of a sample in, columns out, with random inputs drawn as for any transform.

The graph runs on the CPU with one thread: sums are then in one order, and worker processes are the parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ortflow.workflow.data.draws import Draws
from ortflow.workflow.data.schema import Array, Column
from ortflow.workflow.data.transforms import Before, Columns
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.transforms import Transform

_DRAWING = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
"""Operators with random numbers of their own, which no sample decides."""
_TYPES = {
    "float": "f4", "double": "f8", "float16": "f2", "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8",
    "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "bool": "?",
}  # fmt: skip


@dataclass(frozen=True)
class GraphStep:
    """One graph, as it fits the columns that are there before it."""

    path: str
    inputs: Mapping[str, str]
    """Input -> column."""
    random: Mapping[str, tuple[str, tuple[int, ...], np.dtype[Any]]]
    """Input -> distribution, shape and type."""
    outputs: Mapping[str, str]
    """Column -> output."""
    columns: Mapping[str, Column]
    """The columns afterwards, of those in `outputs`."""
    batched: bool
    """Whether the graph's first axis is that of a batch, here of one sample."""
    _last: list[tuple[tuple[int, int], dict[str, Array]]] = field(default_factory=list, compare=False, repr=False)
    """The outputs of the last sample: its columns are read one after the other."""

    def changed(self, columns: Columns) -> dict[str, Column]:
        """The columns of the outputs."""
        return dict(self.columns)

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        """One of the outputs. Raises UserError if the graph fails, or its result has another shape than for zeros."""
        seed = draws.word()
        last = self._last[0] if self._last else None
        if last is None or last[0] != (seed, number):
            last = ((seed, number), self._run(number, before, Draws(seed)))
            self._last[:] = [last]
        result, column = last[1][self.outputs[name]], self.columns[name]
        expected = before(name, number).shape if column.variable else column.shape
        if result.shape != expected:
            message = f"output {self.outputs[name]!r} is {list(result.shape)} for sample {number}, not {list(expected)}"
            raise UserError(message, where=self.path, fix="give samples one shape")
        return result

    def _run(self, number: int, before: Before, draws: Draws) -> dict[str, Array]:
        feeds = {name: before(column, number) for name, column in self.inputs.items()}
        return _results(self.path, self._fed(feeds, draws), f"sample {number}", self.batched)

    def _fed(self, feeds: Mapping[str, Array], draws: Draws) -> dict[str, Array]:
        drawn = {name: _drawn(draws, *tensor) for name, tensor in sorted(self.random.items())}
        return {**feeds, **drawn}


def graph_step(transform: Transform, columns: Columns) -> GraphStep:
    """The step of an item `onnx`. Raises UserError if the graph cannot be used or does not fit the columns."""
    path = transform.onnx or ""
    session = _session(path)
    graph_inputs = {value.name: value for value in session.get_inputs()}
    for name in transform.random:
        if name not in graph_inputs:
            raise UserError(
                f"has no input {name!r}", where=path, fix=f"correct random: inputs are {', '.join(graph_inputs)}"
            )
    _refuse_unknown(path, transform, [*graph_inputs, *(value.name for value in session.get_outputs())])
    inputs = {name: transform.columns.get(name, name) for name in graph_inputs if name not in transform.random}
    for name, of in inputs.items():
        if of not in columns:
            fix = f"map it in columns to one of {', '.join(columns)}, or name it in random"
            raise UserError(f"takes {name!r}, which is not a column", where=path, fix=fix)
        dtype = _dtype(path, graph_inputs[name])
        if columns[of].dtype != dtype:
            message = f"takes {name!r} as {dtype.name}, but column {of!r} is {columns[of].dtype.name}"
            raise UserError(message, where=path, fix="add a Cast to the graph")
    batched = _is_batched(path, {name: (graph_inputs[name].shape, columns[of]) for name, of in inputs.items()})
    random = {
        name: (kind, _fixed(path, graph_inputs[name], batched), _dtype(path, graph_inputs[name]))
        for name, kind in transform.random.items()
    }
    for name, (_, _, dtype) in random.items():
        if dtype.kind != "f":
            raise UserError(f"takes {name!r} as {dtype.name}, not random floats", where=path, fix="add a Cast to it")
    outputs = {transform.columns.get(value.name, value.name): value.name for value in session.get_outputs()}
    if len(outputs) < len(session.get_outputs()):
        raise UserError("has two outputs for one column", where=path, fix="correct columns")
    step = GraphStep(path, inputs, random, outputs, {}, batched)
    zeros = {name: np.zeros(columns[of].shape or (3,) * columns[of].variable, columns[of].dtype)
             for name, of in inputs.items()}  # fmt: skip
    results = _results(path, step._fed(zeros, Draws(0)), "zeros", batched)
    return replace(step, columns={of: _column(path, name, results[name], columns.get(of))
                                  for of, name in outputs.items()})  # fmt: skip


def _refuse_unknown(path: str, transform: Transform, names: Sequence[str]) -> None:
    unknown = next((name for name in transform.columns if name not in names), None)
    if unknown is not None:
        fix = f"correct columns: it has {', '.join(names)}"
        raise UserError(f"has neither an input nor an output {unknown!r}", where=path, fix=fix)


def _is_batched(path: str, inputs: Mapping[str, tuple[Sequence[Any], Column]]) -> bool:
    extra = {
        name: len(shape) - (1 if column.variable else len(column.shape)) for name, (shape, column) in inputs.items()
    }
    wrong = next((name for name, axes in extra.items() if axes not in (0, 1)), None)
    if wrong is not None:
        shape, column = inputs[wrong]
        message = f"takes {wrong!r} of {len(shape)} axes, but its column holds samples of {column}"
        raise UserError(message, where=path, fix="give a graph for one sample, or for a batch of them")
    if len(set(extra.values())) > 1:
        raise UserError(
            "takes some inputs with an axis for the batch and some without", where=path, fix="export it anew"
        )
    return 1 in extra.values()


def _column(path: str, name: str, result: Array, before: Column | None) -> Column:
    if before is not None and before.variable:
        if result.ndim != 1:
            raise UserError(f"output {name!r} replaces a list, but has {result.ndim} axes", where=path)
        return Column(result.dtype, (), True)
    return Column(result.dtype, result.shape)


def _fixed(path: str, value: Any, batched: bool) -> tuple[int, ...]:
    """The shape of a random input for one sample, without the axis of the batch."""
    shape = tuple(value.shape[1:] if batched else value.shape)
    # ONNX Runtime gives an open axis its symbol, or None.
    if not all(isinstance(size, int) for size in shape):
        raise UserError(
            f"takes {value.name!r}, whose shape it leaves open", where=path, fix="export it with a fixed one"
        )
    return shape


def _dtype(path: str, value: Any) -> np.dtype[Any]:
    name = value.type.removeprefix("tensor(").removesuffix(")")
    if name not in _TYPES:
        raise UserError(f"has {value.name!r} of {value.type}, not of numbers", where=path, fix="use another graph")
    return np.dtype(_TYPES[name])


def _drawn(draws: Draws, kind: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    count = int(np.prod(shape, dtype=np.int64))
    if kind == "normal":
        return draws.normals(count).reshape(shape).astype(dtype)
    # 11 bits fit in half precision, 24 in single: below 1 in each type.
    bits = {2: 11, 4: 24}.get(dtype.itemsize, 53)
    words = draws.words(count) >> np.uint64(64 - bits)
    numbers: Array = (words.astype(np.float64) * 2.0**-bits).reshape(shape).astype(dtype)
    return numbers


def _results(path: str, feeds: Mapping[str, Array], feed: str, batched: bool) -> dict[str, Array]:
    session = _session(path)
    names = [value.name for value in session.get_outputs()]
    # ascontiguousarray makes a vector of a scalar.
    arrays = {name: np.asarray(array[None] if batched else array, order="C") for name, array in feeds.items()}
    try:
        results = session.run(names, arrays)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime has a class for each status
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot be computed for {feed} ({reason})", where=path, fix="correct the graph") from None
    if batched and (odd := next((n for n, r in zip(names, results, strict=True) if r.shape[:1] != (1,)), None)):
        raise UserError(
            f"output {odd!r} has no axis for the batch, unlike the inputs", where=path, fix="export it anew"
        )
    return {name: result[0] if batched else result for name, result in zip(names, results, strict=True)}


@functools.cache
def _session(path: str) -> Any:
    """The session of a file, opened once in a process."""
    import onnx

    from ortflow.workflow.onnx_runtime import onnxruntime

    if not Path(path).is_file():
        raise UserError("no such file", where=path, fix="correct transforms: onnx")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # noqa: BLE001 - protobuf's own
        raise UserError(f"is not an ONNX file ({error})", where=path, fix="export it again") from None
    drawing = next((node.op_type for node in _nodes(model) if _draws(node)), None)
    if drawing is not None:
        fix = "make the random numbers inputs, and name them in random"
        raise UserError(f"has {drawing}, whose random numbers would differ between attempts", where=path, fix=fix)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - ONNX Runtime has a class for each status
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot be opened by ONNX Runtime ({reason})", where=path, fix="export it again") from None


def _draws(node: Any) -> bool:
    # Dropout draws only in training mode, which its third input sets.
    return node.op_type in _DRAWING or (node.op_type == "Dropout" and len(node.input) > 2 and bool(node.input[2]))


def _nodes(model: Any) -> Iterator[Any]:
    """All nodes, with those of functions and of subgraphs."""
    waiting = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            waiting += attribute.g.node
            waiting += [node_in_branch for graph in attribute.graphs for node_in_branch in graph.node]
