"""What all parts of a trainer share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Device
from ortflow.workflow.graph.types import GraphSet, synced_of
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report


@dataclass(frozen=True)
class StepContext:
    """The run of one rank."""

    graphs: GraphSet
    """Of what this rank holds."""
    spec: TrainerRunSpec
    sessions: Sessions
    replicas: Communicator
    """The ranks that hold the same, or shares of the same; without a divided model all ranks."""
    report: Report

    @property
    def index(self) -> FlatIndex:
        """Where tensors lie in the flat buffers."""
        return self.graphs.index

    @property
    def device(self) -> Device:
        """Of this rank."""
        return self.sessions.device

    @property
    def train_graph(self) -> Path:
        """The training graph of a step; that of the check has the statistics of one rank."""
        return synced_of(self.graphs.train) if self.spec.synced_ranks else self.graphs.train
