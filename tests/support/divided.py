"""Losses and gradients of an undivided graph, and of its parts, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from kernels import LIBRARY
from onnx import helper, numpy_helper
from parts import Parts
from real_ranks import on_ranks

from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.division.divide import Divided, divide
from ortflow.workflow.graph.division.regather import gather_again
from ortflow.workflow.graph.division.sequence_graph import share_tokens
from ortflow.workflow.graph.ir.collective import finish
from ortflow.workflow.graph.ir.edit import Editor, attributes_of, replace
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.order import results_first
from ortflow.workflow.graph.types import LOSS_SUM
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions import collectives
from ortflow.workflow.sessions.session import Sessions

Arrays = Mapping[str, npt.NDArray[Any]]
CHANNEL = 3
SEED = 11


def training(model: onnx.ModelProto, trained: Sequence[str], *, kernels: bool) -> onnx.ModelProto:
    """The training graph, as `build` makes it of a differentiable forward graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewrites.before(copy.graph)
    made, _ = differentiate(copy, trained, LOSS_SUM)
    if kernels:
        made = with_kernels(made)
    rewrites.after(made.graph)
    made = compose(made)
    results_first(made.graph)
    gather_again(made.graph)
    finish(made)
    return made


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph in fp64, except for the tokens of its collectives."""
    single, double = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    del graph.value_info[:]

    def cast(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == single:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))

    for tensor in graph.initializer:
        cast(tensor)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == single:
            value.type.tensor_type.elem_type = double
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
        for attribute in node.attribute:
            if attribute.HasField("t"):
                cast(attribute.t)
            if node.op_type == "Cast" and attribute.i == single:
                attribute.i = double
    _write_norms_out(graph)
    _write_products_out(graph)
    return copy


def _write_products_out(graph: onnx.GraphProto) -> None:
    """ONNX Runtime has FusedMatMul in fp32 alone."""
    products = [node for node in graph.node if node.op_type == "FusedMatMul"]
    replace(graph.node, [node for node in graph.node if node.op_type != "FusedMatMul"])
    edit = Editor(graph)
    for node in products:
        flags = attributes_of(node)
        factors = list(node.input)
        for place, flag in enumerate(("transA", "transB")):
            if flags.get(flag):
                # Any number of axes: the last two of a reshaped value are turned.
                shape = edit("Shape", factors[place])
                last = edit("Slice", shape, edit.ints(-2), edit.ints(2**31))
                flat = edit("Reshape", factors[place], edit("Concat", edit.ints(-1), last, axis=0))
                turned = edit("Transpose", flat, perm=[0, 2, 1])
                ends = edit("Gather", last, edit.ints(1, 0))
                head = edit("Slice", shape, edit.ints(0), edit.ints(-2))
                factors[place] = edit("Reshape", turned, edit("Concat", head, ends, axis=0))
        product = edit("MatMul", *factors)
        edit("Mul", product, edit.constant(flags.get("alpha", 1.0), "float64"), output=node.output[0])
    sort_nodes(graph)


def _write_norms_out(graph: onnx.GraphProto) -> None:
    """ONNX's layer norm, which is over the last axis here, has statistics in fp32 whatever it reads."""
    norms = [node for node in graph.node if node.op_type == "LayerNormalization"]
    rest = [node for node in graph.node if node.op_type != "LayerNormalization"]
    replace(graph.node, rest)
    edit = Editor(graph)
    axes = edit.ints(-1)
    for node in norms:
        outputs = [*node.output, "", ""]
        mean = edit("ReduceMean", node.input[0], axes, output=outputs[1] or None)
        moved = edit("Sub", node.input[0], mean)
        variance = edit("ReduceMean", edit("Mul", moved, moved), axes)
        epsilon = edit.constant(attributes_of(node)["epsilon"], "float64")
        inverse = edit("Reciprocal", edit("Sqrt", edit("Add", variance, epsilon)), output=outputs[2] or None)
        scaled = edit("Mul", edit("Mul", moved, inverse), node.input[1])
        edit("Add", scaled, node.input[2], output=outputs[0])
    sort_nodes(graph)


