"""The evaluation form of a module: exported beside the training form if the two compute something else.

Called by `ortflow.export`. Code under `if self.training` (stochastic depth, noise, auxiliary outputs) is traced in
training mode only. Where the module in evaluation mode computes something else than the training form with its Dropout
off and its running statistics, it is traced again; `merge` appends its nodes to the same file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ortflow.exporter.graph_names import counters, write_roles
from ortflow.exporter.state import UPDATED, as_float, drop_updates, needed
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    import onnx
    import torch

IN_EVALUATION = "evaluation/"
"""As `ortflow.workflow.graph.ir.recorded_forms`, which needs onnx."""
_NOISE = (0.0, 5e-2, 1.0)
"""Relative noise on parameters and inputs at the points of the comparison."""
_DEFAULT = re.compile(r"output(_\d+)?")
"""The name of an output that is neither a key nor a field."""


def differences(
    model: onnx.ModelProto, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[dict[str, str]]:
    """At each point, the outputs in which the module in evaluation mode differs from the file's, and how.

    Points at which the module is not finite are left out. Raises NotCompared.
    """
    from ortflow.exporter.comparison import Comparison
    from ortflow.exporter.reference import NotFinite, borrowed, call_of, in_evaluation

    comparison = Comparison(model, module)
    faults_by_point = []
    for noise in _NOISE:
        with borrowed(module), in_evaluation(module):
            try:
                faults_by_point.append(comparison.evaluation_faults(call_of(module, args, kwargs, noise)))
            except NotFinite:
                continue
    return faults_by_point


def module_that_differs(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The innermost part whose mode changes the outputs, besides Dropout and BatchNormalization; empty if unknown."""
    import numpy as np
    import torch

    from ortflow.exporter.reference import Call, NotCompared, borrowed, compute

    ordinary = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    parts = [(name, part) for name, part in module.named_modules() if part.training]
    with borrowed(module):
        for _, part in parts:
            part.training = not isinstance(part, ordinary)
        try:
            before = compute(Call(module, (args, kwargs)), None)[0].outputs
            for name, part in reversed(parts):
                if not part.training:
                    continue
                part.training = False
                after = compute(Call(module, (args, kwargs)), None)[0].outputs
                if len(after) != len(before) or not all(map(np.array_equal, before, after)):
                    return f"{name!r} ({type(part).__name__})" if name else type(part).__name__
                part.training = True
        except NotCompared:
            pass
    return ""


def merge(model: Any, other: Any) -> list[str]:
    """Append the nodes of `other` to a graph, with the tensors that both have shared; returns its outputs' names.

    Outputs of `other` for changed buffers are left out.
    """
    import onnx_ir as ir

    graph, second = model.graph, other.graph
    inputs = {value.name: value for value in graph.inputs}
    shared: dict[int, Any] = {}
    for value in second.inputs:
        shared[id(value)] = inputs[value.name]
    for name, value in list(second.initializers.items()):
        twin = graph.initializers.get(name)
        if twin is not None and _equal(twin, value):
            shared[id(value)] = twin
            continue
        new = name if twin is None and not _is_taken(graph, name) else IN_EVALUATION + name
        stored = ir.Value(name=new, type=value.type, shape=value.shape, const_value=value.const_value)
        graph.initializers[new] = stored
        shared[id(value)] = stored
    outputs = [value for value in second.outputs if not value.name.startswith(UPDATED)]
    renamed_outputs = [(value, IN_EVALUATION + str(value.name)) for value in outputs]
    second.outputs.clear()
    results = []
    for value, name in renamed_outputs:
        source = shared.get(id(value), value)
        node = ir.Node("", "Identity", [source])
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
        results.append(node)
    nodes = list(second)
    for node in nodes:
        _share(node, shared)
    second.remove(nodes)
    for node in nodes:
        node.name = IN_EVALUATION + str(node.name)
        for value in node.outputs:
            if value.name:
                inner = f"{IN_EVALUATION}{value.name}"
                value.name = f"{inner}/inner" if inner in {name for _, name in renamed_outputs} else inner
    graph.extend([*nodes, *results])
    for node in results:
        graph.outputs.append(node.outputs[0])
    for key, version in other.opset_imports.items():
        model.opset_imports.setdefault(key, version)
    for key, function in other.functions.items():
        model.functions.setdefault(key, function)
    return [name for _, name in renamed_outputs]


