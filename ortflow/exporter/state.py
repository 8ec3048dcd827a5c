"""Buffers that `forward` changes: their new values become outputs of the exported graph, which a run stores.

Called by `ortflow.export`. PyTorch's exporter computes the new values and drops them. Running statistics of
BatchNormalization are not among them: the node itself says how they move.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ortflow.exporter.graph_names import counters, statistics
from ortflow.exporter.stops import replaced, shadowed
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    import torch

UPDATED = "updated/"
"""As `ortflow.workflow.graph.ir.recorded_forms`, which needs onnx."""


def refuse_changed_parameters(program: Any) -> None:
    """Raise UserError if forward changes a parameter: a run would change it by its gradient only."""
    changed = [
        spec.target
        for spec in program.exported_program.graph_signature.output_specs
        if spec.kind.name == "PARAMETER_MUTATION"
    ]
    if changed:
        raise UserError(
            f"forward changes the parameter {changed[0]!r} itself, as max_norm of an Embedding does",
            fix="compute the changed value in forward and leave the parameter as it is, or make it a buffer",
        )


def refuse_newer_operators(program: Any, opset: int) -> None:
    """Raise UserError if a node has an operator that the file's opset does not have yet: no runtime would read it."""
    import onnx

    for node in program.model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx") or onnx.defs.has(node.op_type, max_inclusive_version=opset):
            continue
        raise UserError(
            f"{node.op_type} is an operator of a newer opset than {opset}, which ortflow trains, and has no gradient"
            f" (node {node.name!r})",
            fix="compute it in forward by other operations, such as grid_sample for a deformable convolution",
        )


def changed_buffers(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    called: Callable[[Any], object] = lambda result: None,
) -> list[str]:
    """The buffers that a call changes or replaces, by their first names; those of BatchNormalization are left out.

    `called` is called with what the call returns, before the module is restored. Nothing is recorded for gradients:
    their activations would be the most memory that a first step takes.
    None are found if the module does not run: its export says why.
    """
    import torch

    from ortflow.exporter.reference import borrowed
    from ortflow.exporter.trace import exportable

    known_buffers = statistics(module) | counters(module)
    by_node: set[int] = set()

    def noting(original: Any) -> Any:
        def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any) -> Any:
            if training:
                by_node.update((id(mean), id(variance)))
            return original(x, weight, bias, mean, variance, training, *rest)

        return batch_norm

    # By default, fork_rng also copies the state of every GPU.
    with borrowed(module), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        # PyTorch counts the changes of a tensor in place in its `_version`.
        before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
        with exportable(module), replaced(torch, "batch_norm", noting(torch.batch_norm)), torch.no_grad():
            result = module(*args, **kwargs)
        called(result)
        after = dict(module.named_buffers(remove_duplicate=False))
        return [
            name
            for name, (buffer, version) in before.items()
            if name not in known_buffers and id(buffer) not in by_node
            if id(after.get(name)) != id(buffer) or buffer._version != version
        ]
    return []


@contextlib.contextmanager
def returning(module: torch.nn.Module, changed: Sequence[str]) -> Iterator[None]:
    """Let forward also return these buffers as they are after it, inside the block."""
    # PyTorch's exporter removes what computes only them.
    if not changed:
        yield
        return
    forward = module.forward

    @functools.wraps(forward)
    def with_buffers(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        return result, [module.get_buffer(name).detach().clone() for name in changed]

    with shadowed(module, "forward", with_buffers):
        yield


def name_updates(program: Any, module: torch.nn.Module, changed: Sequence[str]) -> None:
    """Name the last outputs, which are the new values of buffers, `updated/<buffer>`, in single precision.

    Called before the graph is optimized, with tied buffers under their first names.
    """
    import onnx_ir as ir

    graph = program.model.graph
    buffers = dict(module.named_buffers())
    values = graph.outputs[len(graph.outputs) - len(changed) :] if changed else []
    for name, value in zip(changed, values, strict=True):
        graph.outputs.remove(value)
        node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", ir.DataType.FLOAT)])
        output = node.outputs[0]
        output.name, output.type = UPDATED + name, ir.TensorType(ir.DataType.FLOAT)
        output.shape = ir.Shape(list(buffers[name].shape))
        graph.append(node)
        graph.outputs.append(output)
        as_float(graph, name, buffers[name])


def as_float(graph: Any, name: str, tensor: torch.Tensor) -> None:
    """Store a buffer in single precision, and cast it where it is read: all state of a run is."""
    import onnx_ir as ir

    before = graph.initializers.get(name)
    if before is None or before.dtype == ir.DataType.FLOAT:
        return
    graph.initializers.pop(name)
    stored = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=before.shape,
        const_value=ir.tensor(tensor.detach().cpu().float().numpy(), name=name),
    )
    before.name, before.const_value = f"{name}/read", None
    cast = ir.Node("", "Cast", [stored], [ir.AttrInt64("to", before.dtype)])
    cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = f"{name}/read", before.type, before.shape
    before.replace_all_uses_with(cast.outputs[0])
    graph.insert_before(graph[0], cast)
    graph.initializers[name] = stored


def needed(graph: Any, changed: list[str]) -> list[str]:
    """Those of the changed buffers that an output of the module depends on, now or in a later call."""
    sources = _sources([value for value in graph.outputs if not value.name.startswith(UPDATED)])
    needed_names: set[str] = set()
    while new_names := {name for name in changed if name in sources} - needed_names:
        needed_names |= new_names
        sources |= _sources([value for value in graph.outputs if value.name.removeprefix(UPDATED) in new_names])
    return [name for name in changed if name in needed_names]


def _sources(values: list[Any]) -> set[str]:
    """Names of everything that some values are computed from."""
    names, open_values = set(), list(values)
    while open_values:
        value = open_values.pop()
        if value is None or value.name in names:
            continue
        names.add(value.name)
        node = value.producer()
        if node is not None:
            open_values.extend(node.inputs)
            for attribute in node.attributes.values():
                if attribute.type.name == "GRAPH":
                    open_values.extend(attribute.as_graph().outputs)
                    open_values.extend(v for inner in attribute.as_graph() for v in inner.inputs)
    return names


def drop_updates(graph: Any, names: set[str]) -> None:
    """Remove the outputs for buffers that no output of the module depends on, and what only they read."""
    for value in [value for value in graph.outputs if value.name.removeprefix(UPDATED) in names]:
        graph.outputs.remove(value)
    remove_unread(graph)


def remove_unread(graph: Any) -> None:
    """Remove the nodes and initializers that no output needs."""
    for node in reversed(list(graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        if not graph.initializers[name].is_graph_output():
            graph.initializers.pop(name)