def run(model: onnx.ModelProto, given: Arrays) -> dict[str, npt.NDArray[Any]]:
    """What a graph computes, as a rank's session does; one in fp64 as it is written."""
    assert LIBRARY.path is not None
    # ONNX Runtime's fusions make operators of it that have no kernels in fp64.
    double = any(value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE for value in model.graph.output)
    session = Sessions(CpuDevice(), 1, "error", LIBRARY.path).open(model.SerializeToString(), as_written=double)
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    onnxruntime.set_seed(SEED)
    results = session.run(None, {name: value for name, value in given.items() if name in wanted})
    return dict(zip(names, results, strict=True))


def run_parts(
    graphs: Sequence[onnx.ModelProto], divided: Sequence[Divided], given: Arrays
) -> dict[str, npt.NDArray[Any]]:
    """What the parts compute together, as threads: gradients put together by regions, all else equal on each.

    ONNX Runtime's random numbers are the process's: graphs with Dropout need `run_ranks`.
    """
    assert LIBRARY.path is not None
    parts = Parts(len(graphs))
    collectives.connect(LIBRARY.path, {CHANNEL: parts})
    try:
        results = parts.run(lambda part: run(graphs[part], _held(divided[part], given)))
    finally:
        collectives.connected.clear()
    assert all(calls == parts.calls[0] for calls in parts.calls)
    return {name: run_together(name, divided, given, results) for name in results[0]}


def run_ranks(
    graphs: Sequence[onnx.ModelProto], divided: Sequence[Divided], given: Arrays, folder: Path
) -> dict[str, npt.NDArray[Any]]:
    """As `run_parts`, by real ranks over MPI."""
    for rank, graph in enumerate(graphs):
        (folder / f"{rank}.onnx").write_bytes(graph.SerializeToString())
        np.savez(folder / f"{rank}.npz", **_held(divided[rank], given))
    program = str(Path(__file__).with_name("part_of_model.py"))
    on_ranks(len(graphs), program, str(folder), str(CHANNEL), str(SEED))
    results = [dict(np.load(folder / f"{rank}-results.npz")) for rank in range(len(graphs))]
    return {name: run_together(name, divided, given, results) for name in results[0]}


def _held(divided: Divided, given: Arrays) -> dict[str, npt.NDArray[Any]]:
    """What a part is given: its regions of the tensors, and the whole batch."""
    regions = divided.regions
    return {name: regions[name].of(value) if name in regions else value for name, value in given.items()}


def run_together(name: str, divided: Sequence[Divided], given: Arrays, results: Sequence[Arrays]) -> npt.NDArray[Any]:
    tensor = name.removesuffix("_grad")
    if tensor == name or tensor not in divided[0].regions or divided[0].regions[tensor].whole:
        for each in results[1:]:
            np.testing.assert_allclose(each[name], results[0][name], rtol=1e-6, atol=1e-7, err_msg=name)
        return results[0][name]
    whole = np.full_like(given[tensor], np.nan)
    for each, result in zip(divided, results, strict=True):
        region = each.regions[tensor]
        assert region.axis is not None
        places = np.concatenate([np.arange(start, stop) for start, stop in region.ranges])
        whole[(slice(None),) * region.axis + (places,)] = result[name]
    return whole


def divide_all(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], trained: Sequence[str], parts: int, **options: Any
) -> list[Divided]:
    """All parts of a forward graph."""
    return [divide(model, shapes, trained, LOSS_SUM, part, parts, CHANNEL, **options) for part in range(parts)]


def divide_tokens(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], trained: Sequence[str], parts: int
) -> list[Divided]:
    """All parts of a forward graph, with sequence parallelism."""
    divided = divide_all(model, shapes, trained, parts)
    for part, each in enumerate(divided):
        held = {name: each.regions[name].shape(shape) for name, shape in shapes.items()}
        notes = share_tokens(each.model, held, trained, LOSS_SUM, each.sums, part, parts, CHANNEL)
        divided[part] = replace_fields(each, notes=(*each.notes, *notes))
    return divided


def finished(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph itself, as ranks run it."""
    finish(model)
    return model


def off(found: Arrays, expected: Arrays) -> dict[str, float]:
    """Largest difference of each value: relative to the expected one's largest element, absolute if that is small."""
    assert found.keys() == expected.keys()
    differences = {}
    for name, value in expected.items():
        # The gradient of a bias of keys is 0 but for rounding.
        size = max(float(np.abs(value).max(initial=0)), 0.1)
        differences[name] = float(np.abs(found[name] - value).max(initial=0)) / size
    return differences
