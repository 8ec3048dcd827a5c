"""One model of the survey under ORTModule on the CPU, against PyTorch. Used by `__main__`, in a process of its own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from case import Batch
from catalogue import case_of
from torch import nn
from worker import (
    PLACES,
    SHAKEN,
    STEPS,
    Arrays,
    Reference,
    distance,
    errors_at,
    gradient_errors,
    in_double_precision,
    nearest,
    verdict,
)

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
    singles, exact = [Reference(case, batches, torch.float32)], in_double_precision(case, batches)
    own = distance(singles[0].losses, exact.losses)
    loss = nearest(ours.losses, singles[0], exact)
    errors = gradient_errors(ours.gradients, singles, exact)
    if verdict(loss, own, max(errors.values())) != "right":
        singles += [Reference(case, batches, torch.float32, seed) for seed in range(1, SHAKEN + 1)]
        own = max(distance(single.losses, exact.losses) for single in singles)
        errors = gradient_errors(ours.gradients, singles, exact)
    for share in PLACES:
        if max(errors.values()) > 1:

            def gradients_of(moved: nn.Module, batch: Batch) -> Arrays:
                return Reference(case, [batch], torch.float32, share=share, wrap=ORTModule).gradients  # noqa: B023

            elsewhere = errors_at(case, gradients_of, batches, share)
            errors = {name: min(error, elsewhere[name]) for name, error in errors.items()}
    error, tensor = max((error, name) for name, error in errors.items())
    for seed in range(1, SHAKEN + 1):
        if error <= 1 and verdict(loss, own, error) != "right":
            again = Reference(case, batches, torch.float32, seed, wrap=ORTModule)
            loss = min(loss, nearest(again.losses, singles[0], exact))
    return result | {
        "result": verdict(loss, own, error), "loss": loss, "own": own, "gradient": error, "tensor": tensor,
        "seconds": ours.seconds, "torch_seconds": singles[0].seconds,
    }  # fmt: skip
