"""Accidents at random moments, several over one run: the end is that of a run that nobody touched, and at every look
`ortflow status` says what was really done to it.

pytest -m chaos tests/kubernetes/test_kubernetes_schedules.py                    # 20 schedules; half an hour
ORTFLOW_CHAOS=2 pytest -m chaos tests/kubernetes/test_kubernetes_schedules.py    # a short round
ORTFLOW_SCHEDULES=40-59 pytest -m chaos …                                        # others
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from kubernetes_accidents import NOTHING, Accidents, clocks_of
from kubernetes_cluster import Cluster, same_end, slow
from kubernetes_disk import SmallDisk
from kubernetes_testbed import Testbed
from kubernetes_truth import Truth

FIRST, _, LAST = os.environ.get("ORTFLOW_SCHEDULES", "0-19").partition("-")
SCHEDULES = range(int(FIRST), int(LAST or FIRST) + 1)[: int(os.environ.get("ORTFLOW_CHAOS", "20"))]
EVENTS = 4
PATIENCE = 400.0
"""Seconds from the last event to the end."""
PAUSE = 1.0
"""Seconds between two looks."""
AIM = 30.0
"""Seconds that an event waits for something that it can hit."""
PATIENT = {"failures": 1000, "preemptions": 1000, "backoff": {"first": 0.0, "limit": 0.0}, "hung_seconds": 75.0}


@pytest.mark.chaos
@pytest.mark.parametrize("number", SCHEDULES)
def test_a_random_schedule(
    kubernetes_testbed: Testbed, cluster: Cluster, left_alone: Path, small_disk: SmallDisk, number: int
) -> None:
    chance = random.Random(number)
    clocks, variables = clocks_of(cluster)
    changes = slow(cluster, 0.5)
    changes["backends__kubernetes__env"] |= variables
    supervised = chance.random() < 0.5
    run = cluster.submit(f"schedule-{number}", restart=PATIENT, backends__kubernetes__supervisor=supervised, **changes)
    accidents = Accidents(run, number, small_disk, clocks)
    truth = Truth(run, accidents, chance.choice([-300.0, 0.0, 300.0]))
    history: list[str] = []
    try:
        for event in dealt(number):
            wait = chance.uniform(1.0, 14.0)
            look_for(truth, wait)
            history.append(f"{wait:.1f} s: {strike(truth, accidents, event)}")
        look_for(truth, chance.uniform(1.0, 14.0))
        accidents.mend()
        helped = follow(truth, accidents, history)
        print(f"schedule {number}: {'; '.join(history)}; {truth.looks} looks, helped {helped} times")
    finally:
        print(truth.transcript(), flush=True)
        accidents.mend()
    same_end(run.run_dir, left_alone)
    accidents.reckon()


def test_a_short_schedule(cluster: Cluster, left_alone: Path) -> None:
    """A rank is killed, and the run suspended; the client's clock is ahead."""
    run = cluster.submit("short", restart=PATIENT, **slow(cluster, 0.1))
    accidents = Accidents(run, 0, None, None)
    truth = Truth(run, accidents, 300.0)
    for step, event in ((8, "a rank killed"), (15, "suspended")):
        run.until_step(step)
        assert accidents.strike(event) == event
        look_for(truth, 1.0)
    follow(truth, accidents, [])
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["failure", "preempted", "finished"]
    accidents.reckon()


def dealt(number: int) -> list[str]:
    """The events of a schedule, as from shuffled decks of cards: six schedules have all of them."""
    cards: list[str] = []
    for turn in range((number + 1) * EVENTS // len(Accidents.EVENTS) + 1):
        cards += random.Random(turn).sample(sorted(Accidents.EVENTS), len(Accidents.EVENTS))
    return cards[number * EVENTS : (number + 1) * EVENTS]


def look_for(truth: Truth, seconds: float) -> None:
    """Look again and again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        truth.look()
        time.sleep(PAUSE)


def strike(truth: Truth, accidents: Accidents, event: str) -> str:
    """It happens once there is something to hit: a pod, or a rank; what came of it."""
    end = time.monotonic() + AIM
    while NOTHING in (reported := accidents.strike(event)) and time.monotonic() < end:
        if truth.look()["state"] == "finished":
            break
        time.sleep(PAUSE)
    return reported


def follow(truth: Truth, accidents: Accidents, history: list[str]) -> int:
    """Wait for the good end; what status says that a person has to do is done. How often."""
    helped = 0
    accidents.mend()
    run = truth.run
    end = time.monotonic() + PATIENCE
    while (how := truth.look())["state"] != "finished":
        assert time.monotonic() < end, f"{history}\n{truth.transcript()}\n{run.transcript()}"
        reported = str(how["waits"] or "")
        if "`ortflow supervise` has it replaced" in reported:
            helped += 1
            run.cluster.ortflow("supervise", run.name, timeout=PATIENCE)
        elif how["state"] in ("lost", "preempted"):
            helped += 1
            done = run.cluster.ortflow("resume", run.name)
            assert done.returncode == 0, f"{history}\n{done.stderr}\n{run.transcript()}"
        assert helped <= EVENTS, f"{history}\n{truth.transcript()}\n{run.transcript()}"
        time.sleep(PAUSE)
    return helped
