"""NaN and infinity in samples, losses and models: what a run skips, what it survives, and what ends it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from project import command, curve, logs, of_kind
from small_network import save_model

pytestmark = pytest.mark.rotates

SAMPLES, STEPS = 320, 40
IGNORED = -100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and four sets of samples; every step of a run takes eight samples in order."""
    folder = tmp_path_factory.mktemp("not-finite")
    save_model(folder / "model.onnx")
    random = np.random.default_rng(1)
    x, labels = random.normal(size=(SAMPLES, 5)).astype("float32"), random.integers(0, 3, SAMPLES)
    damaged, unlabelled = x.copy(), labels.copy()
    for step in (1, 2, 9, 25, STEPS):
        damaged[8 * (step - 1) + 5, 2] = np.nan
        unlabelled[8 * (step - 1) : 8 * step] = IGNORED
    nothing = np.full_like(x, np.nan)
    nothing[-1] = x[-1]  # of the last step; a column without any number is refused before the first
    held_out = x.copy()
    held_out[37, 4] = np.nan
    held_out[90, 1] = np.inf
    for name, arrays in {
        "whole": (x, labels),
        "damaged": (damaged, labels),
        "unlabelled": (x, unlabelled),
        "nothing": (nothing, labels),
        "held-out": (held_out, labels),
    }.items():
        np.savez(folder / f"{name}.npz", x=arrays[0], labels=arrays[1])
        done = command("data", "convert", f"{name}.npz", "--output", f"{name}.arrow", folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def run(
    folder: Path, name: str, data: str, *, ranks: int = 1, held_out: str | None = None, **train: Any
) -> tuple[int, str, Path]:
    """Exit code, output and directory of a run."""
    content: dict[str, Any] = {
        "name": name,
        "model": {
            "path": "model.onnx",
            "loss": {"kind": "cross_entropy", "label": "labels", "ignore_index": IGNORED},
            "metrics": ["accuracy"],
        },
        "data": {"train": {"path": f"{data}.arrow"}, "shuffle": False, "micro_batch": 4 // ranks},
        "train": {
            "steps": STEPS,
            "gradient_accumulation": 2,
            "clip_norm": 1.0,
            "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
            **train,
        },
        "checkpoint": {"every_steps": 10},
        "resources": {"ranks_per_node": ranks, "cpus_per_rank": 1},
        "restart": {"failures": 3, "backoff": {"first": 0.0, "limit": 0.0}},
    }
    if held_out is not None:
        content["data"]["eval"] = {"path": f"{held_out}.arrow"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    done = command("run", f"{name}.yaml", folder=folder)
    run_dir = folder / "runs" / name
    return done.returncode, done.stdout + done.stderr + logs(run_dir), run_dir


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_sample_costs_its_step_and_leaves_no_trace(folder: Path, ranks: int) -> None:
    """The same curve as with those steps ignored: none of their gradients is used."""
    codes, output, (skipping, sparing) = zip(
        *(run(folder, f"{data}-{ranks}", data, ranks=ranks) for data in ("damaged", "unlabelled")), strict=True
    )
    assert codes == (0, 0), output
    reasons = {record["step"]: record["reason"] for record in of_kind(skipping, "skipped_step")}
    assert reasons == dict.fromkeys((1, 2, 9, 25, STEPS), "the loss is nan")
    assert len(of_kind(sparing, "skipped_step")) == len(reasons)
    followed = [point for point in curve(skipping) if point[0] not in reasons]
    assert followed == [point for point in curve(sparing) if point[0] not in reasons]
    assert all(math.isfinite(norm) for _, _, norm, _ in followed)


def test_a_run_whose_every_step_is_skipped_fails_and_is_not_tried_again(folder: Path) -> None:
    code, output, run_dir = run(folder, "nothing", "nothing", steps=5)
    assert code == 2, output
    assert "all 5 steps" in output
    assert "sample 0 of" in output
    assert "nan in column 'x'" in output
    assert "optimizer.lr" not in output
    assert "Traceback" not in output
    assert len(of_kind(run_dir, "attempt_start")) == 1
    assert not of_kind(run_dir, "finished")
    assert not (run_dir / "export" / "model.onnx").exists()
    again = command("resume", "nothing", folder=folder)
    assert again.returncode == 2, again.stdout + again.stderr


def test_a_run_whose_model_diverged_before_its_end_fails(folder: Path) -> None:
    """One update that is too large, then fewer skipped steps than would end a run."""
    diverges = {"optimizer": {"name": "sgd", "lr": 1e38}, "clip_norm": None, "steps": 5}
    code, output, run_dir = run(folder, "diverges", "whole", **diverges)
    assert code == 2, output
    assert 0 < len(of_kind(run_dir, "skipped_step")) < 5
    assert "the loss of the trained model is" in output
    assert "train.optimizer.lr" in output
    assert not of_kind(run_dir, "finished")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_in_the_evaluation_set_is_reported_with_its_sample_and_stops_nothing(folder: Path, ranks: int) -> None:
    watched = {"evaluation": {"every_steps": 5}, "early_stop": {"metric": "accuracy", "patience": 1}}
    code, output, run_dir = run(folder, f"held-out-{ranks}", "whole", ranks=ranks, held_out="held-out", **watched)
    assert code == 0, output
    assert not of_kind(run_dir, "early_stop")
    assert of_kind(run_dir, "finished")[0]["step"] == STEPS
    assert [record["loss"] for record in of_kind(run_dir, "evaluation")] == [None] * (STEPS // 5)
    warnings = [record["message"] for record in of_kind(run_dir, "warning")]
    assert sum("sample 37 of" in each and "nan in input 'x'" in each for each in warnings) == STEPS // 5
    assert "early_stop does not use it" in warnings[-1]
    assert "sample 37 of" in warnings[0]
    assert "nan in column 'x'" in warnings[0]
    assert "loss not finite" in output
    status = command("status", f"held-out-{ranks}", folder=folder)
    assert "loss not finite" in status.stdout


def test_an_evaluation_whose_infinity_the_model_makes_names_the_sample(folder: Path) -> None:
    """A finite value that overflows in the model: the sample is found by its loss."""
    arrays = np.load(folder / "whole.npz")
    x = arrays["x"].copy()
    x[21, 0] = 3e38
    np.savez(folder / "huge.npz", x=x, labels=arrays["labels"])
    assert command("data", "convert", "huge.npz", "--output", "huge.arrow", folder=folder).returncode == 0
    code, output, run_dir = run(folder, "huge", "whole", ranks=2, held_out="huge", steps=3)
    assert code == 0, output
    warnings = [record["message"] for record in of_kind(run_dir, "warning")]
    assert any("sample 21 of" in each and "finite" in each for each in warnings), warnings


def test_steps_in_a_row_that_the_data_spoils_are_its_fault(folder: Path) -> None:
    code, output, _ = run(folder, "spoiled", "nothing")
    assert code == 2, output
    assert "10 steps in a row" in output
    assert "sample 0 of" in output
    assert "optimizer.lr" not in output
