"""One architecture of the zoo: its module, its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ortflow.workflow.spec.model import Loss

Batch = dict[str, npt.NDArray[np.generic]]

BATCH = 4


@dataclass(frozen=True)
class Case:
    """A small architecture. `batch` draws the inputs of `forward`, and `labels`."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator, int], Batch]
    loss: Loss
    labels: tuple[str, ...] = ()
    """Inputs of `forward` that are labels."""
    free: tuple[str, ...] = ()
    """Glob patterns of what the loss does not depend on: Adam makes steps of the rounding in its gradient, and so
    PyTorch itself ends elsewhere with another number of threads."""

    def is_free(self, name: str) -> bool:
        """Whether the loss does not depend on the tensor."""
        return any(fnmatch(name, pattern) for pattern in self.free)

    def module(self) -> nn.Module:
        """The module in training mode, the same weights each time."""
        torch.manual_seed(3)
        return self.build().train()

    def batches(self, count: int, size: int = BATCH) -> Iterator[Batch]:
        """The same batches each time."""
        generator = np.random.default_rng(5)
        for _ in range(count):
            yield self.batch(generator, size)

    def example(self) -> dict[str, torch.Tensor]:
        """Inputs for the export, in a batch of another size than in training."""
        (batch,) = self.batches(1, BATCH - 1)
        return {name: torch.from_numpy(v) for name, v in batch.items() if name != "labels" or name in self.labels}

    def torch_loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """PyTorch's own loss of a batch, on the module's device."""
        device = next(module.parameters()).device
        tensors = {name: torch.from_numpy(value).to(device) for name, value in batch.items()}
        if self.loss.kind == "output":
            return module(**tensors).loss
        labels = tensors.pop("labels")
        output = module(**tensors)
        output = getattr(output, "logits", output)
        if self.loss.kind == "cross_entropy":
            logits = output.movedim(self.loss.class_axis, -1)
            return nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]),
                labels.reshape(-1),
                ignore_index=self.loss.ignore_index,
                label_smoothing=self.loss.label_smoothing,
            )
        if self.loss.kind == "bce_with_logits":
            return nn.functional.binary_cross_entropy_with_logits(output, labels)
        return {"mse": nn.functional.mse_loss, "l1": nn.functional.l1_loss}[self.loss.kind](output, labels)
