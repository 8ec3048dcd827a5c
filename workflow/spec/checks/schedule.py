"""Rules of `train.schedule`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.durations import Duration, parse_duration
from ortflow.workflow.spec.checks.objective import watched
from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.spec.schedules import SHAPES, Schedule, SchedulePiece, durations

PATH: KeyPath = ("train", "schedule")


def check_schedule(spec: TrainerRunSpec) -> Iterator[Problem]:
    """Report durations that are none, keys that a shape does not read, and pieces that do not follow each other."""
    schedule, unreadable = spec.train.schedule, False
    for path, text in durations(schedule):
        try:
            parse_duration(text)
        except UserError as error:
            unreadable = True
            yield Problem((*PATH, *path), error.what, error.fix)
    if unreadable:
        return
    yield from _length(spec)
    if schedule.pieces:
        yield from _pieces(schedule)
        for place, piece in enumerate(schedule.pieces):
            yield from _shape(piece, (*PATH, "pieces", place))
    else:
        yield from _shape(schedule, PATH)
        if schedule.lasts is not None:
            yield Problem((*PATH, "lasts"), "is for a piece of train.schedule.pieces", "remove it")
    if schedule.name == "reduce_on_plateau" and not schedule.pieces:
        yield from _plateau(spec)


def _length(spec: TrainerRunSpec) -> Iterator[Problem]:
    schedule, steps = spec.train.schedule, spec.train.steps
    key, related_keys = "warmup_steps", (("train", "steps"), ("train", "epochs"))
    warmup = schedule.warmup_steps
    if schedule.warmup is not None:
        if warmup:
            yield Problem((*PATH, key), "cannot be combined with train.schedule.warmup", "use one of them")
            return
        duration = parse_duration(schedule.warmup)
        key, warmup = "warmup", int(duration.amount) if duration.unit == "steps" else 0
    if steps is not None and warmup > steps:
        message = f"is {warmup}, longer than the run of {steps} steps"
        yield Problem((*PATH, key), message, f"give at most {steps}", others=related_keys)


def _pieces(schedule: Schedule) -> Iterator[Problem]:
    outer_keys = [key for key in _changed(schedule) if key != "pieces"]
    if outer_keys:
        message = f"is given beside train.schedule.pieces, which {'replaces' if len(outer_keys) == 1 else 'replace'} it"
        yield Problem((*PATH, outer_keys[0]), message, "move it into a piece")
    parts: list[Duration] = []
    for place, piece in enumerate(schedule.pieces):
        path = (*PATH, "pieces", place)
        if piece.name == "reduce_on_plateau":
            yield Problem((*path, "name"), "is reduce_on_plateau, which has no pieces beside it", "use another shape")
        if piece.lasts is not None:
            parts.append(parse_duration(piece.lasts))
        elif place + 1 < len(schedule.pieces):
            yield Problem((*path, "lasts"), "is missing, and another piece follows", "add it, such as 500 steps")
    if len({part.unit for part in parts}) > 1:
        message = f"last {' and '.join(sorted({part.unit for part in parts}))}, and the units must be the same"
        yield Problem((*PATH, "pieces"), message, "give the duration of every piece in one unit")


def _shape(piece: SchedulePiece, path: KeyPath) -> Iterator[Problem]:
    shape = SHAPES[piece.name]
    common = {"name", "scale", "lasts", "pieces"}
    for key in _changed(piece):
        if key not in shape.reads and key not in common:
            readers = ", ".join(name for name, other_shape in SHAPES.items() if key in other_shape.reads)
            yield Problem((*path, key), f"has no effect on {piece.name}", f"remove it; it is for {readers}")
    for key in shape.needs:
        if not getattr(piece, key):
            yield Problem((*path, key), f"is missing, and {piece.name} needs it", "add it, such as 2 epochs")
    if piece.name == "inverse_sqrt" and piece.warmup is None and not getattr(piece, "warmup_steps", 0):
        message = "is missing, and inverse_sqrt falls from the end of the warm-up"
        yield Problem((*path, "warmup"), message, "add it, such as 500 steps")
    marks = [parse_duration(text) for text in piece.milestones]
    if len({mark.unit for mark in marks}) > 1 or any(a.amount >= b.amount for a, b in pairwise(marks)):
        message = "are not in increasing order, in one unit"
        yield Problem((*path, "milestones"), message, "list them so, such as [10 epochs, 20 epochs]")


def _changed(piece: SchedulePiece) -> list[str]:
    """Keys with another value than the default: a resolved run file has every key."""
    fields = type(piece).model_fields
    return [
        key for key in fields
        if getattr(piece, key) != fields[key].get_default(call_default_factory=True)
    ]  # fmt: skip


def _plateau(spec: TrainerRunSpec) -> Iterator[Problem]:
    schedule, period = spec.train.schedule, ("train", "evaluation", "every_steps")
    if spec.data.eval is None:
        message = "is reduce_on_plateau, which needs an evaluation set"
        yield Problem((*PATH, "name"), message, "give data.eval", others=(("data", "eval"),))
    elif spec.train.evaluation.every_steps is None:
        message = "is reduce_on_plateau, which needs periodic evaluation"
        yield Problem((*PATH, "name"), message, "give train.evaluation.every_steps", others=(period,))
    yield from watched(spec, schedule.metric, (*PATH, "metric"))
    if schedule.gamma >= 1:
        yield Problem((*PATH, "gamma"), f"is {schedule.gamma:g}, which reduces nothing", "give a number below 1")
