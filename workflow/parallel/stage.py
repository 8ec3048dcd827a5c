"""What the ranks of a pipeline know of its stages, as plain data.

Written by `ortflow.workflow.assembly.stages`, read by each rank. Must never import ONNX or ONNX Runtime.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


def gradient_of(value: str) -> str:
    """Name of the output of a stage's backward graph for a value that it receives, or a parameter."""
    return f"{value}_grad"


def gradient_from_next(value: str) -> str:
    """Name of the input of a stage's backward graph for a value that it sends."""
    return f"{value}_grad.next"


@dataclass(frozen=True)
class Value:
    """A value that one stage sends to the next."""

    name: str
    dtype: str
    """As numpy names it."""
    gradient: bool
    """The loss's gradient with respect to it comes back."""


@dataclass(frozen=True)
class Stage:
    """One stage of the training and the evaluation graph."""

    number: int
    receives: tuple[Value, ...]
    """Values from the stage before, those that are only passed on included."""
    sends: tuple[Value, ...]
    """Values for the stage behind."""
    passed: tuple[str, ...]
    """Values that it receives and sends without reading them."""
    eval_receives: tuple[Value, ...]
    """As `receives`, of the evaluation graph."""
    eval_sends: tuple[Value, ...]
    eval_passed: tuple[str, ...]
    batch: tuple[str, ...]
    """Inputs and labels of a batch that it reads, `ortflow.valid` and `ortflow.seed` included."""
    tensors: tuple[str, ...]
    """Parameters and running statistics that it holds."""
    trained: tuple[str, ...]
    """Those that it gives a gradient of."""
    dropouts: int
    """Dropout nodes of the earlier stages: by so much a micro-batch's seed differs, so that each node draws what it
    draws in the undivided graph."""


@dataclass(frozen=True)
class StageSet:
    """All stages of a model, and their graphs in the folder `root`."""

    root: Path
    stages: tuple[Stage, ...]
    ranks: int
    """Ranks of the pipeline; rank r has the stages r, r + ranks, r + 2 ranks and so on."""

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return len(self.stages) // self.ranks

    def of_rank(self, rank: int) -> list[Stage]:
        """The stages of a rank of the pipeline, by chunk."""
        return list(self.stages[rank :: self.ranks])

    def tensors_of(self, rank: int) -> list[str]:
        """Parameters and running statistics that a rank of the pipeline holds, each once."""
        return list(dict.fromkeys(name for stage in self.of_rank(rank) for name in stage.tensors))

    def holders(self, *, trained: bool = False) -> dict[str, list[int]]:
        """Tensor -> the ranks of the pipeline that hold it, ascending; with `trained`, that give a gradient of it."""
        found: dict[str, list[int]] = {}
        for rank in range(self.ranks):
            for stage in self.of_rank(rank):
                for name in stage.trained if trained else stage.tensors:
                    ranks = found.setdefault(name, [])
                    if rank not in ranks:
                        ranks.append(rank)
        return found

    def forward(self, stage: int) -> Path:
        """The forward graph of a stage."""
        return self.root / f"stage{stage:02}.forward.onnx"

    def backward(self, stage: int) -> Path:
        """The backward graph of a stage."""
        return self.root / f"stage{stage:02}.backward.onnx"

    def both(self, stage: int) -> Path:
        """Forward and backward pass of the last stage as one graph."""
        return self.root / f"stage{stage:02}.train.onnx"

    @property
    def description(self) -> Path:
        """What `load` reads."""
        return self.root / "stages.json"

    def eval(self, stage: int) -> Path:
        """The stage of the evaluation graph."""
        return self.root / f"stage{stage:02}.eval.onnx"

    def to_bytes(self) -> bytes:
        """The content of `description`."""
        data = {"ranks": self.ranks, "stages": [asdict(stage) for stage in self.stages]}
        return (json.dumps(data, indent=1) + "\n").encode()

    @classmethod
    def load(cls, root: Path) -> StageSet:
        """The set whose `description` lies in `root`; FileNotFoundError if there is none."""
        data = json.loads((root / "stages.json").read_text(encoding="utf-8"))
        return cls(root, tuple(_stage(each) for each in data["stages"]), data["ranks"])


def _stage(data: Mapping[str, Any]) -> Stage:
    lists = ("receives", "sends", "eval_receives", "eval_sends")
    values = {key: _values(data[key]) for key in lists}
    names: dict[str, Sequence[str]] = {
        key: tuple(data[key]) for key in ("passed", "eval_passed", "batch", "tensors", "trained")
    }
    return Stage(number=data["number"], dropouts=data["dropouts"], **values, **names)  # type: ignore[arg-type]


def _values(rows: Iterable[Mapping[str, Any]]) -> tuple[Value, ...]:
    return tuple(Value(**row) for row in rows)
