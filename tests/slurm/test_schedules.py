"""Accidents at random moments, several over one run: the end is that of a run that nobody touched, and at every look
`status` agrees with what was really done.

pytest -m chaos tests/slurm/test_schedules.py                    # 20 schedules
ORTFLOW_CHAOS=2 pytest -m chaos tests/slurm/test_schedules.py    # the first two
ORTFLOW_SCHEDULES=40-59 pytest -m chaos …                        # others
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bed import FINAL
from cluster import Cluster, Run, both, clocks, same_end, slow
from fate import Fate
from project import Project

pytestmark = pytest.mark.chaos
FIRST, _, LAST = os.environ.get("ORTFLOW_SCHEDULES", "0-19").partition("-")
SCHEDULES = range(int(FIRST), int(LAST or FIRST) + 1)[: int(os.environ.get("ORTFLOW_CHAOS", "20"))]
EVENTS = 5
PATIENCE = 400.0
"""Seconds from the last event to the end."""
PATIENT = {"failures": 1000, "preemptions": 1000, "backoff": {"first": 0.0, "limit": 0.0}}


@pytest.fixture
def on_small_disk(cluster_of: Cluster, small_disk: Path) -> Iterator[Cluster]:
    """The project on a disk of its own, which can be filled."""
    folder = small_disk / "project"
    folder.mkdir()
    shutil.copy(cluster_of.project.folder / "model.onnx", folder)
    shutil.copytree(cluster_of.project.folder / "set", folder / "set")
    try:
        yield replace(cluster_of, project=Project(folder))
    finally:
        cluster_of.bed.restore()
        shutil.rmtree(folder)


@pytest.mark.parametrize("number", SCHEDULES)
def test_a_random_schedule(on_small_disk: Cluster, undisturbed: Run, number: int, tmp_path: Path) -> None:
    chance = random.Random(number)
    odd = both(slow(0.8), clocks(tmp_path))
    run = on_small_disk.submit(f"schedule-{number}", restart=PATIENT, **odd)
    fate = Fate(run, chance, tmp_path)
    helped = 0
    for _ in range(EVENTS):
        wait = chance.uniform(1.0, 14.0)
        end = time.monotonic() + wait
        while time.monotonic() < end:
            helped += helps(run, fate, fate.look())
        fate.strike(wait)
    fate.end()
    try:
        helped += follow(run, fate)
        print(f"schedule {number}: {'; '.join(fate.history)}; {fate.looks} looks, helped {helped} times")
        same_end(run, undisturbed)
        fate.reckon()
    finally:
        fate.end()


def follow(run: Run, fate: Fate) -> int:
    """Wait for the good end; how often help was needed."""
    helped = 0
    end = time.monotonic() + PATIENCE
    while (how := fate.look())["state"] != "finished":
        assert time.monotonic() < end, f"{fate.history}\n{how}\n{run.story()}"
        helped += helps(run, fate, how)
        assert helped <= EVENTS, f"{fate.history}\n{how}\n{run.story()}"
        time.sleep(1.0)
    while run.bed.state(run.job) not in FINAL:
        # A job may be left in the queue, on hold: `status` of the finished run names it.
        how = fate.look()
        assert time.monotonic() < end, f"{fate.history}\n{how}\n{run.story()}"
        helped += helps(run, fate, how)
        time.sleep(1.0)
    return helped


def helps(run: Run, fate: Fate, how: dict[str, Any]) -> bool:
    """Do what status asks of a person; whether there was anything to do."""
    if told := re.search(r"`(scontrol release \d+)`", how["waits"] or ""):
        # A daemon that came back with the job's old processes: Slurm holds the job until somebody looks.
        return run.bed.ask(*told[1].split()).returncode == 0
    if how["state"] not in ("lost", "failed") or how["waits"]:
        return False
    done = run.cluster.ortflow("resume", run.name, "--detach")
    if "out of disk on" in done.stderr:
        return False
    assert done.returncode == 0 or "in Slurm" in done.stderr, f"{fate.history}\n{done.stderr}\n{run.story()}"
    fate.resumed()
    return True
