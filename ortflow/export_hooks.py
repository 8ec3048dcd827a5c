"""What PyTorch does around `forward` in training, and an ONNX file cannot express: refused by the module's name.

Called by `ortflow.export` before the module is traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortflow.workflow.errors import UserError

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
        for hook in list((parameter._backward_hooks or {}).values()):
            if parameter.requires_grad and _changes(hook, parameter):
                raise UserError(
                    f"parameter {name!r} has a hook that changes its gradient (register_hook), which a run would not"
                    " call",
                    fix="remove the hook, and write what it does in forward: w.detach() + (w - w.detach()) * mask has"
                    " the gradient of w times the mask",
                )


def _changes(hook: object, parameter: torch.Tensor) -> bool:
    """Whether a hook returns another gradient than it is given: it may clip only large ones."""
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for scale in (1.0, 1e-6, 1e6):
            gradient = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.device)
            given = gradient.clone()
            returned = hook(given)  # type: ignore[operator]
            if not torch.equal(given if returned is None else returned, gradient):
                return True
    return False
