"""`torch.embedding_bag` composed of ONNX operators: PyTorch's exporter writes a Loop, which cannot be trained.

Called by `trace` while a module is traced. PyTorch is installed wherever this is called.
"""

from __future__ import annotations

from typing import Any


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Any, None, None, None]:
    """Sum (mode 0), mean (1) or maximum (2) of the rows of each bag; a bag without rows is 0.

    `indices` [n] and `offsets` [bags], or [bags + 1] with `include_last_offset`, as `torch.nn.functional.embedding_bag`
    calls it. Memory is n times the number of bags, and for the maximum that times the width of the table.
    """
    import torch

    count = indices.shape[0]
    if include_last_offset:
        starts, ends = offsets[:-1], offsets[1:]
    else:
        starts, ends = offsets, torch.cat([offsets[1:], offsets.new_full((1,), count)])
    places = torch.arange(count, device=offsets.device)
    inside = (places >= starts[:, None]) & (places < ends[:, None])
    if padding_idx is not None:
        inside = inside & (indices != padding_idx)
    rows = torch.nn.functional.embedding(indices, weight, scale_grad_by_freq=scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    if mode == 2:
        lowest = torch.finfo(rows.dtype).min
        # Of equal elements only the first has a gradient; amax would share it.
        largest = torch.where(inside[:, :, None], rows, lowest).max(1).values
        return torch.where(inside.any(1)[:, None], largest, 0.0), None, None, None
    total = inside.to(rows.dtype) @ rows
    if mode == 1:
        total = total / inside.sum(1)[:, None].clamp(min=1)
    return total, None, None, None
