"""Which checkpoint is one of a run, and why another one is not."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from ortflow.workflow.checkpoint.checkpoint_names import MANIFEST
from ortflow.workflow.checkpoint.identity import Identity, difference
from ortflow.workflow.checkpoint.manifest import mark
from ortflow.workflow.checkpoint.program import ProgramManifest
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.errors import UserError
from ortflow.workflow.steps.identity import refuse_other_runs

RUN = Identity(id="a", name="run", submitted="1000.5", seed="7", model="m", data="d")


def saved_by(run: Identity | None, moment: float = 2000.0) -> ProgramManifest:
    return ProgramManifest(1, 1, (), moment, run={} if run is None else run.to_json())


def date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def test_an_identity_is_read_as_it_was_written() -> None:
    assert Identity.from_json(RUN.to_json()) == RUN
    assert Identity.from_json(RUN.to_json() | {"more": "1"}) == RUN
    for key in RUN.to_json():
        assert Identity.from_json({name: text for name, text in RUN.to_json().items() if name != key}) is None


def test_only_the_id_decides() -> None:
    other = Identity(id="a", name="renamed", submitted="1", seed="8", model="n", data="e")
    assert difference(saved_by(other), RUN) is None
    assert (
        difference(saved_by(dataclasses.replace(RUN, id="b")), RUN)
        == f"is of another run (run, submitted on {date(1000.5)})"
    )


@pytest.mark.parametrize(
    ("changes", "details"),
    [
        ({"seed": "8"}, "; seed 8 there and 7 here"),
        ({"model": "n"}, "; another model"),
        ({"data": "e"}, "; other data"),
        ({"data": "e", "seed": "8"}, "; seed 8 there and 7 here; other data"),
    ],
)
def test_another_run_is_described(changes: dict[str, str], details: str) -> None:
    other = dataclasses.replace(RUN, id="b", name="other", submitted="", **changes)
    assert difference(saved_by(other), RUN) == f"is of another run (other{details})"


@pytest.mark.parametrize(
    ("moment", "submitted", "older"), [(999.0, "1000.5", True), (1000.5, "1000.5", False), (1.0, "", False)]
)
def test_a_checkpoint_without_identity_is_another_runs_if_it_is_older(
    moment: float, submitted: str, older: bool
) -> None:
    reason = difference(saved_by(None, moment), dataclasses.replace(RUN, submitted=submitted))
    assert reason == (f"was saved on {date(moment)}, before this run was submitted" if older else None)


@pytest.mark.parametrize("name", ["step-00000001", ".replaced-step-00000001"])
def test_a_folder_with_a_checkpoint_of_another_run_is_refused(name: str, tmp_path: Path) -> None:
    """Under the name of a checkpoint, or under that from which the next start gives it its name back."""
    store = DirectoryStore(tmp_path)
    data = saved_by(dataclasses.replace(RUN, id="b")).encode()
    (store.begin(1, 0) / MANIFEST).write_bytes(data)
    store.commit(1, 0, mark(data)).rename(tmp_path / name)
    with pytest.raises(UserError, match="is of another run") as refused:
        refuse_other_runs(store, RUN, "use another")
    assert refused.value.where == str(tmp_path / name)
    assert (tmp_path / name).is_dir()
