"""Step 4: the loop. Micro-batches, gradient all-reduce, update, schedule, periodic evaluation.

Uses the trainer only through its protocol. At every step the ranks agree, by control values in the one all-reduce,
whether any was asked to exit and whether a checkpoint is due. Where the trainer can, the passes of the next step begin
before that is known (`ahead`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile

from ortflow.workflow.comm import first_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.strike import strike_of
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.spec.train import EarlyStop
from ortflow.workflow.steps.ahead import Ahead
from ortflow.workflow.steps.best import improves
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.early_stop import judge, still_stopped, watched
from ortflow.workflow.steps.not_finite import (
    cause_in_evaluation,
    in_micro_batches,
    infinite_ctc,
    is_comparable,
    is_finite,
)
from ortflow.workflow.steps.pace import average_of, check_units, pace_of, rate_of
from ortflow.workflow.steps.plateau import judge_plateau
from ortflow.workflow.steps.profile import profiler_of
from ortflow.workflow.steps.run_plan import total_steps
from ortflow.workflow.steps.usable import check_usable
from ortflow.workflow.trainer import EvaluationOutcome
from ortflow.workflow.trainer_protocol.capabilities import Paced, exchange_average


def train(context: Context) -> None:
    """Train from the newest checkpoint to the end, or until the run is asked to exit.

    Raises Preempted if asked to exit, with everything saved; UserError if too many consecutive steps gave a loss or
    gradient that is NaN or infinite, or if nothing usable was trained.
    """
    rule, progress = context.spec.train.early_stop, context.progress
    progress.stopped_early = still_stopped(rule, progress, watched(rule, context.spec.data) if rule else "")
    check_units(context)
    total = total_of(context)
    ahead = Ahead(context, lambda step: step >= total or evaluation_due(context, step))
    strike = strike_of(context.place.rank, context.attempt)
    profiler = profiler_of(context, total)
    stopping = evaluation_pending(context, total) and not evaluate(context)
    while not stopping and not finished(context, total):
        if profiler is not None:
            profiler.before(progress.step + 1)
        stopping = one_step(context, ahead, total)
        if not stopping and evaluation_pending(context, total):
            stopping = not evaluate(context)
        if context.saver.due and not stopping:
            with context.engine.within("checkpoint"):
                context.saver.save()
        if profiler is not None:
            profiler.after(progress.step)
        if strike is not None:
            strike.after(progress.step, saved=context.saver.saves > 0)
    if profiler is not None:
        profiler.end(progress.step)
    if stopping:
        with context.engine.within("checkpoint"):
            saved = context.saver.save_and_wait()
        context.leave(context.stop.reason or "another rank", saved=saved)
    check_usable(context)


def total_of(context: Context) -> int:
    """Steps of the whole run, from its current position."""
    progress = context.progress
    return total_steps(context.plan, context.spec, step=progress.step, epoch=progress.epoch, sample=progress.sample)


def finished(context: Context, total: int) -> bool:
    """Whether training is complete."""
    return context.progress.step >= total or context.progress.stopped_early


def one_step(context: Context, ahead: Ahead, total: int) -> bool:
    """Run one optimizer step. Returns whether any rank was asked to exit."""
    spec, progress = context.spec, context.progress
    work = ahead.take()
    calls = call_seconds(context)
    batch, lr = work.batch, rate_of(context, total)
    rate, counts = average_of(context)
    if spec.train.average is not None or any(group.frozen_until for group in spec.train.groups):
        assert isinstance(context.trainer, Paced)
        context.trainer.at(pace_of(context), rate)
    outcome = context.trainer.step(
        batch.micro_batches,
        learning_rate=lr,
        update=progress.updates + 1,
        seeds=work.seeds,
        control_values=work.control_values,
    )
    seconds, epoch = ahead.seconds(), progress.epoch
    progress.step += 1
    if (observe := context.engine.observer) is not None:
        now = context.clock.monotonic()
        observe(f"step {progress.step}", now - seconds, now)
        if work.data_seconds is not None:
            observe("data wait", now - seconds, now - seconds + work.data_seconds)
    progress.epoch, progress.sample = batch.next.epoch, batch.next.sample
    if outcome.skipped is None:
        progress.updates += 1
        progress.averaged += counts
        progress.skipped_in_a_row = 0
    else:
        progress.skipped += 1
        # An overflow only shows that the loss scale is too large, and lowers it.
        progress.skipped_in_a_row += not outcome.overflow
    with context.engine.within("monitor"):
        tokens = context.stream.tokens(batch, outcome.samples)
        context.monitor.step(
            outcome, lr=lr, seconds=seconds, epoch=epoch, tokens=tokens, data_seconds=work.data_seconds,
            comm_seconds=None if calls is None else (call_seconds(context) or calls) - calls,
        )  # fmt: skip
    if progress.skipped_in_a_row >= spec.train.max_skipped_steps:
        in_data = bool(in_micro_batches(batch.micro_batches))
        raise unusable_gradient(context, outcome.skipped or "", in_data=in_data)
    with context.engine.within("checkpoint"):
        context.saver.count(outcome.control_values[1:].tolist(), work.saves)
    return bool(outcome.control_values[0] > 0)


def call_seconds(context: Context) -> float | None:
    """Seconds in calls to other ranks so far; None where a device exchanges data, and the host does not wait for it."""
    seconds: float | None = getattr(context.world, "call_seconds", None)
    return seconds if context.environment.get("device") == "cpu" else None


def unusable_gradient(context: Context, reason: str, *, in_data: bool) -> UserError:
    """The error of a run in which too many consecutive steps were skipped. Collective.

    `in_data` says whether this rank's samples of the last step contain NaN or infinity.
    """
    sample = first_of(context.world, context.stream.first_not_finite() if in_data else None)
    ctc = infinite_ctc(context.spec, reason)
    message = f"{context.progress.skipped_in_a_row} steps in a row had no usable gradient, the last because {reason}"
    return UserError(
        f"{message}; {sample}" if sample else message,
        where=f"step {context.progress.step}",
        fix="convert the data without such values"
        if sample
        else ctc or "lower train.optimizer.lr, lengthen train.schedule.warmup_steps or set train.clip_norm",
    )


def evaluation_pending(context: Context, total: int) -> bool:
    """Whether an evaluation is due after the last step."""
    step = context.progress.step
    if context.spec.data.eval is None or step == 0 or context.progress.evaluated_step >= step:
        return False
    return finished(context, total) or evaluation_due(context, step)


def evaluation_due(context: Context, step: int) -> bool:
    """Whether the run file requests an evaluation after a step for the step's number."""
    every = context.spec.train.evaluation.every_steps
    return context.spec.data.eval is not None and every is not None and step % every == 0


