"""A metric that is the user's own ONNX graph, merged into the evaluation graph. Called by `metrics`.

Its inputs are outputs of the model and labels, by name; its outputs are the scalars `sum` and `weight`. Rows that
`data.last_batch: pad` adds are for the graph to leave out: it then reads the input `ortflow.valid`, int64 [1].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto, compose, version_converter

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.limits import check_constants, check_sizes
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.ir.edit import dims_of, rename_values
from ortflow.workflow.graph.objective.labels import Labels, text
from ortflow.workflow.graph.types import VALID
from ortflow.workflow.spec.metrics import MetricSection

OPSET = 18
OUTPUTS = ("sum", "weight")


def graph_inputs(metric: MetricSection, location: str) -> list[str]:
    """The names of the graph's inputs. Raises UserError if the file is not such a graph."""
    return [str(value.name) for value in _read(metric, location).graph.input]


def attach_graph(
    labels: Labels, metric: MetricSection, outputs: Mapping[str, onnx.ValueInfoProto], batch: str, location: str
) -> None:
    """Add the graph's nodes and its two outputs. Raises UserError if an input fits neither an output nor a label."""
    edit, prefix = labels.edit, f"ortflow.{metric.key}/"
    model = _read(metric, location)
    graph = compose.add_prefix(model, prefix).graph
    names: dict[str, str] = {}
    for value in model.graph.input:
        dims, name = dims_of(value), str(value.name)
        if name in outputs:
            names[prefix + name] = name
        elif name == VALID and labels.padded:
            names[prefix + name] = VALID
        elif not dims or value.type.tensor_type.elem_type not in (TensorProto.FLOAT, TensorProto.INT64):
            shape = "unknown shape" if dims is None else f"shape {text(dims)}"
            raise UserError(
                f"input {name!r} of {shape} is neither an output of the model nor a label: labels are fp32 or int64 "
                "with an axis of the samples",
                where=f"{location}.path",
                fix=f"name its inputs as the model's outputs ({', '.join(outputs)}) and as labels",
            )
        else:
            names[prefix + name] = labels.input(name, value.type.tensor_type.elem_type, dims, f"{location}.path")
    if labels.padded and prefix + VALID not in names:
        raise UserError(
            f"does not read {VALID!r}, so that it would count the samples that `data.last_batch: pad` adds",
            where=f"{location}.path",
            fix=f"add the input {VALID!r} (int64 [1], the number of leading rows that count), or use `drop` or `keep`",
        )
    for name in OUTPUTS:
        names[prefix + name] = edit.fresh(name)
    edit.graph.initializer.extend(graph.initializer)
    for node in graph.node:
        rename_values(node, names)
        edit.graph.node.append(node)
    for name in OUTPUTS:
        flat = edit("Reshape", names[prefix + name], edit.constant([], "int64"))
        edit("Cast", flat, output=f"ortflow.{metric.key}_{name}", to=TensorProto.FLOAT)


def _read(metric: MetricSection, location: str) -> onnx.ModelProto:
    assert metric.path is not None
    path = f"{location}.path"
    try:
        model = read_model(Path(metric.path))
    except UserError as error:
        raise UserError(f"{metric.path}: {error.what}", where=path, fix=error.fix) from error
    for check in (check_sizes, check_constants):
        check(model, metric.path)
    missing = [name for name in OUTPUTS if name not in {value.name for value in model.graph.output}]
    if missing:
        raise UserError(
            f"{metric.path} has no output {missing[0]!r}",
            where=path,
            fix="give it the scalar outputs `sum` and `weight`",
        )
    if any(node.domain not in ("", "ai.onnx") for node in model.graph.node) or model.functions:
        raise UserError(f"{metric.path} has operators besides ONNX's own", where=path, fix="use standard operators")
    version = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), OPSET)
    if version != OPSET:
        try:
            model = version_converter.convert_version(model, OPSET)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{metric.path} has opset {version}, which onnx does not convert to {OPSET}: {reason}",
                where=path,
                fix=f"export it with opset {OPSET}",
            ) from error
    return model
