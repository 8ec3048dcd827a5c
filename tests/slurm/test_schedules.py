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
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accidents import Accidents
from cluster import Cluster, Run, both, clocks, same_end, slow
from testbed import FINAL

pytestmark = pytest.mark.chaos
FIRST, _, LAST = os.environ.get("ORTFLOW_SCHEDULES", "0-19").partition("-")
SCHEDULES = range(int(FIRST), int(LAST or FIRST) + 1)[: int(os.environ.get("ORTFLOW_CHAOS", "20"))]
EVENTS = 5
AIM = 120.0
"""Seconds that an event waits for something that it can hit: a job that is queued again has ranks within 100."""
PATIENCE = 400.0
"""Seconds from the last event to the end."""
PATIENT = {"failures": 1000, "preemptions": 1000, "backoff": {"first": 0.0, "limit": 0.0}}


@pytest.mark.parametrize("number", SCHEDULES)
def test_a_random_schedule(on_small_disk: Cluster, undisturbed: Run, number: int, tmp_path: Path) -> None:
    chance = random.Random(number)
    odd = both(slow(1.2), clocks(tmp_path))
    client = replace(on_small_disk, ahead=chance.choice([-300.0, 0.0, 300.0]))
    run = client.submit(f"schedule-{number}", restart=PATIENT, **odd)
    accidents = Accidents(run, tmp_path)
    helped = 0
    try:
        for turn, event in enumerate(dealt(number)):
            # Each has chances of its own: what one has hit does not change what follows.
            own = random.Random(f"{number} {turn}")
            wait = own.uniform(1.0, 10.0)
            helped += look_for(run, accidents, wait)
            accidents.end()
            helped += strike(run, accidents, event, own, wait)
        accidents.end()
        helped += follow(run, accidents)
        print(
            f"schedule {number}, client {client.ahead:+g} s: {'; '.join(accidents.history)}; {accidents.looks} looks,",
            f"helped {helped} times",
        )
        same_end(run, undisturbed)
        accidents.reckon()
    finally:
        accidents.end()


def dealt(number: int) -> list[str]:
    """The events of a schedule, as from shuffled decks of cards: four schedules have all of them."""
    cards: list[str] = []
    for turn in range((number + 1) * EVENTS // len(Accidents.EVENTS) + 1):
        cards += random.Random(turn).sample(sorted(Accidents.EVENTS), len(Accidents.EVENTS))
    return cards[number * EVENTS : (number + 1) * EVENTS]


def look_for(run: Run, accidents: Accidents, seconds: float) -> int:
    """Look again and again; how often help was needed."""
    helped = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        helped += helps(run, accidents, accidents.look())
    return helped


def strike(run: Run, accidents: Accidents, event: str, own: random.Random, wait: float) -> int:
    """It happens once there is something to hit; how often help was needed for that."""
    helped = 0
    state = own.getstate()
    begun = time.monotonic()
    while not (hit := accidents.strike(event, own)) and time.monotonic() < begun + AIM:
        own.setstate(state)
        how = accidents.look()
        helped += helps(run, accidents, how)
        if how["state"] == "finished":
            break
    accidents.history.append(f"{wait:.1f} s: {event}" + ("" if hit else ": nothing to hit"))
    return helped


def follow(run: Run, accidents: Accidents) -> int:
    """Wait for the good end; how often help was needed."""
    helped = 0
    end = time.monotonic() + PATIENCE
    while (how := accidents.look())["state"] != "finished":
        assert time.monotonic() < end, f"{accidents.history}\n{how}\n{run.transcript()}"
        helped += helps(run, accidents, how)
        assert helped <= EVENTS, f"{accidents.history}\n{how}\n{run.transcript()}"
        time.sleep(1.0)
    while run.testbed.state(run.job) not in FINAL:
        # A job may be left in the queue, on hold: `status` of the finished run names it.
        how = accidents.look()
        assert time.monotonic() < end, f"{accidents.history}\n{how}\n{run.transcript()}"
        helped += helps(run, accidents, how)
        time.sleep(1.0)
    return helped


def helps(run: Run, accidents: Accidents, how: dict[str, Any]) -> bool:
    """Do what status asks of a person; whether there was anything to do."""
    if reported := re.search(r"`(scontrol release \d+)`", how["waits"] or ""):
        # A daemon that came back with the job's old processes: Slurm holds the job until somebody looks.
        return run.testbed.ask(*reported[1].split()).returncode == 0
    if how["state"] not in ("lost", "failed") or how["waits"]:
        return False
    done = run.cluster.ortflow("resume", run.name, "--detach")
    # The supervisor of a job that the controller has lost needs a moment to leave.
    if "out of disk on" in done.stderr or "is in use by process" in done.stderr:
        return False
    assert done.returncode == 0 or "in Slurm" in done.stderr, f"{accidents.history}\n{done.stderr}\n{run.transcript()}"
    accidents.resumed()
    return True