def _share(node: Any, shared: dict[int, Any]) -> None:
    """Let a node, and those of its subgraphs, read the first form's tensors."""
    for place, value in enumerate(node.inputs):
        if value is not None and id(value) in shared:
            node.replace_input_with(place, shared[id(value)])
    for attribute in node.attributes.values():
        if attribute.type.name == "GRAPH":
            for inner in attribute.as_graph():
                _share(inner, shared)


def _equal(first: Any, second: Any) -> bool:
    import numpy as np

    array, other = first.const_value, second.const_value
    if array is other:
        return True
    if array.shape != other.shape or array.dtype != other.dtype:
        return False
    return np.array_equal(array.numpy(), other.numpy(), equal_nan=array.dtype.is_floating_point())


def _is_taken(graph: Any, name: str) -> bool:
    return any(value.name == name for node in graph for value in node.outputs) or any(
        value.name == name for value in graph.inputs
    )


def refusal(module: torch.nn.Module, module_name: str, cause: str) -> UserError:
    """The error if the module in evaluation mode cannot be exported."""
    name = type(module).__name__
    place = f" in module {module_name}" if module_name else ""
    return UserError(
        f"{name} computes something else in evaluation mode{place}, which cannot be exported: {cause}",
        fix="change its code under `if self.training`, so that both modes can be exported",
    )


def evaluation_form(
    program: Any,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trace: Callable[[], tuple[Any, list[str]]],
    changed: Sequence[str],
) -> tuple[Any, list[str]] | None:
    """The program of the module in evaluation mode, if it computes something else there, and the buffers it changes.

    `program`: the training form, which changes the buffers `changed`; `trace` traces the module in its present modes.
    Raises UserError if the module's evaluation mode cannot be exported.
    """
    from ortflow.exporter.reference import NotCompared, in_evaluation

    try:
        before = differences(program.model_proto, module, args, kwargs)
    except NotCompared:
        return None  # the training form was not compared either, which is reported
    if not any(before) and not changed:
        return None
    try:
        with in_evaluation(module):
            form, moved = trace()
    except UserError as error:
        if not any(before):
            return None
        raise refusal(module, module_that_differs(module, args, kwargs), error.what) from None
    _name_alike(program.model.graph, form.model.graph)
    after = differences(form.model_proto, module, args, kwargs)
    faults = dict.fromkeys(name for name in after[0] if all(name in point for point in after)) if after else {}
    if faults:
        cause = "; ".join(f"{name} is {after[0][name]}" for name in faults)
        raise refusal(module, module_that_differs(module, args, kwargs), f"in the file, {cause}")
    return form, moved


def _name_alike(training: Any, evaluation: Any) -> None:
    """Give outputs of the evaluation form that have a generated name the names that training has in their places."""
    training_outputs = [value for value in training.outputs if not value.name.startswith(UPDATED)]
    names = {value.name for value in training_outputs}
    evaluation_outputs = [value for value in evaluation.outputs if not value.name.startswith(UPDATED)]
    made_up = len(training_outputs) == len(evaluation_outputs) or all(
        _DEFAULT.fullmatch(value.name) for value in evaluation_outputs
    )
    if all(value.name in names for value in evaluation_outputs) or not made_up:
        return
    fixed = {value.name for node in evaluation.all_nodes() for value in node.outputs}
    for first, second in zip(training_outputs, evaluation_outputs, strict=False):
        if second.producer() is not None and first.name not in fixed and len(first.shape) == len(second.shape):
            second.name = first.name


def finish(
    model: Any, module: torch.nn.Module, changed: Sequence[str], evaluation: tuple[Any, list[str]] | None
) -> Iterator[str]:
    """Append the evaluation form, drop buffers that no output depends on, and record both; yields warnings."""
    outputs = []
    if evaluation is not None:
        for name in changed:
            as_float(evaluation[0].model.graph, name, module.get_buffer(name))
        outputs = merge(model, evaluation[0].model)
    needed_buffers = needed(model.graph, list(changed))
    drop_updates(model.graph, set(changed) - set(needed_buffers))
    write_roles(model, module, needed_buffers, outputs)
    for name in sorted(set(changed) - set(needed_buffers) - counters(module)):
        yield f"buffer {name!r} changes in forward, and no output depends on it: it is not in the ONNX model"
    for name in sorted(set(evaluation[1] if evaluation is not None else ()) & set(needed_buffers)):
        yield (
            f"buffer {name!r} changes in evaluation mode, too: a run evaluates and exports with the value that training"
            " gave it"
        )
