"""Step 6: reports progress. Events of every rank; TensorBoard scalars and log lines of rank 0.

Called throughout `train`; its own turn closes the files. It only reports: nothing here may change a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortflow.workflow.memory import peak, resident, with_peak
from ortflow.workflow.parallel.timeline import bubble_by_formula
from ortflow.workflow.run.events import warn
from ortflow.workflow.run.tensorboard_scalars import ScalarLog
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.save_period import save_message
from ortflow.workflow.trainer import EvaluationOutcome, StepOutcome
from ortflow.workflow.trainer_protocol.capabilities import Measuring, Pipelined

SCALARS_SECONDS = 5.0
"""Whose scalars are written together: TensorBoard itself reads every five seconds at most."""
USAGE_SECONDS = 10.0
"""Between two measurements of a rank's memory."""
STEP_SCALARS = ("loss", "lr", "grad_norm", "samples_per_second")
"""Scalars of each step, in the order of their values."""


def step_fields(row: tuple[Any, ...]) -> dict[str, Any]:
    """The fields of the event of a step; called when it is written. Pure."""
    step, loss, lr, norm, seconds, samples, epoch, tokens, data_seconds, comm_seconds = row
    fields = {
        "step": step, "loss": loss, "lr": lr, "grad_norm": norm, "seconds": round(seconds, 6), "samples": samples,
        "epoch": epoch,
    }  # fmt: skip
    if tokens is not None:
        fields["tokens"] = tokens
    if data_seconds is not None:
        fields["data_seconds"] = round(data_seconds, 6)
    if comm_seconds is not None:
        fields["comm_seconds"] = round(comm_seconds, 6)
    return fields


def usage(context: Context) -> dict[str, int]:
    """Bytes of this rank's memory now and at most so far, and of its device's."""
    device = context.trainer.device_memory() if isinstance(context.trainer, Measuring) else {}
    return {"resident": resident(), "peak": peak(), **device}


