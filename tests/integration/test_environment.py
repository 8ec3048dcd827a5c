"""A run records its environment: it resumes bit for bit in the same one, or reports what differs, or refuses."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from messages import mentions
from project import command, curve, logs, of_kind
from small_network import save_model

from ortflow.workflow.kernels.library import find_library

HALF, WHOLE = 10, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of ten steps, and one of twenty that was never stopped."""
    folder = tmp_path_factory.mktemp("environment")
    save_model(folder / "model.onnx")
    random = np.random.default_rng(1)
    np.savez(folder / "set.npz", x=random.normal(size=(160, 5)).astype("float32"), labels=random.integers(0, 3, 160))
    done = command("data", "convert", "set.npz", "--output", "set.arrow", folder=folder)
    assert done.returncode == 0, done.stderr
    for name, steps in (("half", HALF), ("whole", WHOLE)):
        content = {
            "name": name,
            "model": {"path": "model.onnx", "loss": {"kind": "cross_entropy", "label": "labels"}},
            "data": {"train": {"path": "set.arrow"}, "micro_batch": 4},
            "train": {"steps": steps, "optimizer": {"name": "adamw", "lr": 1e-2}},
            "checkpoint": {"every_steps": 5},
            "resources": {"cpus_per_rank": 1},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        done = command("run", f"{name}.yaml", folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def stopped(folder: Path, name: str) -> Path:
    """A copy of the run of ten steps, in a directory of its own."""
    run_dir = folder / "runs" / name
    shutil.copytree(folder / "runs" / "half", run_dir)
    return run_dir


def resume(folder: Path, run_dir: Path, *values: str, **environment: str) -> tuple[int, str]:
    """Exit code and all output."""
    done = command("resume", run_dir.name, f"train.steps={WHOLE}", *values, folder=folder, **environment)
    return done.returncode, done.stdout + done.stderr + logs(run_dir)


def undisturbed(folder: Path) -> list[Any]:
    return curve(folder / "runs" / "whole")


def test_every_checkpoint_has_it_on_record(folder: Path) -> None:
    run_dir = folder / "runs" / "half"
    (recorded,) = of_kind(run_dir, "environment")
    manifest = json.loads((run_dir / "checkpoints" / f"step-{HALF:08d}" / "manifest.json").read_text())
    assert manifest["environment"].items() <= recorded.items()
    assert manifest["environment"].keys() == {
        "kernels", "package", "onnxruntime", "settings", "graphs", "device", "instructions", "library", "threads",
        "asked",
    }  # fmt: skip
    (checked,) = of_kind(run_dir, "runtime_check")
    assert (checked["version"], checked["settings"], checked["faults"]) == (recorded["onnxruntime"], "none", {})
    shown = command("checkpoint", "show", "half", folder=folder)
    assert f"computed  onnxruntime: {recorded['onnxruntime']}" in shown.stdout


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("graphs/train.kernels.onnx", Path.unlink),
        ("graphs/train.onnx", flip),
        ("graphs/graphs.json", cut),
        ("graphs", shutil.rmtree),
        ("plan.json", cut),
    ],
)
def test_graphs_that_are_gone_or_damaged_are_built_again(
    folder: Path, name: str, harm: Callable[[Path], None], request: pytest.FixtureRequest
) -> None:
    run_dir = stopped(folder, f"harmed-{abs(hash(request.node.name))}")
    before = {path.name: path.read_bytes() for path in (run_dir / "graphs").iterdir()}
    harm(run_dir / name)
    code, output = resume(folder, run_dir)
    assert code == 0, output
    assert name in output
    assert "rebuilt" in output
    assert curve(run_dir) == undisturbed(folder)
    assert {path.name: path.read_bytes() for path in (run_dir / "graphs").iterdir()} == before


def test_an_export_does_without_graphs_that_are_damaged(folder: Path) -> None:
    run_dir = stopped(folder, "exported")
    graph, exported = run_dir / "graphs" / "infer.onnx", run_dir / "export" / "model.onnx"
    before = exported.read_bytes()
    flip(graph)
    done = command("export", "exported", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mentions(done.stderr, f"{graph} is damaged … rebuilt")
    assert exported.read_bytes() == before


def no_compiler(folder: Path) -> dict[str, str]:
    """An environment without compiled kernels, and without a compiler that could make them."""
    fake = folder / "fake"
    for name in ("ziglang", "cache", "home", "temporary"):
        (fake / name).mkdir(parents=True, exist_ok=True)
    (fake / "ziglang" / "__init__.py").touch()
    return {
        "PATH": str(Path(sys.executable).parent),
        "PYTHONPATH": str(fake),
        "ORTFLOW_CACHE": str(fake / "cache"),
        "XDG_CACHE_HOME": str(fake / "home"),
        "TMPDIR": str(fake / "temporary"),
        "CC": "nonesuch",
    }


@pytest.mark.skipif(find_library().path is None, reason="there are no kernels to lose")
def test_other_kernels_are_refused_and_then_accepted(folder: Path) -> None:
    run_dir = stopped(folder, "kernels")
    code, output = resume(folder, run_dir, **no_compiler(folder))
    assert code == 2, output
    assert "kernels: ortflow's" in output
    assert "checkpoint.exact=false" in output
    assert curve(run_dir) == curve(folder / "runs" / "half"), "nothing has changed"
    code, output = resume(folder, run_dir, "checkpoint.exact=false", **no_compiler(folder))
    assert code == 0, output
    (warning,) = of_kind(run_dir, "warning")
    assert "kernels: ortflow's" in warning["message"]
    assert warning["message"] in output
    for point, expected in zip(curve(run_dir), undisturbed(folder), strict=True):
        assert point == pytest.approx(expected, rel=1e-4)
    # From here on it is a run with the other kernels, and it resumes with these.
    code, output = resume(folder, run_dir, "checkpoint.exact=true", "train.steps=25", **no_compiler(folder))
    assert code == 0, output


def test_requested_other_kernels_are_only_reported(folder: Path) -> None:
    run_dir = stopped(folder, "asked")
    code, output = resume(folder, run_dir, "resources.kernels=onnxruntime")
    assert code == 0, output
    if find_library().path is not None:
        assert "kernels: ortflow's" in of_kind(run_dir, "warning")[0]["message"]


def test_another_number_of_threads_is_reported(folder: Path) -> None:
    run_dir = stopped(folder, "threads")
    code, output = resume(folder, run_dir, "resources.cpus_per_rank=2")
    assert code == 0, output
    (warning,) = of_kind(run_dir, "warning")
    assert "threads a rank: 1 before, 2 now" in warning["message"]


def test_another_training_graph_is_refused(folder: Path) -> None:
    """The model file holds another network with the same parameters."""
    run_dir = stopped(folder, "model")
    model = folder / "model.onnx"
    whole = model.read_bytes()
    save_model(model, "Tanh")
    try:
        code, output = resume(folder, run_dir)
        assert code == 2, output
        assert "training graph: " in output
        assert curve(run_dir) == curve(folder / "runs" / "half"), "nothing has changed"
        model.write_bytes(whole)
        code, output = resume(folder, run_dir)
        assert code == 0, output
        assert curve(run_dir) == undisturbed(folder)
    finally:
        model.write_bytes(whole)
