"""A rank that fails alone in the check of the gradient, which all ranks of a divided model run, ends the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from caches import cache_without_gradients
from kernels import needs_kernels
from messages import mentions
from project import logs
from tiny_runs import RUN, Tiny

from ortflow.workflow.run.rundir import RunDir

pytestmark = [needs_kernels, pytest.mark.rotates]
FAULTS = str(Path(__file__).parent.parent / "support" / "faults")
TWO = {"resources": {"ranks_per_node": 2, "cpus_per_rank": 1}, "train": {**RUN["train"], "steps": 2}}
STAGES: dict[str, Any] = {**TWO, "parallel": {"pipeline": 2, "cuts": [["r"]]}}
SHARDED: dict[str, Any] = {**TWO, "parallel": {"zero": 3}}
SECONDS = 90
"""A run takes two, and one that hangs until its ranks count as hung, 1,800."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where no check is remembered: one that has passed before would not run."""
    return str(cache_without_gradients(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize(("error", "code"), [("UserError", 2), ("OrtflowError", 1), ("RuntimeError", 1)])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("layout", "precise"),
    [(STAGES, False), (STAGES, True), (SHARDED, False)],
    ids=["stages", "stages in another precision", "sharded"],
)
def test_the_others_do_not_wait_for_it(
    layout: dict[str, Any], precise: bool, rank: int, error: str, code: int, cache: str, tmp_path: Path
) -> None:
    tiny = Tiny.make(tmp_path, **layout, restart={"failures": 0})
    changes = {"PRECISE": "1"} if precise else {}
    done = tiny.command(
        "run", "run.yaml", timeout=SECONDS, PYTHONPATH=FAULTS, CHECK=f"{rank} {error}", XDG_CACHE_HOME=cache,
        **changes,
    )  # fmt: skip
    assert done.code == code, done.said + logs(tiny.run_dir)
    assert mentions(done.said, "injected failure in the check")
    if code != 2:
        ends = [record for record in RunDir(tiny.run_dir).read_attempts() if record["event"] == "end"]
        assert [end["outcome"] for end in ends] == ["failure"]


@pytest.mark.parametrize("layout", [STAGES, SHARDED], ids=["stages", "sharded"])
def test_a_check_in_another_precision_leaves_the_run_as_it_was(layout: dict[str, Any], tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "project", **layout)
    done = tiny.command(
        "run", "run.yaml", PYTHONPATH=FAULTS, PRECISE="1", XDG_CACHE_HOME=str(cache_without_gradients(tmp_path))
    )
    assert done.code == 0, done.said + logs(tiny.run_dir)
