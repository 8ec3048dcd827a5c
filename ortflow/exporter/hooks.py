"""What PyTorch does around `forward` in training: reproduced in the file, or refused by the module's name.

Called by `ortflow.export`. A hook that multiplies a parameter's gradient by fixed numbers (rows that stay as they are)
becomes nodes; any other hook that changes a gradient is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.stops import KEY, VALUE

if TYPE_CHECKING:
    import torch


def check_training(module: torch.nn.Module) -> None:
    """Raise UserError if training would do something else than the file's gradient."""
    import torch

    for name, part in module.named_modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.max_norm is not None:
            raise UserError(
                f"{name or type(part).__name__!r} has max_norm={part.max_norm:g}: its forward shortens the rows that it"
                " reads, which no gradient does",
                fix="set max_norm to None, and divide the rows by their norms in forward",
            )
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UserError(
                f"parameter {name!r} has a hook that runs when its gradient is complete"
                " (register_post_accumulate_grad_hook), which a run would not call",
                fix="remove the hook",
            )


def gradient_factors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameter -> what its hooks multiply the gradient by, for those whose gradient they change.

    Raises UserError if they do something else.
    """
    import torch

    factors = {}
    for name, parameter in module.named_parameters():
        hooks = list((parameter._backward_hooks or {}).values())
        if not hooks or not parameter.requires_grad:
            continue
        factor = _after(hooks, torch.ones_like(parameter))
        generator = torch.Generator().manual_seed(7)
        # A hook that clips changes large gradients only.
        for scale in (1.0, 1e-6, 1e6):
            gradient = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.device)
            changed = _after(hooks, gradient)
            if changed.shape != gradient.shape or not torch.allclose(changed, gradient * factor, rtol=1e-5, atol=0.0):
                raise UserError(
                    f"parameter {name!r} has a hook that changes its gradient (register_hook) other than by fixed"
                    " factors, which a run would not do",
                    fix="remove the hook; `train.clip_norm` of the run file limits the norm of all gradients",
                )
        if not torch.equal(factor, torch.ones_like(factor)):
            factors[name] = factor
    return factors


def _after(hooks: Sequence[Callable[[Any], Any]], gradient: torch.Tensor) -> torch.Tensor:
    """The gradient that hooks make of one."""
    import torch

    with torch.no_grad():
        for hook in hooks:
            returned = hook(gradient.clone())
            gradient = gradient if returned is None else returned
    return gradient


def multiply_gradients(model: Any, factors: Mapping[str, torch.Tensor]) -> None:
    """Let the graph read each parameter w as stopped(w) + (w - stopped(w)) * factor: its value, with that gradient."""
    import onnx_ir as ir

    graph = model.graph
    for name, factor in factors.items():
        weight = graph.initializers.get(name)
        if weight is None:
            continue
        numbers = ir.Value(
            name=f"{name}/gradient_factor",
            type=weight.type,
            shape=weight.shape,
            const_value=ir.tensor(factor.detach().cpu().numpy(), name=f"{name}/gradient_factor"),
        )
        graph.initializers[numbers.name] = numbers
        readers = list(weight.uses())
        fixed = ir.Node("", "Identity", [weight], metadata_props={KEY: VALUE})
        moved = ir.Node("", "Sub", [weight, fixed.outputs[0]])
        scaled = ir.Node("", "Mul", [moved.outputs[0], numbers])
        total = ir.Node("", "Add", [fixed.outputs[0], scaled.outputs[0]])
        nodes = [fixed, moved, scaled, total]
        for node, kind in zip(nodes, ("fixed", "moved", "scaled", "read"), strict=True):
            value = node.outputs[0]
            value.name, value.type, value.shape = f"{name}/{kind}", weight.type, weight.shape
        for node, place in readers:
            node.replace_input_with(place, total.outputs[0])
        graph.insert_before(graph[0], nodes)
