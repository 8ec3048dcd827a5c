"""Whether a search of the `tune` section can be made. Pure; called by `check`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ortflow.workflow.spec.checks.objective import watched
from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.spec.tune import Range, TuneSection

TUNE: KeyPath = ("tune",)
LIMIT = 10_000
"""Largest number of combinations of a grid: each is a run."""
OWN = ("name", "run_dir", "tune")
"""Keys that a search sets itself."""


def check_tune(spec: TrainerRunSpec) -> Iterator[Problem]:
    """Every contradiction of the section."""
    tune = spec.tune
    if tune is None:
        return
    if spec.data.eval is None:
        yield Problem(TUNE, "needs an evaluation set", "give data.eval", others=(("data", "eval"),))
    yield from watched(spec, tune.metric, ("tune", "metric"))
    for key, values in tune.space.items():
        if isinstance(values, Range):
            yield from _range(key, values)
        if key.split(".")[0] in OWN:
            yield Problem(("tune", "space", key), "is a key that each run of a search gets its own of", "remove it")
        if (other := _overlapping(key, tune)) is not None:
            yield Problem(("tune", "space", key), f"overlaps with {other}", "keep one of them")
    yield from _sampler(tune)
    if tune.pruner != "none" and spec.train.evaluation.every_steps is None:
        period: KeyPath = ("train", "evaluation", "every_steps")
        message, fix = f"is {tune.pruner}, which needs periodic evaluation", "give train.evaluation.every_steps"
        yield Problem(("tune", "pruner"), message, fix, others=(period,))


def _range(key: str, values: Range) -> Iterator[Problem]:
    path, forms = ("tune", "space", key), values.forms
    if len(forms) != 1:
        message = f"has {', '.join(forms)}" if forms else "has no values"
        yield Problem(path, message, "give one of choice, uniform, log, integer and log_integer")
        return
    ((name, ends),) = forms.items()
    if name == "choice":
        return
    low, high = ends
    if not low < high:
        yield Problem((*path, name), f"goes from {low:g} to {high:g}", "give the smaller number first")
    elif name.startswith("log") and low <= 0:
        yield Problem((*path, name), f"begins at {low:g}, which has no logarithm", "give positive numbers")


def _overlapping(key: str, tune: TuneSection) -> str | None:
    return next((other for other in tune.space if other != key and key.startswith(f"{other}.")), None)


def _sampler(tune: TuneSection) -> Iterator[Problem]:
    if tune.sampler != "grid":
        if tune.trials is None:
            yield Problem(
                ("tune", "trials"), f"is missing, and the sampler is {tune.sampler}", "give the number of runs"
            )
        return
    sizes = []
    for key, values in tune.space.items():
        listed = values.choice if isinstance(values, Range) else values
        if listed is None:
            message = "is a range, and the sampler grid needs a list of values"
            yield Problem(("tune", "space", key), message, "write the values as a list", others=(("tune", "sampler"),))
        sizes.append(len(listed or ()))
    if math.prod(sizes) > LIMIT:
        message = f"has {math.prod(sizes)} combinations, more than {LIMIT}"
        yield Problem(("tune", "space"), message, "give fewer values, or use the sampler random")
