"""Names the forgotten state: from where two runs part to a cause, a sentence and its fix. Pure.

Suspects are ordered by what parted first: a different batch comes from the data path, a different loss from the forward
pass, different parameters after an equal loss from the update.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ortflow.launchers.proving.fixes import FIXES
from ortflow.launchers.proving.parting import GENERATORS, Parting, Suspect, root
from ortflow.launchers.proving.sources import Reading
from ortflow.launchers.proving.traces import REGISTERED

LEAST = 20
"""Weight below which a suspect is no explanation."""
COPIES = re.compile(r"ema|averag|shadow|teacher|target|swa", re.IGNORECASE)


@dataclass(frozen=True)
class Cause:
    """A piece of state that the training depends on and that was not restored."""

    name: str
    """One of `fixes`."""
    where: str
    """The variable and its file, or the line of the source; empty for a generator of the process."""

    @property
    def fix(self) -> str:
        """What to do about it."""
        return FIXES[self.name]

    def __str__(self) -> str:
        return f"{self.name}: {self.where}" if self.where else self.name


_CAUSES: dict[str, str] = {
    "python generator": "random state of Python",
    "numpy generator": "random state of numpy",
    "torch generator": "random state of torch",
    "cuda generator": "random state of CUDA",
    "iterator": "the position in the data",
    "sampler": "the epoch of the sampler",
    "file": "the position in a file",
    "scaler": "the gradient scaler",
    "scheduler": "the learning rate schedule",
    "optimizer": "the state of the optimizer",
    "buffer": "buffers of a module, such as the statistics of BatchNorm",
    "parameter": "parameters of a module",
    "mode": "the mode of a module",
    "gradient": "gradients that are accumulated over several steps",
    "tensor": "a tensor of the program",
    "array": "a variable that the loop changes",
    "number": "a step counter",
    "order": "the order of a set",
    REGISTERED: "an object that was not restored",
}
_OF_READINGS: dict[str, str] = {
    "attempt": "the number of the attempt in the data path",
    "time": "the time in the data path",
    "process": "the process or the machine in the data path",
    "host": "the process or the machine in the data path",
    "entropy": "unseeded random numbers",
    "hash": "the order of a set",
    "folder": "the order of a folder's files",
    "variable": "an environment variable in the data path",
}
_WEIGHTS: dict[str, dict[str, int]] = {
    "batch": {
        REGISTERED: 60, "iterator": 90, "sampler": 95, "file": 88, "order": 70, "generator": 85, "own generator": 87,
        "list": 60, "dict": 60, "set": 60, "array": 60, "tensor": 50, "number": 40, "text": 40, "length": 45,
    },
    "logged": {
        REGISTERED: 96, "parameter": 75, "buffer": 90, "mode": 85, "generator": 80, "own generator": 84, "state": 70,
        "tensor": 65, "array": 62, "list": 60, "dict": 60, "set": 60, "number": 45, "text": 40, "scheduler": 40,
        "length": 45, "optimizer": 35, "scaler": 30, "sampler": 30, "iterator": 30, "order": 30,
    },
    "update": {
        REGISTERED: 70, "scheduler": 92, "scaler": 90, "optimizer": 88, "tensor": 65, "array": 62, "list": 60,
        "dict": 60, "state": 60, "number": 50, "generator": 45, "own generator": 50, "buffer": 40, "parameter": 40,
        "text": 30, "length": 30, "sampler": 25, "iterator": 25, "file": 25, "order": 25,
    },
    "result": {"parameter": 90, "buffer": 80, "optimizer": 80, "scheduler": 80, "scaler": 80, "tensor": 85, "array": 70,
               "state": 80, "generator": 60, "own generator": 60, REGISTERED: 95},
}  # fmt: skip
"""By the first effect: the weight of each kind that differs before it."""


def causes(parting: Parting, readings: Sequence[Reading] = ()) -> list[Cause]:
    """The causes of a parting after a resume, the most probable first; never empty.

    `readings` are the places of the program's source that read what differs between processes and attempts.
    """
    weighed = sorted(((_weight(suspect, parting), suspect) for suspect in parting.suspects), key=lambda pair: -pair[0])
    strong = [(weight, suspect) for weight, suspect in weighed if weight >= LEAST]
    seeds = [reading for reading in readings if reading.seeds]
    if seeds and (not strong or strong[0][1].kind in GENERATORS):
        # ortflow may have restored the generator; the program has set it again.
        return [_of_reading(seeds[0])]
    if strong:
        best = strong[0][0]
        return _unique(_of_suspect(suspect, parting) for weight, suspect in strong if weight >= best - 12)
    if parting.workers and parting.effect.what == "batch":
        return [Cause("random state in the workers of the loader", _where(parting.workers[0]))]
    if readings:
        return [_of_reading(min(readings, key=lambda reading: list(_OF_READINGS).index(reading.kind)))]
    weak = [suspect for weight, suspect in weighed if weight > 0]
    return _unique(_of_suspect(suspect, parting) for suspect in weak[:1]) or [Cause("unknown", "")]


def causes_between_calm_runs(parting: Parting, readings: Sequence[Reading], *, by_hash: bool) -> list[Cause]:
    """Why two runs without a kill differ. `by_hash`: they agree with a fixed PYTHONHASHSEED."""
    if by_hash:
        sets = [suspect for suspect in parting.suspects if suspect.kind == "order"]
        place = _where(sets[0].key) if sets else next((str(r) for r in readings if r.kind == "hash"), "")
        return [Cause("the order of a set", place)]
    if readings and (first := next((reading for reading in readings if reading.seeds), None)):
        return [_of_reading(first)]
    generators = [suspect for suspect in parting.suspects if suspect.kind in GENERATORS]
    if drawn := [suspect for suspect in generators if suspect.live]:
        return [_unseeded(suspect, parting) for suspect in drawn]
    if differences := [reading for reading in readings if reading.kind != "hash"]:
        return [_of_reading(min(differences, key=lambda reading: list(_OF_READINGS).index(reading.kind)))]
    if parting.workers and parting.effect.what == "batch":
        return [Cause("random state in the workers of the loader", _where(parting.workers[0]))]
    if generators:
        return [_unseeded(suspect, parting) for suspect in generators]
    return [Cause("operators that add in another order each time", "")]


def _unseeded(suspect: Suspect, parting: Parting) -> Cause:
    return Cause("unseeded random numbers", _of_suspect(suspect, parting).where or suspect.kind)


def _weight(suspect: Suspect, parting: Parting) -> float:
    kind = suspect.kind
    if kind == "gradient":
        return 87 if parting.accumulating and parting.effect.what != "batch" else 1
    if kind in GENERATORS:
        kind = "own generator" if "." in kind else "generator"
    weight: float = _WEIGHTS[parting.effect.what].get(kind, 0)
    if parting.blind:
        weight = max(weight, _WEIGHTS["batch"].get(kind, 0))
    constant = kind in (
        "generator",
        "own generator",
        "number",
        "text",
        "list",
        "dict",
        "set",
        "length",
        "array",
        "iterator",
    )
    if constant and not suspect.live:
        weight *= 0.2
    return weight


def _of_suspect(suspect: Suspect, parting: Parting) -> Cause:
    place = _where(suspect.key)
    kind = suspect.kind
    if kind in GENERATORS and "." in kind:
        return Cause("a random generator of the program", place)
    copied = kind in ("parameter", "tensor") and parting.effect.what == "result"
    if copied or (kind in ("parameter", "tensor", "buffer") and COPIES.search(place)):
        return Cause("a copy of the parameters, such as an EMA", place)
    name = _CAUSES.get(kind, "a variable that the loop changes")
    if kind == "number" and re.search(r"attempt|restart", place, re.IGNORECASE):
        name = "the number of the attempt in the data path"
    if kind == "number" and re.search(r"epoch", place, re.IGNORECASE) and parting.effect.what == "batch":
        name = "the epoch of the sampler"
    if kind == "number" and not (suspect.before and re.fullmatch(r"-?\d+", suspect.before.shown)):
        name = "a variable that the loop changes"
    return Cause(name, place)


def _of_reading(reading: Reading) -> Cause:
    return Cause(_OF_READINGS[reading.kind], str(reading))


def _where(key: str) -> str:
    """The variable of a key in words, such as `schedule in train.py`."""
    if key.startswith("random:"):
        return ""
    if key.startswith("registered:"):
        return key.removeprefix("registered:")
    file, function, _ = key.split(":", 2)
    variable = root(key).split(":", 2)[2]
    path = key.split(":", 2)[2]
    shown = path if len(path) <= 60 and "<" not in path else variable
    return f"{shown} in {file}" + (f", {function}()" if function else "")


def _unique(causes: Iterable[Cause]) -> list[Cause]:
    """One cause for each name and variable."""
    unique: dict[tuple[str, str], Cause] = {}
    for cause in causes:
        unique.setdefault((cause.name, re.split(r"[.\[]| in ", cause.where)[0]), cause)
    return list(unique.values())
