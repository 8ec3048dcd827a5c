"""The check of the runtime: findings on the installed one, workarounds, and the cached result."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import says
from run_files import spec_of

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.errors import UserError
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.runtime_check import remember, verify
from ortflow.workflow.runtime_check.behaviour import BEHAVIOURS
from ortflow.workflow.runtime_check.case import Case
from ortflow.workflow.runtime_check.remember import runtime_here
from ortflow.workflow.sessions.settings import DEFAULTS, Outcome, Settings, merged
from ortflow.workflow.spec.base import Section
from ortflow.workflow.steps.configure import configure
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.runtime import check_machines
from ortflow.workflow.trainer import Report, TrainerContext
from ortflow.workflow.trainer.builder import GraphBuilder

NEEDS = verify.needs()
PADDED = next(need for need in NEEDS if need.need == "MaxPool of an image padded with zeros")
PAD = Outcome(Settings(("Pad_Fusion",)), {PADDED.need: "an error of 1 of the largest value"})


def test_the_installed_runtime_has_what_graphs_need() -> None:
    assert verify.verify(NEEDS) == Outcome(DEFAULTS)
    assert len({need.need for need in NEEDS}) == len(NEEDS)


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs in the forms that releases compute wrongly."""
    monkeypatch.setattr(verify, "avoid_wrong_forms", lambda model: None)
    if verify.verify([PADDED]) == Outcome(DEFAULTS):
        pytest.skip("this release of ONNX Runtime fuses Pad with MaxPool right")


@pytest.mark.usefixtures("as_written")
def test_a_rewrite_that_is_wrong_is_left_out() -> None:
    """Pad_Fusion is wrong up to 1.31."""
    outcome = verify.verify([PADDED, *BEHAVIOURS])
    assert outcome.settings == PAD.settings
    assert outcome.faults.keys() == {PADDED.need}
    assert "of the largest value" in outcome.faults[PADDED.need]


@pytest.mark.usefixtures("as_written")
def test_what_no_known_rewrite_explains_is_run_without_any() -> None:
    assert isinstance(PADDED, Case)
    assert verify.verify([replace(PADDED, optimizers=("NchwcTransformer",))]).settings == Settings(optimised=False)


def test_a_runtime_that_is_wrong_is_refused() -> None:
    assert isinstance(PADDED, Case)
    wrong = replace(PADDED, expected={"y": PADDED.expected["y"] + 0.1})
    version = verify.onnxruntime.__version__
    with pytest.raises(UserError, match=rf"{version} .*wrong.*MaxPool of an image padded .*an error of 0\.\d"):
        verify.verify([wrong])


@pytest.mark.parametrize(
    ("found", "reported"),
    [
        ([1.0, 2.00001], None),
        ([1.0, 2.1], "an error of 0.05 …"),
        ([1.0, np.nan], "NaN …"),
        ([1.0], "… shape [1] … [2]"),
    ],
)
def test_what_counts_as_wrong(found: list[float], reported: str | None) -> None:
    fault = Case("", [], {}, {"y": np.array([1.0, 2.0])}).fault({"y": np.array(found)})
    assert (fault is None) == (reported is None)
    assert says(fault or "", reported or "")


class Check:
    """Counts how often the check is made."""

    def __init__(self, outcome: Outcome = PAD) -> None:
        self.times, self._outcome = 0, outcome

    def __call__(self) -> Outcome:
        self.times += 1
        return self._outcome


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache" / "runtimes"


def test_it_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check()
    first, second = runtime_here(check=check), runtime_here(check=check)
    assert (check.times, first.outcome, second.outcome) == (1, PAD, PAD)
    assert first.seconds is not None
    assert second.seconds is None
    runtime_here(afresh=True, check=check)
    assert check.times == 2
    monkeypatch.setattr(remember, "processor_identity", lambda: iter(["another"]))
    runtime_here(check=check)
    assert check.times == 3
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("true", "1"),
        lambda text: text.replace('"Pad_Fusion"', "7"),
        lambda text: text.replace('"faults"', '"fault"'),
    ],
)
def test_what_is_damaged_is_determined_again(cache: Path, damage: Callable[[str], str]) -> None:
    check = Check()
    runtime_here(check=check)
    (file,) = cache.iterdir()
    whole = file.read_text()
    file.write_text(damage(whole))
    assert runtime_here(check=check).outcome == PAD
    assert check.times == 2
    assert file.read_text() == whole


def test_a_refusal_is_not_remembered(cache: Path) -> None:
    def refuse() -> Outcome:
        raise UserError("wrong")

    with pytest.raises(UserError):
        runtime_here(check=refuse)
    assert not list(cache.iterdir())
    assert runtime_here(check=Check()).outcome == PAD


def test_settings_of_several_machines() -> None:
    assert merged([DEFAULTS, Settings(("b",)), Settings(("a", "b"), optimised=False)]) == Settings(("a", "b"), False)
    assert [str(each) for each in (DEFAULTS, Settings(("a", "b"), False))] == ["none", "a, b, no optimisation"]


def context(tmp_path: Path, rank: int, **sections: Any) -> Context:
    place = Place(rank, 2, 0, 1, "none", "host")
    events = EventLog(tmp_path / f"{rank}.jsonl", rank, 0)
    return Context(RunDir(tmp_path), spec_of(**sections), place, 0, StopFlag(), events)


class Second(SoloCommunicator):
    """The second of two ranks; `first` are the first rank's broadcasts, one value per call."""

    def __init__(self, *first: Any) -> None:
        self._first = iter(first)

    def gather(self, value: Any) -> list[Any]:
        return [next(self._first), value]


@pytest.mark.usefixtures("cache")
def test_every_machine_is_checked_and_all_ranks_know_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember.runtime_here, "__kwdefaults__", {"afresh": False, "check": Check()})
    mine = context(tmp_path, 1)
    warnings: list[str] = []
    report = Report(record=mine.events.write, warn=warnings.append)
    mine.builder = GraphBuilder(TrainerContext(mine.spec, Section(), tmp_path, None, report))
    mine.comm = Second(None, (True, Settings(("Other",))))
    assert check_machines(mine) == [Settings(("Other",)), PAD.settings]
    (checked,) = (json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines())
    assert (checked["event"], checked["settings"], checked["faults"]) == ("runtime_check", "Pad_Fusion", PAD.faults)
    assert "sessions are opened without: Pad_Fusion" in warnings[0]
    mine.comm = Second(UserError("of no use"))
    with pytest.raises(UserError, match="of no use"):
        check_machines(mine)


def test_a_refusal_waits_until_all_ranks_can_receive_it(tmp_path: Path) -> None:
    first = context(tmp_path, 0, trainer={"name": "unknown"})
    configure(first)
    assert isinstance(first.trouble, UserError)
    second = context(tmp_path, 1)
    second.comm = Second(first.trouble)
    assert "there is no trainer 'unknown'" in str(second.first_trouble(None))
