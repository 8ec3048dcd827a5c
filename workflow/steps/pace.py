"""Where a run is in the units of its schedule, and the learning rate there. Called by step `train`."""

from __future__ import annotations

from ortflow.workflow.errors import UserError
from ortflow.workflow.optim.average import average_rate
from ortflow.workflow.optim.schedule import learning_rate
from ortflow.workflow.run.durations import parse_duration
from ortflow.workflow.run.pace import Pace, pace_of_run
from ortflow.workflow.spec.schedules import units
from ortflow.workflow.spec.train import TrainSection
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.run_plan import Plan


def pace_of(context: Context) -> Pace:
    """The pace of the next step."""
    progress, plan = context.progress, context.plan
    return pace_of_run(
        step=progress.step,
        epoch=progress.epoch,
        sample=progress.sample,
        samples=plan.samples,
        steps_per_epoch=plan.steps_per_epoch,
        global_batch=plan.global_batch,
        tokens_per_sample=context.stream.tokens_per_sample,
    )


def rate_of(context: Context, total: int) -> float:
    """The learning rate of the next step, of a run of `total` steps."""
    section, progress = context.spec.train, context.progress
    return learning_rate(
        section.schedule, section.optimizer.lr, progress.step + 1, total,
        pace=pace_of(context), reductions=progress.plateau_reductions,
    )  # fmt: skip


def average_of(context: Context) -> tuple[float, bool]:
    """How much of the next step's weights goes into their average, and whether they are one more of those in it."""
    section = context.spec.train.average
    return (0.0, False) if section is None else average_rate(section, pace_of(context), context.progress.averaged)


def late_groups(train: TrainSection, plan: Plan, tokens_per_sample: int | None) -> list[str]:
    """A message for each group that stays frozen until the run has ended. Pure."""
    start = pace_of_run(
        step=0, epoch=0, sample=0, samples=plan.samples, steps_per_epoch=plan.steps_per_epoch,
        global_batch=plan.global_batch, tokens_per_sample=tokens_per_sample,
    )  # fmt: skip
    messages = []
    for place, group in enumerate(train.groups):
        until = None if group.frozen_until is None else parse_duration(group.frozen_until)
        if until is not None and until.unit in start.per_step and start.length(until) >= plan.total_steps:
            messages.append(
                f"train.groups[{place}].frozen_until is {until}, and the run ends after {plan.total_steps} steps: its"
                " parameters are never trained; shorten it, or use model.parameters.freeze"
            )
    return messages


def check_units(context: Context) -> None:
    """Raise UserError if the schedule counts tokens and samples have no fixed number of them."""
    train = context.spec.train
    counted = units(train.schedule)
    counted |= {parse_duration(group.frozen_until).unit for group in train.groups if group.frozen_until is not None}
    if train.average is not None:
        counted |= {parse_duration(text).unit for text in (train.average.start, train.average.every) if text}
    if "tokens" in counted and context.stream.tokens_per_sample is None:
        raise UserError(
            "has a duration in tokens (schedule or groups), and samples have no fixed number of them: no label has "
            "one class per token, or its length varies",
            where="train",
            fix="give durations in steps, epochs or samples",
        )
