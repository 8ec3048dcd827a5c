"""Proves that a run resumes as if nothing had happened: runs it calmly, twice, then killed, then stopped.

Called by `ortflow prove`. Each run takes the same steps; the last two resume from their own checkpoints. The comparison
of programs is `parting` and `causes`, that of ONNX runs `checkpoints`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortflow.launchers.base import Submission
from ortflow.launchers.proving import checkpoints
from ortflow.launchers.proving.causes import Cause, causes, causes_between_calm_runs
from ortflow.launchers.proving.parting import Parting, harmless, noise, parting, unsteady, without
from ortflow.launchers.proving.runs import Proof, make_run
from ortflow.launchers.proving.sources import Reading, readings
from ortflow.launchers.proving.traces import Trace, read_trace
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.strike import Plan, struck_at

LEAST_STEPS = 6
SIGNALS = {"killed": "SIGKILL", "stopped": "SIGTERM"}
# Without it Python draws a seed at each start, and with it the order of strings in a set.
FIXED_HASH = {"PYTHONHASHSEED": "0"}
HARMLESS = 4
"""Number of variables that a report names which differ and change nothing."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison of a run with the calm one has found."""

    run: str
    """The run and its accident, such as `SIGKILL after step 7, compared from step 6 on`."""
    causes: tuple[Cause, ...] = ()
    """The forgotten state, the most probable first; empty if the runs are equal."""
    effect: str = ""
    """What differs first."""
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether the runs are equal, bit by bit."""
        return not self.causes

    def __str__(self) -> str:
        lines = [f"{self.run}: {'equal' if self.equal else self.effect}"]
        for place, cause in enumerate(self.causes):
            lines += [f"  {'also' if place else 'cause'}: {cause}", f"    {cause.fix}"]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True)
class Schedule:
    """When a run saves, is struck and ends."""

    steps: int
    period: int
    """Steps between checkpoints."""
    strikes: dict[str, tuple[int, int]]
    """By run: the step after which a rank is struck, and the rank."""
    seed: int
    ranks: int

    def plan(self, run: str) -> Plan:
        """The plan of a run."""
        step, rank = self.strikes.get(run, (0, 0))
        return Plan(self.steps, SIGNALS.get(run), step, rank)


def schedule(steps: int, seed: int, ranks: int) -> Schedule:
    """Choose the moments by chance, from a seed: after the first checkpoint, and two steps before the end. Pure.

    Raises UserError if there are too few steps.
    """
    if steps < LEAST_STEPS:
        raise UserError(
            f"{steps} steps are too few: a checkpoint, a kill and the steps after it need {LEAST_STEPS}",
            fix="give more --steps, or train longer",
        )
    chance, period = random.Random(seed), max(2, steps // 4)
    last = steps - 2
    strikes = {
        "killed": (chance.randint(min(period + 1, last), last), chance.randrange(ranks)),
        "stopped": (chance.randint(2, last), chance.randrange(ranks)),
    }
    return Schedule(steps, period, strikes, seed, ranks)


def prove(
    submission: Submission, folder: Path, moments: Schedule, sources: Sequence[Path], report: Callable[[Verdict], None]
) -> bool:
    """Make the runs in a folder and report each comparison; returns whether all are equal.

    `sources` are the program's files, in which causes are looked for that are no state. Raises UserError if there is
    nothing to compare, and what `make_run` raises.
    """
    read = [reading for path in sources for reading in readings(path.read_text(errors="replace"), path.name)]

    def run(name: str, environment: dict[str, str] | None = None, accident: str | None = None) -> Proof:
        return make_run(submission, folder, name, moments.plan(accident or name), environment or {})

    calm, again = run("calm"), run("calm-again")
    if submission.spec.program is None:
        return _prove_model(moments.steps, run, calm, again, report)
    first, second = _traced(calm), _traced(again)
    different = differing(first, second)
    if different is not None:
        fixed = [read_trace(run(name, FIXED_HASH, "calm").trace) for name in ("fixed-hash", "fixed-hash-again")]
        causes = causes_between_calm_runs(different, read, by_hash=differing(*fixed) is None)
        report(Verdict("two runs without a kill", tuple(causes[:1]), sentence(different)))
        return False
    done = min(max(lines) for lines in first.first.values())
    if done < moments.steps:  # the program is complete earlier
        moments = schedule(done, moments.seed, moments.ranks)
    names = sorted({name for rank in first.first for name in unsteady(first.first[rank], second.first[rank])})
    notes = (f"not compared, because they differ in these runs, too: {', '.join(names)}",) if names else ()
    report(Verdict(f"two runs of {done} steps without a kill", notes=notes))
    equal = True
    for name, number in SIGNALS.items():
        verdict = resumed(first, second, run(name), read, number)
        report(verdict)
        equal = equal and verdict.equal
    return equal


def _prove_model(
    steps: int, run: Callable[[str], Proof], calm: Proof, again: Proof, report: Callable[[Verdict], None]
) -> bool:
    def compare(accident: str, other: Proof) -> bool:
        lines = checkpoints.differences(calm.run, other.run)
        verdict = Verdict(accident, tuple(Cause("what ortflow restores", line) for line in lines[:3]), "differs")
        report(verdict)
        return verdict.equal

    if not compare(f"two runs of {steps} steps without a kill", again):
        return False
    equal = True
    for name, number in SIGNALS.items():
        other = run(name)
        equal = compare(f"{number} after step {_struck(other)}", other) and equal
    return equal


def differing(first: Trace, second: Trace) -> Parting | None:
    """Where two runs without an accident part, on the first rank that does."""
    for rank in sorted(first.first.keys() & second.first.keys()):
        first_lines, second_lines = first.first[rank], second.first[rank]
        if (difference := parting(without(first_lines, unsteady(first_lines, second_lines)), second_lines)) is not None:
            return difference
    return None


def resumed(calm: Trace, again: Trace, proof: Proof, read: Sequence[Reading], signal: str) -> Verdict:
    """Compare a run that was struck with the calm one. Raises UserError if it could not be struck."""
    trace, struck = read_trace(proof.trace), _struck(proof)
    run = f"{signal} after step {struck}"
    if len(trace.attempts) < 2:
        cause = Cause("a request to stop that is not followed", "")
        return Verdict(run, (cause,), "the program did not save and stop")
    extra: list[str] = []
    for rank, calm_lines in sorted(calm.first.items()):
        steps, again_lines = trace.last.get(rank, {}), again.first[rank]
        if max(steps, default=0) != max(calm_lines):
            cause = Cause("steps that are missing", "")
            message = (
                f"rank {rank} ended after step {max(steps, default=0)}, and after step {max(calm_lines)} without the "
                "accident"
            )
            return Verdict(run, (cause,), message)
        ignored = noise(calm_lines, again_lines)
        calm_lines = without(calm_lines, unsteady(calm_lines, again_lines))
        run = f"{signal} after step {struck}, compared from step {min(steps)} on"
        if (difference := parting(calm_lines, steps, ignored)) is not None:
            return Verdict(run, tuple(causes(difference, read)[:3]), sentence(difference))
        extra += harmless(calm_lines, steps, ignored)
    names = ", ".join(key.split(":", 2)[2] for key in dict.fromkeys(extra[:HARMLESS]))
    return Verdict(run, notes=(f"differs, and nothing depends on it: {names}",) if names else ())


def _struck(proof: Proof) -> int:
    """The step after which a run was struck. Raises UserError if it was not."""
    step = struck_at(proof.trace)
    if step is None:
        raise UserError(
            "the program committed no checkpoint before its last steps, so there is nothing to resume from",
            fix="give more --steps, or save more often",
        )
    return step


def sentence(parting: Parting) -> str:
    """What differs first, in words."""
    rank, effect = f" on rank {parting.rank}" if parting.rank else "", parting.effect
    listed = ", ".join(name.split(":", 2)[-1] for name in effect.names[:3])
    return {
        "batch": f"the batch of step {effect.step} differs{rank}",
        "logged": f"{listed} of step {effect.step} differs{rank}",
        "update": f"the state after step {effect.step} differs{rank}: {listed}",
        "result": f"the state at the end differs{rank}: {listed}",
    }[effect.what]


def _traced(proof: Proof) -> Trace:
    """The trace of a calm run. Raises UserError if the program has written none."""
    trace = read_trace(proof.trace)
    if not trace.attempts:
        raise UserError(
            "the program reports no step, so there is nothing to compare",
            fix="use ortflow.program.start and run.steps, or call run.step() and run.log(loss=…) in its loop",
        )
    return trace
