"""The record of a search: which trials there are, what they gave, and which values come next.

It is a study of Optuna in a journal in the folder of the sweep. A trial is recorded with all its values in one entry,
before its run is started. The sampler of each trial has a seed of its own, so that a search that was killed goes on as
it would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.launchers.tuning.space import combinations, distributions, written
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial

    from ortflow.workflow.spec.tune import TuneSection

JOURNAL = "tune.journal"
SEED = "seed"
"""Of the run, in the record of a trial."""
REASON = "reason"
"""Why a trial failed, in its record."""
SETTINGS = "settings"


@dataclass(frozen=True)
class Trial:
    """A trial of the record."""

    number: int
    values: Mapping[str, str]
    state: str
    """running, complete, pruned or fail."""
    value: float | None
    """Its last result."""
    step: int | None
    """The step of its last reported evaluation."""
    seed: str
    reason: str | None

    @property
    def ended(self) -> bool:
        """Whether its result is recorded."""
        return self.state != "running"


class Record:
    """The trials of a search, on disk."""

    def __init__(
        self, folder: Path, tune: TuneSection, settings: Mapping[str, Any], mode: str, first: int, seed: int
    ) -> None:
        """Open or make the record in `folder`.

        `settings` must be the same when a search goes on; `mode`: min or max; `first`: steps before which no trial is
        pruned; `seed`: of the runs. Raises UserError if the record is of another search.
        """
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._tune, self._space, self._seed = tune, distributions(tune), seed
        self._direction = "minimize" if mode == "min" else "maximize"
        path = folder / JOURNAL
        storage = JournalStorage(JournalFileBackend(str(path)))
        self._study: Study = optuna.create_study(
            storage=storage, study_name="tune", direction=self._direction, load_if_exists=True,
            pruner=_pruner(tune, first), sampler=optuna.samplers.RandomSampler(seed=tune.seed),
        )  # fmt: skip
        before = self._study.user_attrs.get(SETTINGS)
        if before is None:
            self._study.set_user_attr(SETTINGS, dict(settings))
        elif before != settings:
            different = [key for key in settings if before.get(key) != settings[key]]
            raise UserError(
                f"{path} is the record of another search: {', '.join(different)} differ",
                fix="give the search another name (name=…), or start it from the beginning with --fresh",
            )

    @property
    def trials(self) -> list[Trial]:
        """All trials, in order."""
        return [_trial(trial) for trial in self._study.get_trials(deepcopy=False)]

    @property
    def best(self) -> Trial | None:
        """The best of the complete trials."""
        from optuna.trial import TrialState

        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        sign = 1.0 if self._direction == "minimize" else -1.0
        return min(map(_trial, complete), key=lambda trial: sign * (trial.value or 0.0), default=None)

    def recorded_at(self, number: int) -> float:
        """When a trial was recorded, which is before its run was submitted. Unix time."""
        began = self._study.get_trials(deepcopy=False)[number].datetime_start
        return 0.0 if began is None else began.timestamp()

    def next(self) -> Trial | None:
        """Record and return one more trial; None if there are as many as the search has."""
        import optuna

        count = len(self._study.get_trials(deepcopy=False))
        if self._tune.trials is not None and count >= self._tune.trials:
            return None
        if self._tune.sampler == "grid":
            params: dict[str, Any] | None = next(
                (p for n, p in enumerate(combinations(self._tune)) if n == count), None
            )
            if params is None:
                return None
        else:
            params = self._sampled(count)
        self._study.add_trial(
            optuna.create_trial(
                state=optuna.trial.TrialState.RUNNING, params=params, distributions=self._space,
                user_attrs={SEED: written(params).get("seed", str(self._seed))},
            )
        )  # fmt: skip
        return self.trials[count]

    def _sampled(self, count: int) -> dict[str, Any]:
        """The values of the trial with this number: a function of the earlier trials and the seed."""
        import optuna

        seed = (self._tune.seed * 1_000_003 + count) % 2**32
        sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
        if self._tune.sampler == "tpe":
            # Trials that still run count as poor ones, so that several at once do not take the same values.
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        copy = optuna.create_study(direction=self._direction, sampler=sampler)
        copy.add_trials(self._study.get_trials(deepcopy=False))
        params: dict[str, Any] = copy.ask(self._space).params
        return params

    def report(self, number: int, step: int, value: float) -> bool:
        """Record an evaluation; returns whether the trial should stop."""
        from optuna.trial import Trial as Reporting

        trial = Reporting(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)
        trial.report(value, step)
        return bool(trial.should_prune())

    def complete(self, number: int, value: float) -> None:
        """Record the result of a trial."""
        self._study.tell(number, value)

    def prune(self, number: int) -> None:
        """Record that a trial was stopped early."""
        from optuna.trial import TrialState

        self._study.tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """Record that a trial failed, and why."""
        from optuna.trial import TrialState

        frozen = self._study.get_trials(deepcopy=False)[number]
        self._study._storage.set_trial_user_attr(frozen._trial_id, REASON, reason)
        self._study.tell(number, state=TrialState.FAIL)


def _pruner(tune: TuneSection, first: int) -> BasePruner:
    import optuna

    if tune.pruner == "successive_halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=tune.reduction_factor)
    if tune.pruner == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=first)
    return optuna.pruners.NopPruner()


def _trial(frozen: FrozenTrial) -> Trial:
    steps = frozen.intermediate_values
    value = frozen.value if frozen.value is not None else steps[max(steps)] if steps else None
    return Trial(
        frozen.number, written(frozen.params), frozen.state.name.lower(), value, max(steps, default=None),
        str(frozen.user_attrs.get(SEED)), frozen.user_attrs.get(REASON),
    )  # fmt: skip
