"""`ortflow find-lr`: the suggestion on known curves, and a test of a real run file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest
from in_process import command_here
from tiny_runs import Tiny

from ortflow.workflow.errors import UserError
from ortflow.workflow.planning.lr_range import points, rates, suggestion


def curve(loss: list[float]) -> list[float]:
    return [point.smoothed for point in points(iter(zip(rates(1e-6, 1, len(loss)), loss, strict=True)))]


def test_the_suggestion_is_in_the_steepest_part() -> None:
    lrs = rates(1e-6, 1, 100)
    assert (lrs[0], lrs[-1]) == (1e-6, pytest.approx(1))
    fall = [2 / (1 + (lr / 1e-3)) + 100 * max(0, lr - 0.1) for lr in lrs]
    found = suggestion(points(iter(zip(lrs, fall, strict=True))))
    assert 3e-4 < found < 1e-2


def test_it_ends_when_the_loss_diverges_or_is_not_finite() -> None:
    assert len(curve([2.0] * 20 + [1.0] * 20 + [90.0] * 60)) < 50
    assert len(curve([2.0] * 20 + [math.nan] * 80)) == 20
    assert len(curve([2.0] * 100)) == 100
    assert len(curve([-1.0] * 50 + [-2.0] * 50)) == 100


def test_a_loss_that_does_not_fall_is_one_sentence() -> None:
    lrs = rates(1e-6, 1, 30)
    for loss in ([1.0] * 30, [1.0 + step for step in range(30)], [math.nan] * 30):
        with pytest.raises(UserError, match="does not fall at any learning rate"):
            suggestion(points(iter(zip(lrs, loss, strict=True))))


def test_noise_is_no_descent() -> None:
    lrs, random = rates(1e-6, 1, 100), Random(0)
    flat = [2.3 + 0.1 * random.gauss(0, 1) for _ in lrs]
    with pytest.raises(UserError, match=r"the loss falls by .* no more than it varies between steps"):
        suggestion(points(iter(zip(lrs, flat, strict=True))))
    falls = [loss - 0.5 / (1 + 1e-3 / lr) for lr, loss in zip(lrs, flat, strict=True)]
    assert 1e-4 < suggestion(points(iter(zip(lrs, falls, strict=True)))) < 1e-1


def test_a_run_file(tmp_path: Path) -> None:
    Tiny.make(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    done = command_here(
        "find-lr", "run.yaml", "data.micro_batch=64", "--from", "1e-4", "--to", "10", "--json", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 1e-4 < found["suggestion"] < 10
    assert min(point["smoothed"] for point in found["points"]) < found["points"][0]["smoothed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    wrong = command_here("find-lr", "run.yaml", "--from", "1", "--to", "0.1", folder=tmp_path)
    assert wrong.returncode == 2
    assert "the smaller one first" in wrong.stderr
