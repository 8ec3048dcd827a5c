"""The names of an exported graph, and what its metadata says of them.

Called by `export`. The exporter names outputs by its own operators, and tied tensors by their last name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from ortflow.workflow.graph.ir.origin import STACK, user_line

if TYPE_CHECKING:
    import torch


def statistics(module: torch.nn.Module, *, fixed: bool = False) -> set[str]:
    """Names of the running means and variances that move as a node says: not those of `momentum=None`.

    `fixed`: only of those parts of a module in training mode that are themselves in evaluation mode.
    """
    import torch

    return {
        f"{prefix}.{buffer}" if prefix else buffer
        for prefix, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
        if part.momentum is not None or not part.training
        if not fixed or (module.training and not part.training)
        for buffer in ("running_mean", "running_var")
    }


def counters(module: torch.nn.Module) -> set[str]:
    """Names of the counters of normalisations that nothing reads."""
    import torch

    return {
        f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.batchnorm._NormBase)
        if part.momentum is not None or not isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
    }


def rename_tied(graph: Any, module: torch.nn.Module) -> None:
    """Give tied tensors their first name, as `named_parameters` does."""
    # PyTorch's exporter keeps the last.
    for tensors in (module.named_parameters, module.named_buffers):
        first = {id(tensor): name for name, tensor in tensors()}
        for alias, tensor in tensors(remove_duplicate=False):
            name = first[id(tensor)]
            if alias != name and alias in graph.initializers and name not in graph.initializers:
                value = graph.initializers.pop(alias)
                value.name = name
                graph.initializers[name] = value


def rename_outputs(program: Any, changed: Sequence[str] = ()) -> None:
    """Name outputs after the keys or fields of what `forward` returns, which the buffers `changed` follow."""
    graph = program.model.graph
    spec = program.exported_program.call_spec.out_spec
    names = _leaf_names(spec.children()[0] if changed else spec, "") + list(changed)
    specs = [s for s in program.exported_program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
    returned = [n for n, s in zip(names, specs, strict=True) if type(s.arg).__name__ != "ConstantArgument"]
    fixed = {value.name for value in graph.inputs} | set(graph.initializers)
    inner = {value.name: value for node in graph.all_nodes() for value in node.outputs}
    for value, name in zip(graph.outputs, returned, strict=True):
        if value.producer() is None:
            continue
        while name in fixed:
            name += "_"
        fixed.add(name)
        inner.pop(value.name, None)
        other = inner.pop(name, None)
        if other is not None:
            # The exporter's own name for an inner value is replaced.
            other.name = next(new for i in count() if (new := f"{name}_{i}") not in inner and new not in fixed)
            inner[other.name] = other
        value.name = name


def _leaf_names(spec: Any, prefix: str) -> list[str]:
    if spec.type is None:
        return [prefix or "output"]
    children = spec.children()
    context = spec.context
    keys: Sequence[Any] = getattr(context, "_fields", None) or (
        context if isinstance(context, list) and len(context) == len(children) else range(len(children))
    )
    names = []
    for key, child in zip(keys, children, strict=True):
        head = prefix or ("" if isinstance(key, str) else "output")
        names += _leaf_names(child, f"{head}_{key}" if head else str(key))
    return names


def write_roles(
    model: Any, module: torch.nn.Module, changed: Sequence[str] = (), evaluation: Sequence[str] = ()
) -> None:
    """List parameters, frozen ones, constants, the buffers that forward changes, and the outputs in evaluation mode."""
    present = model.graph.initializers
    parameters = {name: parameter for name, parameter in module.named_parameters() if name in present}
    apart = {*parameters, *statistics(module), *changed}
    lists = {
        "parameters": [name for name, parameter in parameters.items() if parameter.requires_grad],
        "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad]
        + sorted(name for name in statistics(module, fixed=True) if name in present),
        "constants": [name for name in present if name not in apart],
        "state": list(changed),
        "evaluation": list(evaluation),
    }
    for key, names in lists.items():
        model.metadata_props.pop(f"ortflow.{key}", None)
        if names or key in ("parameters", "frozen", "constants"):
            model.metadata_props[f"ortflow.{key}"] = json.dumps(names)


def shorten_lines(model: Any) -> None:
    """Keep the user's own line of each node: the whole stack is large and contains paths of this machine."""
    for node in model.graph.all_nodes():
        line = user_line(node.metadata_props.pop(STACK, ""))
        if line is not None:
            node.metadata_props[STACK] = 'File "{}", line {}'.format(*line)
