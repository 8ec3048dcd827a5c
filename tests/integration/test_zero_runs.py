"""Whole runs under ZeRO: killed and resumed with other ranks and stages, they end as an undisturbed run does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from caches import cache_without_gradients
from killing import run_and_kill
from messages import mentions
from project import Project, command, curve, logs, of_kind

pytestmark = pytest.mark.rotates

LAMB = {"name": "lamb", "lr": 5e-3, "weight_decay": 0.1}
SHAPE: dict[str, Any] = {
    "parallel": {"zero": 2}, "train__gradient_accumulation": 2, "data__micro_batch": 2, "train__optimizer": LAMB,
    "resources__ranks_per_node": 3, "resources__cpus_per_rank": 1, "train__schedule": {"name": "constant"},
    "train__steps": 12, "checkpoint__every_steps": 2, "train__evaluation": {"every_steps": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("zero"), dropout=0.0)


@pytest.fixture(scope="module", params=[2, 3])
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def shape(stage: int) -> dict[str, Any]:
    return {**SHAPE, "parallel": {"zero": stage}}


@pytest.fixture(scope="module")
def undisturbed(project: Project, stage: int, shape: dict[str, Any]) -> Path:
    return project.run(f"undisturbed{stage}", **shape)


def exported(run_dir: Path) -> bytes:
    return (run_dir / "export" / "model.onnx").read_bytes()


def same_curve(found: Path, expected: Path) -> None:
    for (step, loss, norm, _), (same_step, same_loss, same_norm, _) in zip(curve(found), curve(expected), strict=True):
        assert step == same_step
        assert loss == pytest.approx(same_loss, rel=2e-5)
        assert norm == pytest.approx(same_norm, rel=2e-3)


def test_the_run_is_that_without_zero(project: Project, undisturbed: Path, stage: int) -> None:
    alone = {"resources__ranks_per_node": 1, "train__gradient_accumulation": 6, "parallel": {"zero": 0}}
    plain = project.run("plain", **{**SHAPE, **alone})
    same_curve(undisturbed, plain)
    (here,), (there,) = of_kind(undisturbed, "memory"), of_kind(plain, "memory")
    assert there["moments"] / 3 <= here["moments"] < there["moments"] / 3 + 2 * 4 * 64
    part = {2: 2 / 3, 3: 1 / 6}[stage]
    assert there["gradients"] * part <= here["gradients"] < there["gradients"] * part + 4 * 64
    assert f"ZeRO stage {stage}: 2 moments x 4 bytes x " in logs(undisturbed)
    if stage == 2:
        (allocated,) = re.findall(
            r"gradients 4 bytes x \((\d+) \+ \1 / 3 ranks\) = \d+ bytes, (\d+) allocated", logs(undisturbed)
        )
        assert 4 * int(allocated[0]) == there["gradients"] / 2, "the run without accumulates in a buffer of that size"
        assert int(allocated[1]) == here["gradients"]
    if stage == 3:
        assert there["parameters"] / 3 <= here["parameters"] < there["parameters"] / 3 + 4 * 64
        assert mentions(logs(undisturbed), "ZeRO stage 3 … 2 x 4 bytes x")
        assert 0 < here["messages"] < there["parameters"], "several layers"


def test_a_killed_rank_ends_the_attempt_and_the_next_has_the_same_end(
    project: Project, undisturbed: Path, shape: dict[str, Any], stage: int
) -> None:
    run_dir = run_and_kill(project, project.write(f"killed{stage}", **shape), rank=1, step=4)
    assert curve(run_dir) == curve(undisturbed)
    assert exported(run_dir) == exported(undisturbed)


def test_a_run_continues_with_other_stages_and_ranks(project: Project, undisturbed: Path, stage: int) -> None:
    """Three ranks under this stage, one without ZeRO, two under stage 1, and three under this one again; the model is
    that of an undisturbed run."""
    for steps, ranks, zero in ((4, 3, stage), (7, 1, 0), (9, 2, 1), (12, 3, stage)):
        changes = {"train__steps": steps, "resources__ranks_per_node": ranks, "parallel": {"zero": zero}}
        run_dir = project.run(f"moves{stage}", **{**SHAPE, **changes})
    assert [(r["step"], r["world_size"]) for r in of_kind(run_dir, "resume")] == [(4, 1), (7, 2), (9, 3)]
    same_curve(run_dir, undisturbed)
    whole = command("export", str(run_dir), "--output", f"again{stage}.onnx", folder=project.folder)
    assert whole.returncode == 0, whole.stderr
    assert (project.folder / f"again{stage}.onnx").read_bytes() == exported(run_dir)


def test_a_reshaped_checkpoint_is_what_those_ranks_would_have_saved(project: Project) -> None:
    """Two ranks resume from the checkpoint of three, and from the same one reshaped for two: the same bits."""
    short = {**SHAPE, "train__steps": 4}
    longer = {"train__steps": 8, "resources__ranks_per_node": 2}
    run_dir = project.run("reshaped", **short)
    shutil.copytree(run_dir, saved := project.folder / "saved", symlinks=True)
    direct = project.run("reshaped", **{**SHAPE, **longer}).rename(project.folder / "direct")
    shutil.copytree(saved, run_dir, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
    output = str(run_dir / "checkpoints")
    done = command("checkpoint", "reshape", str(saved), "--ranks", "2", "--output", output, folder=project.folder)
    assert done.returncode == 0, done.stderr
    reshaped = project.run("reshaped", **{**SHAPE, **longer})
    assert [r["step"] for r in of_kind(reshaped, "resume")] == [r["step"] for r in of_kind(direct, "resume")] == [4]
    assert curve(reshaped) == curve(direct)
    assert exported(reshaped) == exported(direct)


def test_the_gradient_is_checked_with_shares(project: Project, tmp_path: Path) -> None:
    """In a cache of its own, so that no earlier check is remembered."""
    file = project.write("checked", **{**SHAPE, "parallel": {"zero": 3}, "train__steps": 2})
    done = command("run", file.name, folder=project.folder, XDG_CACHE_HOME=str(cache_without_gradients(tmp_path)))
    run_dir = project.run_dir("checked")
    assert done.returncode == 0, logs(run_dir)
    (checked,) = of_kind(run_dir, "gradient_check")
    assert mentions(checked["compared"], "tensors against", "differences")


def test_dropout_draws_the_masks_that_it_draws_without_zero(tmp_path: Path) -> None:
    dropping = Project.make(tmp_path / "dropping", dropout=0.2)
    shape = {**SHAPE, "resources__ranks_per_node": 2, "train__steps": 6}
    alone = {"resources__ranks_per_node": 1, "train__gradient_accumulation": 4, "parallel": {"zero": 0}}
    plain = dropping.run("plain", **{**shape, **alone})
    same_curve(dropping.run("sharded", **{**shape, "parallel": {"zero": 3}}), plain)
