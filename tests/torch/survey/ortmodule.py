"""One model of the survey under ORTModule on the CPU, against PyTorch. Used by `__main__`, in a process of its own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from case import Batch
from catalogue import case_of
from torch import nn
from worker import STEPS, Arrays, Reference, in_double_precision, judged

from ortflow.torch import ORTModule
from ortflow.workflow.errors import UserError

torch.set_num_threads(1)
DIFFERS = "the graphs do not compute"
"""Of the refusal of a first step that differs: a graph of ours is wrong."""


def row(name: str) -> dict[str, Any]:
    """The row of a model; see `worker.survey`."""
    warnings.simplefilter("ignore")
    case = case_of(name)
    batches = list(case.batches(STEPS))
    result: dict[str, Any] = {"case": name}
    try:
        ours = Reference(case, batches, torch.float32, wrap=ORTModule)
    except UserError as error:
        return result | {"result": "wrong" if DIFFERS in str(error) else "refused", "why": str(error)[:600]}
    single, exact = Reference(case, batches, torch.float32), in_double_precision(case, batches)

    def gradients_of(moved: nn.Module, batch: Batch, share: float) -> Arrays:
        return Reference(case, [batch], torch.float32, share=share, wrap=ORTModule).gradients

    def losses_again(seed: int) -> Sequence[float]:
        return Reference(case, batches, torch.float32, seed, wrap=ORTModule).losses

    judgement = judged(case, batches, (single, exact), ours.losses, ours.gradients, gradients_of, losses_again)
    return result | judgement | {"seconds": ours.seconds, "torch_seconds": single.seconds}
