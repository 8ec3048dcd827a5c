"""Two classes of PNG files to a trained model: rank and worker of the data are killed, and the bits stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchvision", reason="torchvision is not installed")
import psutil
import torch
from pictures import encoded
from project import curve, of_kind
from tiny_runs import Tiny, result
from torchvision.models.resnet import BasicBlock, ResNet

import ortflow
from ortflow.workflow.run.strike import FOLDER_VARIABLE, Plan

MEAN, STD = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]
RUN: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "path": "model.onnx",
        "loss": {"kind": "cross_entropy", "label": "labels"},
        "metrics": ["accuracy"],
    },
    "data": {
        "train": {
            "path": "animals/train",
            "images": {"resize": 18, "crop": 16, "mean": MEAN, "std": STD},
            "columns": {"x": "image", "labels": "label"},
            "transforms": [
                {"random_crop": {"scale": [0.6, 1.0]}},
                {"flip": "horizontal"},
                {"color_jitter": {"brightness": 0.2, "contrast": 0.2}},
                {"function": "my_changes.py:erase"},
            ],
        },
        "eval": {
            "path": "animals/eval",
            "images": {"resize": 18, "crop": 16, "mean": MEAN, "std": STD},
            "columns": {"x": "image", "labels": "label"},
        },
        "micro_batch": 4,
        "workers": 2,
    },
    "train": {"epochs": 2, "optimizer": {"name": "adamw", "lr": 1e-3}},
    "checkpoint": {"every_steps": 2},
    "resources": {"ranks_per_node": 1, "cpus_per_rank": 1},
    "restart": {"failures": 3, "backoff": {"first": 0.0, "limit": 0.0}},
}
FUNCTION = """
import contextlib, os, signal

def erase(image, random):
    if folder := os.environ.get("TEST_WORKERS_END"):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder + "/ended", os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
    top, left = random.integers(0, 12, 2)
    image[:, top : top + 4, left : left + 4] = 0
    return image
"""


def write_animals(root: Path, count: int) -> None:
    """Cats are bright above, dogs below."""
    random = np.random.default_rng(count)
    for name, rows in (("cat", slice(0, 10)), ("dog", slice(10, 20))):
        (root / name).mkdir(parents=True)
        for number in range(count):
            image = random.integers(0, 120, (20, 22, 3)).astype(np.uint8)
            image[rows] += 120
            (root / name / f"{number}.png").write_bytes(encoded(image))


def test_from_png_files_to_a_model(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    (tmp_path / "my_changes.py").write_text(FUNCTION)
    write_animals(tmp_path / "animals" / "train", 12)
    write_animals(tmp_path / "animals" / "eval", 3)
    torch.manual_seed(0)
    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=2)
    (tmp_path / "model.onnx").unlink()
    ortflow.export_for_training(network, torch.zeros(2, 3, 16, 16), tmp_path / "model.onnx")

    done = tiny.command("run", "run.yaml", timeout=200)
    assert done.code == 0, done.said
    expected, steps = result(tiny.run_dir), len(curve(tiny.run_dir))
    assert steps == 12
    assert json.loads((tiny.run_dir / "export" / "classes.json").read_text()) == ["cat", "dog"]
    assert json.loads((tiny.run_dir / "plan.json").read_text())["classes"] == {"0": "cat", "1": "dog"}
    (wait,) = of_kind(tiny.run_dir, "data_wait")
    assert 0 <= wait["share"] <= 1

    struck = tmp_path / "struck"
    struck.mkdir()
    Plan(steps=steps + 1, signal="SIGKILL", step=5).write(struck)
    changes = {FOLDER_VARIABLE: str(struck), "TEST_WORKERS_END": str(struck)}
    again = tiny.command("run", "run.yaml", "--fresh", timeout=200, **changes)
    assert again.code == 0, again.said
    assert (struck / "struck").exists()
    assert (struck / "ended").exists(), "a worker of the data was killed"
    assert len(of_kind(tiny.run_dir, "resume")) == 1
    assert result(tiny.run_dir) == expected
    workers = [
        each for each in psutil.process_iter(["cmdline"]) if "ortflow.workflow.data.worker" in each.info["cmdline"]
    ]
    assert not [each for each in workers if each.cwd() == str(tmp_path)]
