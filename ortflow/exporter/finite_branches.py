"""Branches on whether all values are finite, which are taken as if they were.

Called by `ortflow.exporter.trace`. DETR and its relatives in transformers clamp infinite values in training, behind
`if not torch.isfinite(x).all()`. PyTorch's exporter cannot export a branch on values; a run stops at infinite values by
itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ortflow.exporter.stops import replaced, shadowed

_MARK = "_ortflow_all_finite"


@contextlib.contextmanager
def finite_values() -> Iterator[None]:
    """Let `bool(torch.isfinite(x).all())` be true, inside the block."""
    import torch

    isfinite, every, truth = torch.isfinite, torch.Tensor.all, torch.Tensor.__bool__

    def marked(tensor: Any) -> Any:
        setattr(tensor, _MARK, True)
        return tensor

    def is_finite(x: Any, *args: Any, **kwargs: Any) -> Any:
        return marked(isfinite(x, *args, **kwargs))

    def all_of(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = every(tensor, *args, **kwargs)
        return marked(result) if not args and not kwargs and hasattr(tensor, _MARK) else result

    def is_true(tensor: Any) -> bool:
        return (hasattr(tensor, _MARK) and tensor.ndim == 0) or bool(truth(tensor))

    with (
        replaced(torch, "isfinite", is_finite),
        shadowed(torch.Tensor, "all", all_of),
        shadowed(torch.Tensor, "__bool__", is_true),
    ):
        yield
