"""Joins a model whose stages are in several files: outputs of one stage are inputs of later ones, by name. Pure.

Inputs that no earlier stage computes are inputs of the whole model; outputs that no later stage reads are its outputs.
Names that mean different things in two files get a prefix with the number of their stage: `stage1.weight`. A weight
that several files have is one weight (`same_names`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import dims_of, rename_values
from ortflow.workflow.graph.ir.recorded_roles import EVALUATION, PROPERTIES, STATE, recorded
from ortflow.workflow.graph.stages.same_names import SameName, same_names

WHERE = "stage"


@dataclass(frozen=True)
class Renamed:
    """A tensor that is another weight than that of an earlier stage with its name, shape and type."""

    was: SameName
    name: str
    """Its name in the whole model."""


@dataclass(frozen=True)
class Joined:
    """The whole model."""

    model: onnx.ModelProto
    cuts: list[list[str]]
    """The tensors that leave each stage but the last: the cuts that reproduce the stages."""
    tied: Sequence[SameName]
    """Tensors that are one with those of an earlier stage."""
    apart: Sequence[Renamed]
    """Tensors that are not."""


def join(models: Sequence[onnx.ModelProto], untied: Sequence[str] = ()) -> Joined:
    """Join the stages to one model; `untied` as in `same_names`.

    Raises
    ------
    UserError
        If the stages do not fit together; names stage, from 0, and tensor.
    """
    _check(models)
    joined = onnx.ModelProto(ir_version=max(model.ir_version for model in models), opset_import=models[0].opset_import)
    joined.graph.name = models[0].graph.name or "model"
    stage_of: dict[str, int] = {}
    inputs: dict[str, onnx.ValueInfoProto] = {}
    outputs: dict[str, onnx.ValueInfoProto] = {}
    last_read: dict[str, int] = {}
    # A value inside one stage must not be what another one calls its input or output.
    used_names = {name for model in models for name in _public(model.graph)}
    equal_names = same_names(models, untied)
    tied = [pair for pair in equal_names if pair.kind == "tied"]
    renamed: list[dict[str, str]] = []
    for number, model in enumerate(models):
        graph = model.graph
        public = _inputs(graph)
        for value in public:
            last_read[value.name] = number
            if value.name in outputs:
                _check_fit(outputs[value.name], value, f"{WHERE} {number}")
            elif value.name in inputs:
                _check_fit(inputs[value.name], value, f"{WHERE} {number}")
            else:
                inputs[value.name] = value
        if number and not any(value.name in stage_of for value in public):
            raise UserError(
                f"the stage reads no output of an earlier stage ({_names(public)})",
                where=f"{WHERE} {number}",
                fix=f"name its inputs like outputs of those: {_names(outputs.values())}",
            )
        shared = {pair.name: renamed[pair.first][pair.name] for pair in tied if pair.stage == number}
        inner_names = sorted(_own(graph) - _public(graph) - shared.keys())
        names = {name: _free(name, number, used_names) for name in inner_names} | shared
        renamed.append(names)
        _append(joined, model, number, names, shared)
        for value in graph.output:
            stage_of[value.name], outputs[value.name] = number, value
    joined.graph.input.extend(inputs.values())
    joined.graph.output.extend(value for name, value in outputs.items() if name not in last_read)
    _record_roles(joined, models, renamed)
    cuts = [[name for name, stage in stage_of.items() if stage == number] for number in range(len(models) - 1)]
    cuts = [[name for name in cut if name in last_read] for cut in cuts]
    apart = [Renamed(pair, renamed[pair.stage][pair.name]) for pair in equal_names if pair.kind != "tied"]
    return Joined(joined, cuts, tied, apart)


def _check(models: Sequence[onnx.ModelProto]) -> None:
    if len(models) < 2:
        raise UserError("one stage is a whole model", where=WHERE, fix="name the file under `model.path`")
    for number, model in enumerate(models):
        if {EVALUATION, STATE} & recorded(model).keys():
            raise UserError(
                "the stage has an evaluation form of its own, or buffers that forward changes, which `join` does not"
                " connect",
                where=f"{WHERE} {number}",
                fix="export the whole model, and name the tensors between the stages under parallel.cuts",
            )
    first = {opset.domain or "ai.onnx": opset.version for opset in models[0].opset_import}
    makers: dict[str, int] = {}
    for number, model in enumerate(models):
        location = f"{WHERE} {number}"
        for opset in model.opset_import:
            domain = opset.domain or "ai.onnx"
            if first.setdefault(domain, opset.version) != opset.version:
                raise UserError(
                    f"the stage uses opset {opset.version} of {domain}, and an earlier one {first[domain]}",
                    where=location,
                    fix="export all stages with one opset",
                )
        for value in model.graph.output:
            if value.name in makers:
                raise UserError(
                    f"the stages {makers[value.name]} and {number} both have an output {value.name!r}",
                    where=location,
                    fix="rename one of them",
                )
            makers[value.name] = number
    for number, model in enumerate(models):
        for value in model.graph.input:
            if makers.get(value.name, -1) >= number:
                raise UserError(
                    f"the stage reads {value.name!r}, which stage {makers[value.name]} makes",
                    where=f"{WHERE} {number}",
                    fix="list the files in the order in which they run",
                )


def _check_fit(earlier: onnx.ValueInfoProto, read: onnx.ValueInfoProto, location: str) -> None:
    """Raise UserError if an output and an input, or two inputs, cannot be the same value."""
    earlier_dims, other = dims_of(earlier), dims_of(read)
    kinds = earlier.type.tensor_type.elem_type, read.type.tensor_type.elem_type
    if kinds[0] != kinds[1]:
        names = [onnx.TensorProto.DataType.Name(kind) for kind in kinds]
        raise UserError(
            f"{read.name!r} is {names[1]} here and {names[0]} in an earlier stage",
            where=location,
            fix="export them alike",
        )
    if earlier_dims is None or other is None:
        return
    differs = any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(earlier_dims, other, strict=False)
    )
    if len(earlier_dims) != len(other) or differs:
        raise UserError(
            f"{read.name!r} has the shape {_shape(other)} here and {_shape(earlier_dims)} in an earlier stage",
            where=location,
            fix="export them alike",
        )


def _inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Inputs that are not weights."""
    tensor_names = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in tensor_names]


