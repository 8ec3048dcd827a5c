"""Where two runs of a program part, and what differed before. Pure.

A rank's line holds the state after a step and the batch of the next one. In a run that was resumed after step s, what
differs in line s was not restored. What is equal there and differs later is a consequence. Entries that already differ
between two runs without a kill, such as a start time, count as neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from ortflow.launchers.proving.traces import REGISTERED, Entry, Line, Steps

GENERATORS = frozenset(
    {
        "python generator", "numpy generator", "torch generator", "cuda generator", "random.Random", "torch.Generator",
        "numpy.random.Generator", "numpy.random.RandomState",
    }
)  # fmt: skip
RESULTS = GENERATORS | {
    REGISTERED,
    "parameter",
    "buffer",
    "optimizer",
    "scheduler",
    "scaler",
    "state",
    "tensor",
    "array",
}
"""Kinds that are part of a training's result even if neither a loss nor a parameter depends on them in these steps."""
UPDATES = ("lr", "learning", "scale", "momentum")
"""Parts of the names of logged values that belong to the update, not to the forward pass."""

MEASURED = ("second", "time", "speed", "throughput", "memory", "per_s")
"""Parts of the names of logged values that measure the machine."""


@dataclass(frozen=True)
class Effect:
    """The first consequence of a difference."""

    what: str
    """`batch`, `logged`, `update`, or `result` if only the forgotten state itself differs."""
    step: int
    """The step whose batch, values or update differ."""
    names: tuple[str, ...] = ()
    """The logged values or keys that differ."""


@dataclass(frozen=True)
class Suspect:
    """An entry that differs where it must not."""

    key: str
    before: Entry | None
    """In the calm run; None if it has no such entry."""
    after: Entry | None
    live: bool
    """It changes in the step that follows: constants explain nothing."""

    @property
    def kind(self) -> str:
        """The kind of the entry that exists."""
        entry = self.before or self.after
        assert entry is not None
        return entry.kind

    @property
    def file(self) -> str:
        """The file of the variable; empty for a generator of the process."""
        entry = self.before or self.after
        assert entry is not None
        return entry.file


@dataclass(frozen=True)
class Parting:
    """How a run differs from the calm one, on one rank."""

    rank: int
    resumed: int
    """The step after which the compared lines begin."""
    effect: Effect
    suspects: tuple[Suspect, ...]
    accumulating: bool = False
    """The calm run did not update its parameters in the last step before: gradients are part of the state."""
    blind: bool = False
    """No batch was seen: a different loss may come from the data, too."""
    workers: tuple[str, ...] = ()
    """Keys of loaders with worker processes, whose state no trace sees."""


def unsteady(first: Steps, second: Steps) -> frozenset[str]:
    """Names of logged values that differ between two calm runs although all else is equal, such as a step's seconds."""
    steps = first.keys() & second.keys()
    names = {
        name for step in steps for name in first[step].logged.keys() & second[step].logged.keys()
        if first[step].logged[name] != second[step].logged[name]
    }  # fmt: skip
    bare, other = ({step: replace(run[step], logged={}) for step in steps} for run in (first, second))
    measured = {name for name in names if any(part in name.lower() for part in MEASURED)}
    return frozenset(names if parting(bare, other) is None else measured)


def without(steps: Steps, names: Collection[str]) -> Steps:
    """The lines without some of the logged values."""
    return {step: replace(line, logged=_others(line.logged, names)) for step, line in steps.items()}


def _others(logged: Mapping[str, str], ignored: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in logged.items() if name not in ignored}


def noise(first: Steps, second: Steps) -> frozenset[str]:
    """Keys of entries that differ between two calm runs of a rank."""
    keys: set[str] = set()
    for step in first.keys() & second.keys():
        keys |= _differing(first[step].state, second[step].state)
    return frozenset(keys)


def parting(calm: Steps, other: Steps, ignored: Collection[str] = ()) -> Parting | None:
    """Where a rank's lines differ from those of the calm run; None if everything that counts is equal."""
    steps = sorted(calm.keys() & other.keys())
    if not steps:
        return None
    start = steps[0]
    initial = _differing(calm[start].state, other[start].state) - set(ignored)
    initial = {key for key in initial if _comparable(key, calm[start].state, other[start].state)}
    effect = _first_effect(calm, other, steps, initial | set(ignored))
    if effect is None:
        last = steps[-1]
        remaining = _differing(calm[last].state, other[last].state) & initial
        names = tuple(sorted(key for key in remaining if _counts(key, calm, last)))
        if not names:
            return None
        effect = Effect("result", last, names)
    return Parting(
        calm[start].rank, start, effect,
        tuple(_suspects(calm, other, start, effect, initial)),
        _accumulating(calm, start),
        all(line.batch is None for line in calm.values()),
        tuple(key for key, entry in calm[start].state.items() if entry.kind == "workers"),
    )  # fmt: skip


