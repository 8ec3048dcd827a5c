"""Two generations of ranks on one run directory: the older one exits immediately, and writes nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waits import PATIENCE

from ortflow.workflow.run.fence import DELAY, EXIT_FENCED, VARIABLE, Owner, claim, of_this_rank
from ortflow.workflow.run.rundir import RunDir

STUCK = """
import sys, time
from pathlib import Path
from ortflow.workflow.run.fence import of_this_rank
from ortflow.workflow.run.rundir import RunDir
fence = of_this_rank(RunDir(Path(sys.argv[1])))
fence.watch()
print("watching", flush=True)
time.sleep(3600)  # a rank that never comes back to a place where it could look
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_an_owner_loses_nothing_to_itself(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner fences off ranks of its own earlier attempts, and is fenced off only by other owners."""
    ours, theirs = Owner(run), Owner(run)
    assert not ours.lost
    monkeypatch.setenv(VARIABLE, ours.renew(attempt=0))
    ranks = of_this_rank(run)
    assert not ranks.lost
    ours.renew(attempt=1)
    assert ranks.lost
    assert not ours.lost
    assert not theirs.lost, "it has claimed nothing yet"
    theirs.renew()
    assert ours.lost
    assert not theirs.lost


def test_a_claim_fences_off_the_one_before(run: RunDir) -> None:
    first = claim(run, job="7", restarts=0)
    assert not first.lost
    second = claim(run, job="7", restarts=1)
    assert first.lost
    assert not second.lost


def test_an_unreadable_file_fences_nothing_off(run: RunDir) -> None:
    fence = claim(run)
    run.owner.write_text("{")
    assert not fence.lost
    run.owner.unlink()
    assert not fence.lost


def test_a_rank_that_hangs_leaves_within_the_delay(run: RunDir) -> None:
    command = [sys.executable, "-c", STUCK, str(run.root)]
    spent = []
    while not spent or (min(spent) >= DELAY and len(spent) < 5):  # a busy machine may hold it up now and then
        token = claim(run).token
        with subprocess.Popen(command, env={**os.environ, VARIABLE: token}, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "watching\n"
            claim(run)
            started = time.monotonic()
            words, _ = child.communicate(timeout=PATIENCE)
        spent.append(time.monotonic() - started)
        assert child.returncode == EXIT_FENCED
        assert "a newer attempt owns the run directory" in words
    assert min(spent) < DELAY


def test_a_rank_without_a_token_has_no_fence(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    claim(run)
    fence = of_this_rank(run)
    fence.hold()
    assert not fence.lost