class Monitor:
    """Where a run's metrics are written."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._every = context.spec.monitor.every_steps
        self._writer: ScalarLog | None = None
        self._measured: float | None = None
        self.seconds: float | None = None
        """Duration of the steps after the first of this attempt; None before it."""

    def begin(self) -> None:
        """Report what changed since the previous attempt, and open TensorBoard's file.

        Scalars of steps that will be repeated are purged from it.
        """
        context = self._context
        if context.leads:
            self._changes()
        if context.leads and context.spec.monitor.tensorboard:
            folder = context.run_dir.root / context.spec.monitor.tensorboard_directory
            self._writer = ScalarLog(folder, purge=context.progress.step + 1, period=SCALARS_SECONDS)

    def _changes(self) -> None:
        """Copy the run file's changes that the launcher found into this record."""
        context, plan = self._context, self._context.plan
        for record in context.run_dir.read_attempts():
            if record.get("event") == "changed" and record.get("attempt") == context.attempt:
                for change in record.get("changes", ()):
                    context.events.write("changed", **change)
                for note in record.get("notes", ()):
                    print(note, flush=True)
        ranks_per_replica = plan.world_size // plan.replicas
        sharers = (
            f"{plan.replicas} rank(s)"
            if ranks_per_replica == 1
            else f"{plan.replicas} replica(s) of {ranks_per_replica} ranks"
        )
        print(
            f"a step takes {plan.global_batch} samples: {sharers} x micro_batch {plan.micro_batch} "
            f"x gradient_accumulation {plan.gradient_accumulation}",
            flush=True,
        )
        print(save_message(context.spec.checkpoint), flush=True)

    def step(
        self, outcome: StepOutcome, *, lr: float, seconds: float, epoch: int, tokens: int | None,
        data_seconds: float | None = None, comm_seconds: float | None = None,
    ) -> None:  # fmt: skip
        """Report a training step; `tokens` over all ranks, if the model has tokens; the last two if measured."""
        context, step = self._context, self._context.progress.step
        self.seconds = 0.0 if self.seconds is None else self.seconds + seconds
        if outcome.skipped is not None:
            context.events.write("skipped_step", step=step, reason=outcome.skipped)
        loss, norm, samples = outcome.loss, outcome.grad_norm, outcome.samples
        row = (step, loss, lr, norm, seconds, samples, epoch, tokens, data_seconds, comm_seconds)
        context.events.write_soon("step", row, step_fields)
        now = context.clock.monotonic()
        if self._measured is None or now - self._measured >= USAGE_SECONDS:
            self._measured = now
            context.events.write("usage", step=step, **usage(context))
        speed = samples / seconds
        if self._writer is not None:
            self._writer.add_row(step, STEP_SCALARS, (loss, lr, norm, speed))
        if context.leads and (step % self._every == 0 or outcome.skipped):
            skipped = f"  skipped: {outcome.skipped}" if outcome.skipped else ""
            print(
                f"step {step}/{context.plan.total_steps}  loss {outcome.loss:.4f}  lr {lr:.3g}  "
                f"|g| {outcome.grad_norm:.3f}  {speed:.0f} samples/s{skipped}",
                flush=True,
            )

    def evaluation(self, outcome: EvaluationOutcome, samples: int, seconds: float) -> None:
        """Report the result of the evaluation set."""
        context, step, metrics = self._context, self._context.progress.step, outcome.metrics
        average = context.spec.train.average
        context.events.write(
            "evaluation", step=step, samples=samples, seconds=round(seconds, 6),
            **({} if average is None else {"weights": average.name}), **metrics, **outcome.tables,
        )  # fmt: skip
        self._scalars(step, {f"eval/{name}": value for name, value in metrics.items()})
        if context.leads:
            values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            of = "" if average is None else f" of the {average.name.upper()} weights"
            print(f"evaluation{of} at step {step}  {values}", flush=True)

    def stall(self, step: int, seconds: float) -> None:
        """Report that training waited for a checkpoint."""
        self._scalars(step, {"checkpoint_stall_seconds": seconds})
        self.flush()  # a run that resumes from this checkpoint does not report it again

    def warn(self, message: str) -> None:
        """Report a problem that a person should know of and that does not end the run."""
        warn(self._context.events, message)

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            self._writer.add(step, values)

    def flush(self) -> None:
        """Write all scalars: what a checkpoint has behind it is not repeated."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close TensorBoard's file, however the run ends."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def monitor(context: Context) -> None:
    """The step's own turn: report the total times, and close the record."""
    measuring = context.trainer if isinstance(context.trainer, Measuring) else None
    components, device = (dict(measuring.memory()), measuring.device_memory()) if measuring else ({}, {})
    if "checkpoint" in components:
        components["checkpoint"] += context.saver.more_copied
    parts = with_peak(components, peak(), device)
    context.events.write("usage", step=context.progress.step, **usage(context))
    context.events.write("memory", **parts)
    if context.leads:
        print("memory: " + ", ".join(f"{name} {count / 1e6:.0f} MB" for name, count in parts.items()), flush=True)
    report_waits(context)
    report_data_wait(context)
    context.monitor.close()


SLOW_DATA, LONG = 0.03, 1.0
"""Share of the steps' time, and seconds, from which on a wait for samples is printed."""


def report_data_wait(context: Context) -> None:
    """Report the share of the steps' time in which they waited for samples."""
    seconds, waited = context.monitor.seconds, context.stream.waited
    if not seconds:
        return
    share = min(1.0, waited / seconds)
    context.events.write("data_wait", seconds=round(waited, 6), share=round(share, 6))
    if context.leads and share >= SLOW_DATA and waited >= LONG:
        print(
            f"data wait {share:.0%} of the step: reading samples took {waited:.1f} s longer than the steps; raise "
            "data.workers, give the ranks more cores, or convert the data",
            flush=True,
        )


def report_waits(context: Context) -> None:
    """Rank 0 reports the fraction of the passes' time in which the ranks of a pipeline waited; called by all ranks."""
    seconds = context.trainer.pass_seconds() if isinstance(context.trainer, Pipelined) else None
    measurements = context.world.gather(seconds)
    if measurements is None or None in measurements:
        return
    busy, durations = zip(*measurements, strict=True)
    # The rank that ends last shows how long the passes of all took.
    idle = 1 - sum(busy) / len(busy) / max(durations)
    spec = context.spec
    formula = bubble_by_formula(spec.parallel.pipeline, spec.accumulation, spec.parallel.chunks)
    context.events.write(
        "pipeline", idle=round(idle, 6), formula=round(formula, 6),
        busy_seconds=[round(rank_seconds, 6) for rank_seconds in busy], seconds=round(max(durations), 6),
    )  # fmt: skip
    shares = ", ".join(f"{rank_seconds / max(durations):.0%}" for rank_seconds in busy)
    print(
        f"pipeline: ranks waited {idle:.0%} of the passes' time, and {formula:.0%} by the formula for equal stages; "
        f"they computed for {shares}",
        flush=True,
    )