def _counts(key: str, calm: Steps, last: int) -> bool:
    """Whether an entry that nothing depends on is part of the result; a generator that is not drawn from is not."""
    entry = calm[last].state.get(key)
    if entry is None or entry.kind not in RESULTS:
        return False
    drawn = any(_digest(line.state.get(key)) != entry.digest for line in calm.values())
    return entry.kind not in GENERATORS or drawn


def harmless(calm: Steps, other: Steps, ignored: Collection[str] = ()) -> list[str]:
    """Keys of variables that differ in the last step although nothing depends on them, such as a list of losses."""
    last = max(calm.keys() & other.keys(), default=None)
    if last is None:
        return []
    kinds = {"number", "list", "dict", "set", "length"}
    first, calm_state, other_state = calm[min(calm)].state, calm[last].state, other[last].state
    keys = _differing(calm_state, other_state) & calm_state.keys() & other_state.keys() - set(ignored)
    return sorted(
        key for key in keys if calm_state[key].kind in kinds and _digest(first.get(key)) != calm_state[key].digest
    )


def _first_effect(calm: Steps, other: Steps, steps: list[int], differing: Collection[str]) -> Effect | None:
    """In the order of events: the batch of a step, the values that it reports, the state after it."""
    for step in steps:
        calm_line, other_line = calm[step], other[step]
        names = {
            name
            for name in calm_line.logged.keys() & other_line.logged.keys()
            if calm_line.logged[name] != other_line.logged[name]
        }
        forward = {name for name in names if not any(part in name.lower() for part in UPDATES)}
        if forward:
            return Effect("logged", step, tuple(sorted(forward)))
        changed = {
            key for key in _differing(calm_line.state, other_line.state) - set(differing)
            if _kind(key, calm_line, other_line) in RESULTS and _comparable(key, calm_line.state, other_line.state)
        }  # fmt: skip
        if names or changed:
            return Effect("update", step, tuple(sorted(names | changed)))
        if calm_line.batch is not None and other_line.batch is not None and calm_line.batch != other_line.batch:
            return Effect("batch", step + 1)
    return None


def _suspects(calm: Steps, other: Steps, start: int, effect: Effect, keys: Collection[str]) -> Iterator[Suspect]:
    for key in sorted(keys):
        before, after = calm[start].state.get(key), other[start].state.get(key)
        later = [calm[step].state.get(key) for step in calm if start < step <= max(effect.step, start + 1)]
        live = any(_digest(entry) != _digest(before) for entry in later)
        yield Suspect(key, before, after, live)


def _accumulating(calm: Steps, start: int) -> bool:
    if start - 1 not in calm:
        return False
    before, after = calm[start - 1].state, calm[start].state
    trained = [key for key in after if key.endswith(".grad") and after[key].kind == "gradient"]
    moving = [key for key in trained if _digest(before.get(key)) != _digest(after[key])]
    parameters = [key for key, entry in after.items() if entry.kind in ("parameter", REGISTERED)]
    still = all(_digest(before.get(key)) == _digest(after[key]) for key in parameters)
    return bool(moving) and bool(parameters) and still


def _differing(calm: Mapping[str, Entry], other: Mapping[str, Entry]) -> set[str]:
    return {key for key in calm.keys() | other.keys() if _digest(calm.get(key)) != _digest(other.get(key))}


def _comparable(key: str, calm: Mapping[str, Entry], other: Mapping[str, Entry]) -> bool:
    """Whether an entry is in both, or its variable is: what the first step assigns is not there before it."""
    if key in calm and key in other:
        return True
    variable = root(key)
    return all(any(root(name) == variable for name in state) for state in (calm, other))


def root(key: str) -> str:
    """The variable of a key, without attributes and elements."""
    prefix, _, path = key.rpartition(":") if key.count(":") < 2 else _split(key)
    for place, character in enumerate(path):
        if character in ".[<":
            return f"{prefix}:{path[:place]}"
    return key


def _split(key: str) -> tuple[str, str, str]:
    file, function, path = key.split(":", 2)
    return f"{file}:{function}", ":", path


def _kind(key: str, calm: Line, other: Line) -> str:
    entry = calm.state.get(key) or other.state.get(key)
    return entry.kind if entry is not None else ""


def _digest(entry: Entry | None) -> str | None:
    return None if entry is None else entry.digest
