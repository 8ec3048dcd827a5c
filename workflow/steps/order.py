"""The seven steps of a rank that trains with a trainer of ortflow, in their order. Imports what they need."""

from __future__ import annotations

from ortflow.workflow.run.engine import Step
from ortflow.workflow.steps.checkpoint import checkpoint
from ortflow.workflow.steps.configure import configure
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.export import export
from ortflow.workflow.steps.monitor import monitor
from ortflow.workflow.steps.runtime import runtime
from ortflow.workflow.steps.shard import shard
from ortflow.workflow.steps.train import train

STEPS: tuple[Step[Context], ...] = (
    Step("configure", configure),
    Step("runtime", runtime),
    Step("shard", shard),
    Step("train", train),
    Step("checkpoint", checkpoint, recurs=True),
    Step("monitor", monitor, recurs=True),
    Step("export", export),
)
