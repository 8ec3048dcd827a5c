"""TensorBoard's scalars: those of a period are written together, and none waits behind a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")

from ortflow.workflow.run.scalar_rows import records
from ortflow.workflow.run.tensorboard_scalars import ScalarLog
from ortflow.workflow.steps.monitor import Monitor


def test_scalars_wait_for_their_period_a_flush_or_the_end(tmp_path: Path) -> None:
    log = ScalarLog(tmp_path, 1, period=3600.0)
    sizes = [log.path.stat().st_size]
    for step in (1, 2):
        log.add(step, {"loss": 0.5})
        sizes.append(log.path.stat().st_size)
    log.flush()
    sizes.append(log.path.stat().st_size)
    log.add(3, {"loss": 0.25})
    log.close()
    sizes.append(log.path.stat().st_size)
    assert sizes[0] == sizes[1] == sizes[2] < sizes[3] < sizes[4]
    assert sizes[3] - sizes[2] == 2 * (sizes[4] - sizes[3])


def test_records_made_together_are_those_made_one_by_one(tmp_path: Path) -> None:
    """The same bytes, for steps of each length and values that fp32 does not have."""
    names = ("loss", "lr", "größe/" + "x" * 200)
    steps = [1, 2, 127, 128, 300, 16_383, 16_384, 2**31, 2**40, 2**40 + 1, 5, 6, 7]
    odd = [float("nan"), float("inf"), -0.0, 1e300, 1e-300]
    rows = [(1.7e9 + n / 7, step, (0.1 * n, 1e-3, odd[n % 5])) for n, step in enumerate(steps)]
    log = ScalarLog(tmp_path, 1)
    assert records(names, rows) == [log._record(log._message(names, *row).SerializeToString()) for row in rows]
    log.close()


def test_scalars_without_a_period_are_written_at_once(tmp_path: Path) -> None:
    log = ScalarLog(tmp_path, 1)
    before = log.path.stat().st_size
    log.add(1, {"loss": 0.5})
    assert log.path.stat().st_size > before
    log.close()


def test_the_stall_of_a_checkpoint_does_not_wait_for_the_period(tmp_path: Path) -> None:
    """A run that is killed now resumes from the checkpoint, and does not save it again."""
    monitor = Monitor.__new__(Monitor)
    log = monitor._writer = ScalarLog(tmp_path, 1, period=3600.0)
    before = log.path.stat().st_size
    monitor.stall(3, 0.5)
    assert log.path.stat().st_size > before
    log.close()
