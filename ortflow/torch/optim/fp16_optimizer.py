"""`FP16_Optimizer`, which programs for the upstream package call on the optimizer that DeepSpeed returns."""

from __future__ import annotations

from typing import Any, TypeVar

from ortflow.workflow.errors import UserError

T = TypeVar("T")


def FP16_Optimizer(optimizer: T, **options: Any) -> T:  # noqa: N802 - the upstream name
    """Return the optimizer as it is.

    The upstream function replaced slow methods of old releases: DeepSpeed up to 0.9.2, Apex's amp and Megatron-LM
    1.1.5. Today's DeepSpeed has fast ones, and scales the loss itself.

    Raises UserError for an object without `step`, and for `options`, which only Megatron-LM 1.1.5 needed.
    """
    if not callable(getattr(optimizer, "step", None)):
        raise UserError(f"it was given a {type(optimizer).__name__}", where="FP16_Optimizer", fix="pass an optimizer")
    if options:
        problem = f"Megatron-LM 1.1.5, for which {', '.join(options)} would be, is not supported"
        raise UserError(problem, where="FP16_Optimizer", fix="omit the options")
    return optimizer
