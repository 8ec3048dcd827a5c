"""Small models, run files and runs for the tests of graph building."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.assembly import build
from ortflow.workflow.assembly.child import Child
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.spec.run import TrainerRunSpec

Array = npt.NDArray[Any]
_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32}


def value(name: str, dims: Sequence[int | str] | None, dtype: str = "float32") -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _TYPES[dtype], dims)


def save_model(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    tensors: Mapping[str, Array],
    opset: int = 18,
) -> Path:
    initializers = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "model", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=9), path)
    return path


def linear(path: Path, *, out: Sequence[int | str] = ("batch", 5), width: int = 4, seed: int = 0) -> Path:
    """y = x w + b, then reshaped to `out` without its first axis."""
    rng = np.random.default_rng(seed)
    columns = int(np.prod([d for d in out[1:] if isinstance(d, int)]))
    tensors = {
        "w": rng.normal(size=(width, columns)).astype("float32"),
        "b": rng.normal(size=columns).astype("float32"),
        "shape": np.array([0, *(int(d) for d in out[1:])]),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"], name="/matmul"),
        helper.make_node("Add", ["xw", "b"], ["flat"], name="/bias"),
        helper.make_node("Reshape", ["flat", "shape"], ["y"], name="/shape"),
    ]
    return save_model(path, nodes, [value("x", ["batch", width])], [value("y", list(out))], tensors)


def run_file(model: Path, loss: Mapping[str, Any] | None = None, **changes: Any) -> TrainerRunSpec:
    """A run file for the model; a change's key is a path such as `data__last_batch`."""
    data: dict[str, Any] = {
        "name": "test",
        "model": {"path": str(model), "loss": dict(loss or {"kind": "cross_entropy"})},
        "data": {"train": {"path": "unused"}, "micro_batch": 8},
        "train": {"steps": 1, "optimizer": {"name": "adamw", "lr": 1e-3}},
    }
    for key, content in changes.items():
        *parts, last = key.split("__")
        section = data
        for part in parts:
            section = section.setdefault(part, {})
        section[last] = content
    return TrainerRunSpec.model_validate(data)


@functools.cache
def kept_child() -> Child:
    """One child process for all tests: starting one takes longer than most of its tasks."""
    child = Child()
    atexit.register(child.__exit__, None, None, None)
    return child


def built(
    model: Path, loss: Mapping[str, Any] | None = None, *, lengths: Mapping[str, int] | None = None, **changes: Any
) -> GraphSet:
    """The graphs of a run file, in `graphs` beside the model. `lengths` of the inputs' samples, if they are known."""
    with mock.patch.object(build, "Child") as child:
        child.return_value.__enter__.return_value = kept_child()
        return build.build_graphs(run_file(model, loss, **changes), model.parent / "graphs", lengths=lengths)


def run_graph(
    graph: Path | onnx.ModelProto, feeds: Mapping[str, Array], threads: int = 1, kernels: Path | None = None
) -> dict[str, Array]:
    """Every output of a graph. Feeds without an input are ignored."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if kernels is not None:
        options.register_custom_ops_library(str(kernels))
    content = str(graph) if isinstance(graph, Path) else graph.SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    outputs = [made.name for made in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, {n: feeds[n] for n in names}), strict=True))


def tensors_of(graphs: GraphSet) -> dict[str, Array]:
    from safetensors.numpy import load_file

    return dict(load_file(graphs.initial))


def numeric_gradient(function: Any, at: Array, step: float = 1e-6) -> Array:
    """Central differences of a scalar function, in double precision."""
    at = at.astype("float64")
    result = np.empty_like(at)
    for place in np.ndindex(at.shape):
        ahead, behind = at.copy(), at.copy()
        ahead[place] += step
        behind[place] -= step
        result[place] = (function(ahead) - function(behind)) / (2 * step)
    return result


def residual(path: Path) -> Path:
    """A residual block whose branch begins with a scale of zero, as timm's do: the shortcut's zeros are at the kink of
    the ReLU behind the sum.
    """
    random = np.random.default_rng(3)
    tensors: dict[str, Array] = {
        "w": (0.4 * random.normal(size=(6, 8))).astype("float32"),
        "v": (0.4 * random.normal(size=(8, 8))).astype("float32"),
        "scale": np.zeros(8, "float32"),
        "shift": np.zeros(8, "float32"),
        "mean": np.zeros(8, "float32"),
        "var": np.ones(8, "float32"),
        "u": (0.4 * random.normal(size=(8, 3))).astype("float32"),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/in"),
        helper.make_node("Relu", ["h"], ["shortcut"], name="/relu"),
        helper.make_node("MatMul", ["shortcut", "v"], ["b"], name="/branch"),
        helper.make_node("BatchNormalization", ["b", "scale", "shift", "mean", "var"], ["n"], name="/norm"),
        helper.make_node("Add", ["shortcut", "n"], ["sum"], name="/sum"),
        helper.make_node("Relu", ["sum"], ["r"], name="/relu-behind"),
        helper.make_node("MatMul", ["r", "u"], ["y"], name="/out"),
    ]
    return save_model(path, nodes, [value("x", ["batch", 6])], [value("y", ["batch", 3])], tensors)
