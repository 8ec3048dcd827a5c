"""The space of a search in Optuna's terms, and the values of a trial as KEY=VALUE. Pure; needs the extra `tune`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ortflow.workflow.spec.file.scalars import scalar
from ortflow.workflow.spec.tune import Range, TuneSection

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_WORD = re.compile(r"[A-Za-z_][\w./-]*")


def distributions(tune: TuneSection) -> dict[str, BaseDistribution]:
    """Key path -> its distribution. The choices are JSON texts: Optuna compares values, and they may be sections."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    ranges: dict[str, BaseDistribution] = {}
    for key, values in tune.space.items():
        (form, bounds), *_ = values.forms.items() if isinstance(values, Range) else {"choice": values}.items()
        if form == "choice":
            ranges[key] = CategoricalDistribution([as_text(value) for value in bounds])
        elif form in ("integer", "log_integer"):
            ranges[key] = IntDistribution(bounds[0], bounds[1], log=form == "log_integer")
        else:
            ranges[key] = FloatDistribution(float(bounds[0]), float(bounds[1]), log=form == "log")
    return ranges


def combinations(tune: TuneSection) -> Iterator[dict[str, str]]:
    """Every combination of lists, by key; the last key changes fastest."""
    lists = [values.choice if isinstance(values, Range) else values for values in tune.space.values()]
    for combination in itertools.product(*(values or () for values in lists)):
        yield {key: as_text(value) for key, value in zip(tune.space, combination, strict=True)}


def ends(tune: TuneSection) -> list[dict[str, str]]:
    """For each key, its values or ends, one at a time: what is checked before the first run starts."""
    single_values = []
    for key, values in tune.space.items():
        choices: Sequence[Any] = next(iter(values.forms.values())) if isinstance(values, Range) else values
        single_values += [{key: as_text(value)} for value in choices]
    return single_values


def written(params: Mapping[str, Any]) -> dict[str, str]:
    """The values of a trial by key, as they are written on a command line."""
    return {key: value if isinstance(value, str) else as_text(value) for key, value in params.items()}


def as_text(value: Any) -> str:
    """A value as YAML reads it back: a word as it is, anything else as JSON."""
    if isinstance(value, str) and _WORD.fullmatch(value) and isinstance(scalar(value), str):
        return value
    return json.dumps(value, ensure_ascii=False)
