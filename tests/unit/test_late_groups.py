"""`ortflow validate` warns of groups that stay frozen until the run has ended."""

from __future__ import annotations

from pathlib import Path

from in_process import command_here
from tiny_runs import RUN, Tiny


def test_a_group_that_is_never_trained(tmp_path: Path) -> None:
    groups = [
        {"match": ["w"], "frozen_until": "12 steps"}, {"match": ["b"], "frozen_until": "11 steps"},
        {"match": ["u"], "frozen_until": "1 epochs"}, {"match": ["shift"], "frozen_until": "0.7 epochs"},
    ]  # fmt: skip
    Tiny.make(tmp_path, train={**RUN["train"], "groups": groups})
    done = command_here("validate", "run.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "frozen_until" in line]
    assert [line.split(":")[1] for line in warnings] == [
        " train.groups[0].frozen_until is 12 steps, and the run ends after 12 steps",
        " train.groups[2].frozen_until is 1 epochs, and the run ends after 12 steps",
    ]