def _public(graph: onnx.GraphProto) -> set[str]:
    """Names of what goes in and out."""
    return {value.name for value in (*_inputs(graph), *graph.output)}


def _own(graph: onnx.GraphProto) -> set[str]:
    """Names of values and constants of a graph."""
    names = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    return names.union(name for node in walk.nodes(graph.node) for name in node.output if name)


def _free(name: str, number: int, used_names: set[str]) -> str:
    """The name, prefixed with the stage if another stage uses it."""
    while name in used_names:
        name = f"stage{number}.{name}"
    used_names.add(name)
    return name


def _append(
    joined: onnx.ModelProto, model: onnx.ModelProto, number: int, names: Mapping[str, str], shared: Collection[str]
) -> None:
    """Add a stage, without its initializers that are `shared` with an earlier one."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    node_names = {node.name for node in joined.graph.node}
    for node in copy.graph.node:
        rename_values(node, names)
        if node.name:
            node.name = _free(node.name, number, node_names)
    tensors = [tensor for tensor in copy.graph.initializer if tensor.name not in shared]
    for tensor in tensors:
        tensor.name = names.get(tensor.name, tensor.name)
    values = [value for value in copy.graph.value_info if value.name not in shared]
    for value in values:
        value.name = names.get(value.name, value.name)
    joined.graph.node.extend(copy.graph.node)
    joined.graph.initializer.extend(tensors)
    joined.graph.value_info.extend(values)
    domains = {opset.domain for opset in joined.opset_import}
    joined.opset_import.extend(opset for opset in copy.opset_import if opset.domain not in domains)
    functions = {(function.domain, function.name): function for function in joined.functions}
    for function in copy.functions:
        earlier = functions.get((function.domain, function.name))
        if earlier is None:
            joined.functions.append(function)
        elif earlier.SerializeToString(deterministic=True) != function.SerializeToString(deterministic=True):
            raise UserError(
                f"two stages define the function {function.name!r} differently", where=WHERE, fix="rename one of them"
            )


def _record_roles(
    joined: onnx.ModelProto, models: Sequence[onnx.ModelProto], renamed: Sequence[Mapping[str, str]]
) -> None:
    """Copy the metadata that `export_for_training` wrote about tensors, if all stages have it."""
    said = [recorded(model) for model in models]
    if not all(said):
        return
    for key in PROPERTIES:
        lists = [properties.get(key, []) for properties in said]
        names = [new.get(name, name) for new, tensor_names in zip(renamed, lists, strict=True) for name in tensor_names]
        joined.metadata_props.add(key=key, value=json.dumps(list(dict.fromkeys(names))))


def _names(values: Iterable[onnx.ValueInfoProto]) -> str:
    return ", ".join(repr(str(value.name)) for value in values) or "none"


def _shape(dims: Sequence[int | str | None]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"
