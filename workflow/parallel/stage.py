"""What the ranks of a pipeline know of its stages, as plain data.

Written by `ortflow.workflow.assembly.stages`, read by each rank. Must never import ONNX or ONNX Runtime.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FP32, HALF = "stage", "half_stage"
"""Prefixes of a `StageSet`'s files. Stages in half precision may pass on other values."""


def gradient_of(value: str) -> str:
    """Name of the output of a stage's backward graph for the gradient of a received value, or of a parameter."""
    return f"{value}_grad"


def gradient_from_next(value: str) -> str:
    """Name of the input of a stage's backward graph for the gradient of a sent value."""
    return f"{value}_grad.next"


@dataclass(frozen=True)
class Value:
    """A value that one stage sends to the next."""

    name: str
    dtype: str
    """As a numpy name."""
    gradient: bool
    """Whether the loss's gradient with respect to it is sent back."""


@dataclass(frozen=True)
class Cost:
    """The cost of a stage's forward pass over a micro-batch, as it was known when the model was cut."""

    operations: int
    """Counted."""
    seconds: float | None
    """Measured; None if they were not."""
    sent: int
    """Bytes of the activations that it sends."""


@dataclass(frozen=True)
class Stage:
    """One stage of the training and the evaluation graph."""

    number: int
    receives: tuple[Value, ...]
    """Values from the previous stage, including those that are only passed on."""
    sends: tuple[Value, ...]
    """Values for the next stage."""
    passed: tuple[str, ...]
    """Values that it receives and sends without reading them."""
    eval_receives: tuple[Value, ...]
    """Like `receives`, for the evaluation graph."""
    eval_sends: tuple[Value, ...]
    eval_passed: tuple[str, ...]
    batch: tuple[str, ...]
    """Inputs and labels of a batch that it reads, `ortflow.valid` and `ortflow.seed` included."""
    tensors: tuple[str, ...]
    """Parameters and running statistics that it holds."""
    trained: tuple[str, ...]
    """Parameters for which it computes a gradient."""
    dropouts: int
    """Number of Dropout nodes in earlier stages: an offset to the seed of a micro-batch, so that each node draws the
    same mask as in the undivided graph.
    """
    cost: Cost | None = None
    """None in half precision, and in sets of earlier versions."""


@dataclass(frozen=True)
class StageSet:
    """All stages of a model, and their graphs in the folder `root`."""

    root: Path
    stages: tuple[Stage, ...]
    ranks: int
    """Ranks of the pipeline; rank r has the stages r, r + ranks, r + 2 ranks and so on."""
    prefix: str = FP32
    """Beginning of the names of its files."""

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return len(self.stages) // self.ranks

    def of_rank(self, rank: int) -> list[Stage]:
        """The stages of a rank of the pipeline, by chunk."""
        return list(self.stages[rank :: self.ranks])

    def tensors_of(self, rank: int) -> list[str]:
        """Parameters and running statistics that a rank of the pipeline holds, each once."""
        return list(dict.fromkeys(name for stage in self.of_rank(rank) for name in stage.tensors))

    def holders(self, *, trained: bool = False) -> dict[str, list[int]]:
        """Tensor -> the ranks of the pipeline that hold it, ascending. With `trained`, only ranks that compute its
        gradient.
        """
        holders: dict[str, list[int]] = {}
        for rank in range(self.ranks):
            for stage in self.of_rank(rank):
                for name in stage.trained if trained else stage.tensors:
                    ranks = holders.setdefault(name, [])
                    if rank not in ranks:
                        ranks.append(rank)
        return holders

    def forward(self, stage: int) -> Path:
        """The forward graph of a stage."""
        return self.root / f"{self.prefix}{stage:02}.forward.onnx"

    def backward(self, stage: int) -> Path:
        """The backward graph of a stage."""
        return self.root / f"{self.prefix}{stage:02}.backward.onnx"

    def both(self, stage: int) -> Path:
        """Forward and backward pass of the last stage as one graph."""
        return self.root / f"{self.prefix}{stage:02}.train.onnx"

    @property
    def description(self) -> Path:
        """Path of the file that `load` reads."""
        return self.root / f"{self.prefix}s.json"

    def eval(self, stage: int) -> Path:
        """The stage of the evaluation graph."""
        return self.root / f"{self.prefix}{stage:02}.eval.onnx"

    def to_bytes(self) -> bytes:
        """Content of the file `description`."""
        data = {"ranks": self.ranks, "stages": [asdict(stage) for stage in self.stages]}
        return (json.dumps(data, indent=1) + "\n").encode()

    @classmethod
    def load(cls, root: Path, prefix: str = FP32) -> StageSet:
        """Load the set from folder `root`. Raises FileNotFoundError if there is none."""
        data = json.loads((root / f"{prefix}s.json").read_text(encoding="utf-8"))
        return cls(root, tuple(_stage(stage) for stage in data["stages"]), data["ranks"], prefix)


def _stage(data: Mapping[str, Any]) -> Stage:
    lists = ("receives", "sends", "eval_receives", "eval_sends")
    values = {key: _values(data[key]) for key in lists}
    names: dict[str, Sequence[str]] = {
        key: tuple(data[key]) for key in ("passed", "eval_passed", "batch", "tensors", "trained")
    }
    cost = Cost(**data["cost"]) if data.get("cost") else None
    return Stage(number=data["number"], dropouts=data["dropouts"], cost=cost, **values, **names)  # type: ignore[arg-type]


def _values(rows: Iterable[Mapping[str, Any]]) -> tuple[Value, ...]:
    return tuple(Value(**row) for row in rows)
