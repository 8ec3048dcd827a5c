"""The search of `ortflow tune`: space, sampling, early stops, failures and record, with a scheduler of the test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from run_files import SMALL, reported

from ortflow.cli.tune import tune
from ortflow.launchers.attempts.locks import hold
from ortflow.launchers.base import Submission
from ortflow.launchers.sweeps import read_sweep
from ortflow.launchers.tuning import search
from ortflow.launchers.tuning.search import Search
from ortflow.launchers.tuning.space import as_text
from ortflow.launchers.tuning.study import Record
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir, append_json_line
from ortflow.workflow.spec.file.scalars import scalar
from ortflow.workflow.spec.tune import TuneSection

pytest.importorskip("optuna", reason="Optuna is not installed")

LR = "train.optimizer.lr"


@dataclass
class Scheduler:
    """Runs that report evaluations at steps 1, 3 and 9, and end when time passes."""

    loss: Callable[[Mapping[str, str], int], float | None]
    active: dict[Path, int] = field(default_factory=dict)
    submitted: list[str] = field(default_factory=list)
    fresh: list[bool] = field(default_factory=list)
    """Whether each submission was of a new trial."""
    interrupt_at: int | None = None
    """Number of submissions after which the user interrupts."""

    def request(self, submission: Submission) -> Submission:
        return submission

    def submit(self, submission: Submission) -> str:
        run, values = submission.run, dict(pair.split("=") for pair in submission.overrides)
        self.submitted.append(run.root.name)
        run.root.mkdir(parents=True, exist_ok=True)
        run.run_file.write_text(f"name: {run.root.name}\n")
        run.record_attempt(event="submit", launcher="local")
        run.record_attempt(event="start", attempt=0)
        self.active[run.root] = hold(run.lock)
        run.events(0).parent.mkdir(exist_ok=True)
        for step in (1, 3):
            self._evaluate(run, step, self.loss(values, step))
        self._last = getattr(self, "_last", {}) | {run.root: self.loss(values, 9)}
        return "test://"

    def status(self, run: RunDir) -> Any:
        from ortflow.launchers.status import read_status

        return read_status(run)

    def cancel(self, run: RunDir, *, now: bool) -> bool:
        self._end(run.root, outcome="preempted", next="stop", cause="cancel")
        return True

    def pass_time(self, seconds: float) -> None:
        if self.interrupt_at is not None and len(self.submitted) >= self.interrupt_at:
            raise KeyboardInterrupt
        for root in list(self.active):
            loss = self._last[root]
            if loss is None:
                self._end(root, outcome="user_error", next="stop", cause="the model does not fit")
                continue
            self._evaluate(RunDir(root), 9, loss)
            self._end(root, outcome="finished", next="stop", cause="")

    def _evaluate(self, run: RunDir, step: int, loss: float | None) -> None:
        append_json_line(run.events(0), {"event": "evaluation", "time": 1.0, "step": step, "loss": loss})

    def _end(self, root: Path, **about: str) -> None:
        descriptor = self.active.pop(root, None)
        if descriptor is not None:
            RunDir(root).record_attempt(event="end", attempt=0, **about)
            os.close(descriptor)


def searched(
    folder: Path,
    scheduler: Scheduler,
    monkeypatch: pytest.MonkeyPatch,
    *,
    mode: str = "min",
    at_once: int = 1,
    **tune: Any,
) -> Record:
    """The record after a search."""
    monkeypatch.setattr(search.time, "sleep", scheduler.pass_time)
    section = TuneSection.model_validate({"space": {LR: {"log": [1e-4, 1.0]}}, "trials": 6, **tune})
    (folder / "a.sweep").mkdir(parents=True, exist_ok=True)
    record = Record(folder / "a.sweep", section, section.model_dump(exclude={"trials"}), mode, 1, seed=7)

    def submission(number: int, values: Mapping[str, str], new: bool) -> Submission:
        overrides = tuple(f"{key}={value}" for key, value in values.items())
        scheduler.fresh.append(new)
        return Submission(None, RunDir(folder / f"a-{number}"), overrides=overrides)  # type: ignore[arg-type]

    try:
        Search(folder / "a", record, "loss", scheduler, at_once, submission, lambda text: None).run()  # type: ignore[arg-type]
    except KeyboardInterrupt:
        assert not scheduler.active, "interrupted runs save and stop"
    return record


def by_lr(values: Mapping[str, str], step: int) -> float:
    """Best at 0.01."""
    import math

    return (math.log10(float(values[LR])) + 2) ** 2 + 1 / step


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_an_interrupted_search_goes_on_as_it_would_have(
    sampler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = searched(tmp_path / "calm", Scheduler(by_lr), monkeypatch, sampler=sampler, trials=14)
    values = [trial.values for trial in calm.trials]
    assert len({json.dumps(dict(each)) for each in values}) == 14
    stopped = Scheduler(by_lr, interrupt_at=3)
    record = searched(tmp_path / "two", stopped, monkeypatch, sampler=sampler, trials=14)
    assert [trial.state for trial in record.trials] == ["complete", "complete", "running"]
    again = Scheduler(by_lr)
    record = searched(tmp_path / "two", again, monkeypatch, sampler=sampler, trials=14)
    assert [trial.values for trial in record.trials] == values
    assert stopped.submitted + again.submitted == ["a-0", "a-1", "a-2", *(f"a-{n}" for n in range(2, 14))]
    assert record.best == calm.best == min(calm.trials, key=lambda trial: by_lr(trial.values, 9))
    assert all(trial.seed == "7" for trial in record.trials)
    assert [dict(member.values) for member in read_sweep(tmp_path / "two/a").members] == [dict(v) for v in values]
    # Finished: nothing is repeated; more trials extend it.
    idle = Scheduler(by_lr)
    searched(tmp_path / "two", idle, monkeypatch, sampler=sampler, trials=15)
    assert idle.submitted == ["a-14"]
    with pytest.raises(UserError, match="is the record of another search: space differ"):
        searched(tmp_path / "two", idle, monkeypatch, sampler=sampler, space={LR: {"log": [1e-5, 1.0]}})


def test_a_run_of_something_else_is_no_result_of_a_killed_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched(tmp_path, Scheduler(by_lr), monkeypatch, trials=1)
    (tmp_path / "a.sweep").rename(tmp_path / "aside")

    def killed(self: Search, trial: Any, *, new: bool) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(Search, "_start", killed)
        with pytest.raises(SystemExit):  # after the trial was recorded, before its run is submitted
            searched(tmp_path, Scheduler(by_lr), patched, trials=1, seed=5)
    scheduler = Scheduler(by_lr)
    record = searched(tmp_path, scheduler, monkeypatch, trials=1, seed=5)
    assert scheduler.submitted == ["a-0"], "the run of the earlier search was followed"
    assert scheduler.fresh == [True], "the run in its place is checked, or moved aside, as for a new trial"
    assert record.trials[0].state == "complete"


def test_a_grid_in_order_with_failed_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(values: Mapping[str, str], step: int) -> float | None:
        return None if values["seed"] == "2" else float(values[LR])

    space = {LR: [1, 0.1], "seed": {"choice": [1, 2]}}
    scheduler = Scheduler(loss)
    record = searched(tmp_path, scheduler, monkeypatch, mode="max", at_once=3, space=space, sampler="grid", trials=None)
    assert [(trial.values[LR], trial.seed, trial.state) for trial in record.trials] == [
        ("1", "1", "complete"), ("1", "2", "fail"), ("0.1", "1", "complete"), ("0.1", "2", "fail"),
    ]  # fmt: skip
    assert record.trials[1].reason == "the model does not fit"
    assert record.best is not None
    assert record.best.number == 0


def test_successive_halving_stops_poor_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = {LR: [0.01, 1.0, 0.1, 0.001, 0.02]}
    record = searched(tmp_path, Scheduler(by_lr), monkeypatch, space=space, sampler="grid", pruner="successive_halving")
    states = {trial.values[LR]: trial.state for trial in record.trials}
    assert states == {"0.01": "complete", "1.0": "pruned", "0.1": "pruned", "0.001": "pruned", "0.02": "pruned"}
    assert {trial.step for trial in record.trials if trial.state == "pruned"} == {1}


def test_a_search_whose_first_trials_fail_alike_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(lambda values, step: None)
    with pytest.raises(OrtflowError, match=r"first 3 trials have failed for the same reason.*the model does not fit"):
        searched(tmp_path, scheduler, monkeypatch)
    assert len(scheduler.submitted) == 3


def test_values_are_read_back() -> None:
    assert [as_text(value) for value in ("adamw", "true", "1", 1e-05, True, {"a": [1]})] == [
        "adamw", '"true"', '"1"', "1e-05", "true", '{"a": [1]}',
    ]  # fmt: skip
    assert scalar("1e-05") == 1e-05


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ("{space: {seed: [1]}}", "tune.trials: is missing, and the sampler is tpe"),
        ("{space: {seed: {integer: [1, 3]}}, sampler: grid}", "is a range, and the sampler grid needs a list"),
        ("{space: {seed: {log: [0, 3]}}, trials: 1}", "begins at 0, which has no logarithm"),
        ("{space: {seed: {uniform: [3, 3]}}, trials: 1}", "goes from 3 to 3"),
        ("{space: {seed: {log: [1, 3], choice: [1]}}, trials: 1}", "has choice, log; give one of"),
        ("{space: {seed: {}}, trials: 1}", "has no values"),
        ("{space: {seed: {logg: [1, 3]}}, trials: 1}", "tune.space.seed.logg: unknown key; did you mean log?"),
        ("{space: {seed: 3}, trials: 1}", "tune.space.seed: must be a list, not 3"),
        ("{space: {name: [a]}, trials: 1}", "is a key that each run of a search gets its own of"),
        ("{space: {train.schedule: [a], train.schedule.name: [b]}, trials: 1}", "overlaps with train.schedule"),
        ("{space: {seed: [1]}, trials: 1, metric: f2}", "tune.metric: is f2, which evaluation does not compute"),
        ("{space: {seed: [1]}, trials: 1, pruner: median}", "is median, which needs periodic evaluation"),
    ],
)
def test_what_cannot_be_searched(tune: str, message: str, tmp_path: Path) -> None:
    text = SMALL.replace("train: train.arrow", "train: train.arrow\n  eval: train.arrow") + f"tune: {tune}\n"
    (one,) = reported(tmp_path, text)
    assert message in one


def test_trials_that_would_share_a_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second trial would find the checkpoints of the first, and fail; exports would replace each other."""
    monkeypatch.chdir(tmp_path)
    text = SMALL.replace("train: train.arrow", "train: train.arrow\n  eval: train.arrow")
    Path("run.yaml").write_text(text + f"tune: {{trials: 2, space: {{{LR}: {{log: [1e-4, 1e-2]}}}}}}\n")
    Path("model.onnx").touch()
    Path("train.arrow").touch()
    for key in ("checkpoint.directory", "export.path"):
        with pytest.raises(UserError, match=f"is {tmp_path}/one for all trials") as refused:
            tune(Path("run.yaml"), [f"{key}={tmp_path}/one"])
        assert refused.value.where == key
    assert not Path("runs").exists()
