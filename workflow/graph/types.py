"""The result of step `configure` for a model: the graphs on disk and everything known about them, as plain data.

Written by `assembly`, read by every rank and by the export. Must never import ONNX or ONNX Runtime.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.run.rundir import write_atomically

LOSS_SUM = "ortflow.loss_sum"
"""Output, fp32 []: the loss of the micro-batch, summed over everything that counts."""
LOSS_WEIGHT = "ortflow.loss_weight"
"""Output, fp32 []: how much counts (labels, elements or samples)."""
VALID = "ortflow.valid"
"""Input, int64 [1], of padded graphs: only this many leading rows of the batch count."""
SEED = "ortflow.seed"
"""Input, int64 [1], of graphs with random operators: the seed."""

LOSS_SCALE = "ortflow.loss_scale"
"""Input, fp32 [1], of training graphs in fp16: the factor of the loss's gradient, and so of all others."""


SYNCED = Path("synced.onnx")
"""The training graph whose BatchNormalization runs over all ranks (`train.sync_batch_norm`), in the folder of a set."""


def synced_of(graph: Path) -> Path:
    """Path of SYNCED beside the training graph."""
    return graph.with_name(SYNCED.name)


@dataclass(frozen=True)
class GraphSet:
    """The graphs of a run. The files are in `root`."""

    root: Path
    index: FlatIndex
    """Position of each parameter and state tensor in the flat buffers."""
    inputs: tuple[BatchInput, ...]
    """The inputs that a batch provides, labels last."""
    notes: tuple[str, ...] = ()
    """Log lines: what was switched on, expanded or frozen."""
    warnings: tuple[str, ...] = ()
    """Warnings about the model."""
    vocabulary: Mapping[str, int] = field(default_factory=dict)
    """Input name -> exclusive upper bound of its values: rows of the table it indexes, or classes of a label."""
    metrics: tuple[str, ...] = ()
    """Metrics with outputs `ortflow.<metric>_sum` and `ortflow.<metric>_weight` in the evaluation graph."""
    padded: bool = False
    """Whether the graphs have the input `ortflow.valid`."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Input name -> length of its samples, where all have one and the model does not say it."""
    user_optimizer_graph: bool = False
    """Whether `optimizer.onnx` is the user's own."""
    unproved_logits: str = ""
    """Output that the loss reads as logits, and that may be probabilities as far as the nodes show."""

    @property
    def train(self) -> Path:
        """Forward and backward pass: loss, gradients, new state."""
        return self.root / "train.onnx"

    @property
    def eval(self) -> Path:
        """Forward pass in evaluation mode: loss and metrics."""
        return self.root / "eval.onnx"

    @property
    def infer(self) -> Path:
        """The model to export, without its parameters."""
        return self.root / "infer.onnx"

    @property
    def initial(self) -> Path:
        """Every parameter and state tensor as in the model file, fp32."""
        return self.root / "initial.safetensors"

    @property
    def state_dict(self) -> Path:
        """PyTorch's names of the tensors (`ortflow.workflow.weights.kept`); it may not exist."""
        return self.root / "state_dict.safetensors"

    @property
    def optimizer(self) -> Path:
        """The optimizer's update of flat segments, ortflow's or the user's own."""
        return self.root / "optimizer.onnx"

    @property
    def gradient(self) -> Path:
        """Scales and clips the flat gradients."""
        return self.root / "gradient.onnx"

    def elements(self, rows: int) -> dict[str, int]:
        """Input name -> elements of a micro-batch of so many samples, where that is known."""
        counts = {}
        for batch_input in self.inputs:
            open_axes = batch_input.shape[1:].count(None)
            length = self.lengths.get(batch_input.name)
            if open_axes > (length is not None):
                continue
            counts[batch_input.name] = rows * prod(length or 0 if dim is None else dim for dim in batch_input.shape[1:])
        return counts

    def to_json(self) -> dict[str, Any]:
        """The set as JSON-serialisable data, without its folder."""
        return {
            "index": self.index.to_json(),
            "inputs": [{"name": i.name, "dtype": i.dtype, "shape": list(i.shape), "role": i.role} for i in self.inputs],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "vocabulary": dict(self.vocabulary),
            "metrics": list(self.metrics),
            "padded": self.padded,
            "lengths": dict(self.lengths),
            "user_optimizer_graph": self.user_optimizer_graph,
            "unproved_logits": self.unproved_logits,
        }

    def save(self) -> None:
        """Write graphs.json: the last of all files, so that a folder that has it is complete."""
        write_atomically(self.root / "graphs.json", (json.dumps(self.to_json(), indent=1) + "\n").encode())

    @classmethod
    def load(cls, root: Path) -> GraphSet:
        """The set that `build_graphs` wrote to `root`. Raises FileNotFoundError if there is none."""
        data = json.loads((root / "graphs.json").read_text(encoding="utf-8"))
        return cls(
            root=root,
            index=FlatIndex.from_json(data["index"]),
            inputs=tuple(BatchInput(i["name"], i["dtype"], tuple(i["shape"]), i["role"]) for i in data["inputs"]),
            notes=tuple(data["notes"]),
            warnings=tuple(data.get("warnings", ())),
            vocabulary=data["vocabulary"],
            metrics=tuple(data["metrics"]),
            padded=data["padded"],
            lengths=data.get("lengths", {}),
            user_optimizer_graph=data["user_optimizer_graph"],
            unproved_logits=data.get("unproved_logits", ""),
        )
