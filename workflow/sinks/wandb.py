"""A run of Weights & Biases, which every attempt of the run continues."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from ortflow.workflow.sinks.protocol import Run, State
from ortflow.workflow.spec.sinks import WandbSink

STEP = "step"


class Wandb:
    """The sink of a `WandbSink` section. Raises wandb's errors, for example without a key."""

    def __init__(self, section: WandbSink) -> None:
        self._section = section

    def begin(self, run: Run) -> None:
        """Start or continue the run."""
        folder = run.folder / "sinks"
        folder.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=self._section.project,
            entity=self._section.entity,
            mode=self._section.mode,
            id=run.identity,
            name=run.name,
            config=dict(run.settings),
            resume="allow",
            dir=str(folder),
            # Its own reading of the terminal and the machine would be of this process, which trains nothing.
            settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
        )
        # wandb's own step must never fall, and a resumed run repeats steps: then the newer value counts.
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log({**values, STEP: step})

    def end(self, state: State) -> None:
        """Upload what is left; the state is wandb's own."""
        if state == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code={"finished": 0, "preempted": 75, "failed": 1}[state])
        wandb.teardown()
