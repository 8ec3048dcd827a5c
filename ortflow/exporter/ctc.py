"""The CTC loss composed of ONNX operators, used during an export.

Called by `ortflow.exporter.trace` in place of `torch.ctc_loss`, which has no ONNX equivalent. The forward recursion of
Graves et al. (2006), equations 6 to 8, in logarithms, unrolled over time: the size of the file grows with the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NEVER = -1e30
"""Logarithm of a probability of zero: an infinity has no gradient."""


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """As `torch.ctc_loss`: log-probabilities [time, batch, classes], targets [batch, length] or one after the other.

    `reduction`: 0 none, 1 mean, 2 sum. Without a batch, both have one axis less.
    """
    import torch

    single = log_probs.ndim == 2
    if single:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    inputs, lengths = (
        torch.as_tensor(lengths_of_side, device=log_probs.device).reshape(-1).long()
        for lengths_of_side in (input_lengths, target_lengths)
    )
    rows = _rows(targets.long(), lengths, log_probs.shape[0])
    is_label = torch.arange(rows.shape[1], device=rows.device) < lengths.unsqueeze(1)
    labels = torch.where(is_label, rows, blank)
    # A blank before, between and behind: [batch, 2 length + 1].
    path = torch.stack([torch.full_like(labels, blank), labels], 2).flatten(1)
    path = torch.nn.functional.pad(path, (0, 1), value=blank)
    # A blank among the targets, as padding within their length, is a label like any other in PyTorch (2.15), too.
    skips = torch.nn.functional.pad((path[:, 2:] != path[:, :-2]).long(), (2, 0)) > 0
    emitted = log_probs.gather(2, path.unsqueeze(0).expand(log_probs.shape[0], -1, -1)).unbind(0)
    alpha = torch.where(torch.arange(path.shape[1], device=path.device) < 2, emitted[0], _NEVER)
    for step, now in enumerate(emitted[1:], 1):
        before = torch.nn.functional.pad(alpha[:, :-1], (1, 0), value=_NEVER)
        skipped = torch.where(skips, torch.nn.functional.pad(alpha[:, :-2], (2, 0), value=_NEVER), _NEVER)
        moved = torch.logsumexp(torch.stack([alpha, before, skipped], 2), 2) + now
        alpha = torch.where(step < inputs.unsqueeze(1), moved, alpha)
    last = 2 * lengths.unsqueeze(1)
    ends = torch.cat([alpha.gather(1, last), alpha.gather(1, (last - 1).clamp(min=0))], 1)
    ends = torch.where(torch.stack([lengths >= 0, lengths > 0], 1), ends, _NEVER)
    losses = -torch.logsumexp(ends, 1)
    losses = torch.where(losses < -_NEVER / 2, losses, 0.0 if zero_infinity else torch.inf)
    if reduction == 1:
        return (losses / lengths.clamp(min=1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses.squeeze(0) if single else losses


def _rows(targets: Any, lengths: Any, longest: int) -> Any:
    """Targets of the batch below one another: [batch, length]."""
    import torch

    if targets.ndim == 2:
        return targets
    starts = lengths.cumsum(0) - lengths
    places = starts.unsqueeze(1) + torch.arange(longest, device=starts.device)
    return targets[places.clamp(max=targets.shape[0] - 1)]