def evaluate(context: Context) -> bool:
    """Run the evaluation set. Returns False if a rank was asked to exit, so that there is no result."""
    start = context.clock.monotonic()
    exchange_average(context.trainer, context.spec)
    outcomes: list[EvaluationOutcome] = []
    names = [None, *context.spec.data.eval_sets]
    for name in names:
        batches = takewhile(lambda batch: not context.stop, context.stream.evaluation(name))
        outcomes.append(context.trainer.evaluate(batches, lambda: [float(bool(context.stop))]))
        if outcomes[-1].control_values[0] > 0:
            break
    exchange_average(context.trainer, context.spec)
    if outcomes[-1].control_values[0] > 0:
        return False
    outcome, *other_outcomes = outcomes
    results, tables = dict(outcome.metrics), dict(outcome.tables)
    for name, other in zip(context.spec.data.eval_sets, other_outcomes, strict=True):
        results |= {f"{name}/{key}": value for key, value in other.metrics.items()}
        tables |= {f"{name}/{key}": table for key, table in other.tables.items()}
    copies = context.spec.replicas if context.spec.data.eval_mode == "replicated" else 1
    # Every copy counts the same samples: quotients are those of one, counts are not.
    counts = {name: [[count // copies for count in row] for row in table] for name, table in tables.items()}
    combined = replace(outcome, metrics=results, tables=counts)
    progress = context.progress
    progress.evaluated_step = progress.step
    if context.engine.observer is not None:
        context.engine.observer("evaluation", start, context.clock.monotonic())
    with context.engine.within("monitor"):
        context.monitor.evaluation(combined, outcome.samples // copies, context.clock.monotonic() - start)
    if not is_finite(combined):
        _report_not_finite(context, outcome, combined)
    _judge_schedule(context, combined)
    rule = context.spec.train.early_stop
    metrics = context.spec.model.metrics if context.spec.model is not None else ()
    best = context.spec.checkpoint.best
    if best is not None and improves(best, progress, results, watched(best, context.spec.data), metrics):
        context.saver.request()
    measure = watched(rule, context.spec.data) if rule is not None else ""
    comparable = rule is not None and is_comparable(results, rule.metric)
    if rule is not None and comparable and judge(rule, progress, results[rule.metric], measure, metrics):
        progress.stopped_early = True
        context.events.write(
            "early_stop",
            step=progress.step,
            metric=rule.metric,
            best=progress.best_metric,
            best_step=progress.best_step,
        )
    return True


def _judge_schedule(context: Context, outcome: EvaluationOutcome) -> None:
    """Decay the learning rate of reduce_on_plateau if the evaluation did not improve."""
    schedule, progress = context.spec.train.schedule, context.progress
    if schedule.name != "reduce_on_plateau" or schedule.pieces or not is_comparable(outcome.metrics, schedule.metric):
        return
    measure = watched(EarlyStop(metric=schedule.metric), context.spec.data)
    metrics = context.spec.model.metrics if context.spec.model is not None else ()
    if judge_plateau(schedule, progress, outcome.metrics[schedule.metric], measure, metrics):
        lr = rate_of(context, context.plan.total_steps)
        context.events.write(
            "lr_reduced", step=progress.step, metric=schedule.metric, best=progress.plateau_best, lr=lr
        )


def _report_not_finite(context: Context, first: EvaluationOutcome, combined: EvaluationOutcome) -> None:
    """Say which results of an evaluation are NaN or infinite, and at which sample of the first set. Collective."""
    cause = f": {cause_in_evaluation(context, first)}" if not is_finite(first) else ""
    if context.leads:
        values = ", ".join(f"{name} {value}" for name, value in combined.metrics.items() if not math.isfinite(value))
        ignoring = [key for key, name in watching(context.spec).items() if not is_comparable(combined.metrics, name)]
        unused = f"; {', '.join(ignoring)} {'do' if len(ignoring) > 1 else 'does'} not use it" if ignoring else ""
        context.monitor.warn(f"the evaluation at step {context.progress.step} has {values}{cause}{unused}")


def watching(spec: TrainerRunSpec) -> dict[str, str]:
    """The result that each key of the run file compares over evaluations."""
    schedule, best, rule = spec.train.schedule, spec.checkpoint.best, spec.train.early_stop
    return {
        **({"schedule": schedule.metric} if schedule.name == "reduce_on_plateau" and not schedule.pieces else {}),
        **({"early_stop": rule.metric} if rule is not None else {}),
        **({"checkpoint.best": best.metric} if best is not None else {}),
    }
