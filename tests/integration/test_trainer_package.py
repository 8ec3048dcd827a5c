"""A trainer without a graph, installed as a package: a whole run, killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from data_sets import write_batches
from messages import mentions
from project import ORTFLOW, command, curve, environment, logs, of_kind

from ortflow.launchers.supervision.processes import family, ranks_among

PACKAGES = Path(__file__).parent.parent / "trainers"
WEIGHT, BIAS = np.array([2.0, -1.0, 0.5], np.float32), 3.0
STEPS = 60
RUN: dict[str, Any] = {
    "name": "linear",
    "trainer": {"name": "linear", "options": {"target": "y"}},
    "data": {"train": "train.arrow", "eval": "eval.arrow", "micro_batch": 4},
    "train": {
        "steps": STEPS,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5},
        "schedule": "cosine",
        "evaluation": {"every_steps": 20},
    },
    "checkpoint": {"every_steps": 5},
    "export": {"path": "export/model.npz"},
    "resources": {"ranks_per_node": 2, "cpus_per_rank": 1},
    "restart": {"failures": 3, "backoff": {"first": 0.0, "limit": 0.0}},
}


@dataclass(frozen=True)
class Site:
    """A folder with two data sets, and the packages installed beside ortflow."""

    folder: Path
    packages: Path

    def write(self, name: str, **sections: Any) -> Path:
        (self.folder / "run.yaml").write_text(yaml.safe_dump({**RUN, "name": name, **sections}))
        return self.folder / "runs" / name

    def ortflow(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return command(*arguments, folder=self.folder, timeout=240, PYTHONPATH=str(self.packages))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("linear")
    install = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "packages")]
    for name in ("linear", "scaled"):
        shutil.copytree(PACKAGES / name, folder / f"source-{name}")
        subprocess.run([sys.executable, "-m", "pip", *install, str(folder / f"source-{name}")], check=True)
    random = np.random.default_rng(0)
    for name, count in (("train", 256), ("eval", 64)):
        x = random.normal(size=(count, 3)).astype(np.float32)
        write_batches(folder / f"{name}.arrow", {"x": x, "y": x @ WEIGHT + np.float32(BIAS)})
    return Site(folder, folder / "packages")


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Path:
    run_dir = site.write("whole")
    done = site.ortflow("run", "run.yaml")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs(run_dir)}"
    return run_dir


def test_a_run_trains_and_every_command_finds_it(site: Site, undisturbed: Path) -> None:
    assert [record["step"] for record in of_kind(undisturbed, "step")] == list(range(1, STEPS + 1))
    assert of_kind(undisturbed, "evaluation")[-1]["loss"] < 1e-2
    with np.load(undisturbed / "export" / "model.npz") as model:
        np.testing.assert_allclose(model["weight"], WEIGHT, atol=0.1)
        np.testing.assert_allclose(model["bias"], [BIAS], atol=0.1)
    status = json.loads(site.ortflow("status", "whole", "--json").stdout)
    assert (status["state"], status["step"]) == ("finished", STEPS)
    verified = site.ortflow("checkpoint", "verify", "whole")
    assert verified.returncode == 0, verified.stderr
    exported = site.ortflow("export", "whole", "--step", str(STEPS), "-o", "again.npz")
    assert exported.returncode == 0, exported.stderr
    assert (site.folder / "again.npz").read_bytes() == (undisturbed / "export" / "model.npz").read_bytes()


def begun(site: Site, run_dir: Path, step: int, rank: int = 1) -> subprocess.Popen[bytes]:
    """The run, started and past a step."""
    launcher = subprocess.Popen(
        [*ORTFLOW, "run", "run.yaml"], cwd=site.folder, env=environment(PYTHONPATH=str(site.packages)),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    events, end = run_dir / "events" / f"rank-{rank:04d}.jsonl", time.monotonic() + 240
    while not events.exists() or f'"step":{step},' not in events.read_text():
        assert launcher.poll() is None, logs(run_dir)
        assert time.monotonic() < end, logs(run_dir)
        time.sleep(0.005)
    return launcher


def test_a_killed_rank_costs_nothing(site: Site, undisturbed: Path) -> None:
    run_dir = site.write("rank")
    launcher = begun(site, run_dir, 12)
    ranks_among(family(psutil.Process(launcher.pid)))[1].kill()
    assert launcher.wait(timeout=240) == 0, logs(run_dir)
    assert of_kind(run_dir, "resume")[0]["step"] in range(5, STEPS, 5)
    assert curve(run_dir) == curve(undisturbed)


def test_a_killed_launcher_costs_nothing(site: Site, undisturbed: Path) -> None:
    run_dir = site.write("launcher")
    launcher = begun(site, run_dir, 12)
    below = family(psutil.Process(launcher.pid))
    launcher.kill()
    launcher.wait()
    psutil.wait_procs(below, timeout=60)
    done = site.ortflow("run", "run.yaml")
    assert done.returncode == 0, f"{done.stderr}{logs(run_dir)}"
    assert of_kind(run_dir, "resume")[0]["step"] in range(5, STEPS, 5)
    assert curve(run_dir) == curve(undisturbed)


def test_overflows_end_no_run_and_a_resumed_one_has_the_loss_scale(site: Site) -> None:
    sections: dict[str, Any] = {
        "trainer": {"name": "scaled", "options": {"target": "y"}},
        "train": {**RUN["train"], "max_skipped_steps": 2},
        "resources": {"ranks_per_node": 1, "cpus_per_rank": 1},
    }
    whole = site.write("scaled", **sections)
    done = site.ortflow("run", "run.yaml")
    assert done.returncode == 0, f"{done.stderr}{logs(whole)}"
    skipped = of_kind(whole, "skipped_step")
    reasons = [record["reason"] for record in skipped if record["step"] <= 4]
    assert reasons == [f"overflow at loss scale {2**place}" for place in (16, 15, 14, 13)], (
        "more than may fail in a row"
    )

    run_dir = site.write("scaled-killed", **sections)
    launcher = begun(site, run_dir, 17, rank=0)
    os.kill(of_kind(run_dir, "attempt_start")[-1]["pid"], signal.SIGKILL)
    assert launcher.wait(timeout=240) == 0, logs(run_dir)
    (resumed,) = of_kind(run_dir, "resume")
    assert curve(run_dir) == curve(whole)
    assert of_kind(run_dir, "skipped_step")[-1]["step"] == skipped[-1]["step"] < resumed["step"]
    manifest = json.loads((run_dir / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_text())
    assert manifest["progress"]["trainer"]["loss_scale"] == 65536 / 2 ** len(skipped)


def test_other_options_are_another_run(site: Site, undisturbed: Path) -> None:
    site.write("whole", trainer={"name": "linear", "options": {"target": "z"}})
    done = site.ortflow("run", "run.yaml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "trainer.options.target is y there and z here" in done.stderr


@pytest.mark.parametrize(
    ("sections", "expected_text"),
    [
        ({}, None),
        ({"trainer": "linaer"}, " trainer.name: … 'linaer' … linear?"),
        ({"trainer": "linear"}, "trainer.options.target: is missing"),
        ({"export": {"path": "model.onnx"}}, "export.path: "),
        ({"trainer": {"name": "linear", "options": {"target": "y", "features": "y"}}}, "has no column 'y' of one axis"),
    ],
)
def test_validate_asks_the_trainer(site: Site, sections: dict[str, Any], expected_text: str | None) -> None:
    site.write("checked", **sections)
    done = site.ortflow("validate", "run.yaml")
    assert done.returncode == (0 if expected_text is None else 2), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (0 if expected_text is None else 1)
    assert expected_text is None or mentions(done.stderr, expected_text)


def test_a_wrong_name_ends_a_run_with_exit_code_2(site: Site) -> None:
    run_dir = site.write("wrong", trainer="linaer")
    done = site.ortflow("run", "run.yaml")
    assert done.returncode == 2
    assert mentions(done.stderr, "'linaer'", "linear")
    assert "Traceback" not in done.stdout + done.stderr
    assert not run_dir.exists()


def test_the_schema_has_the_options(site: Site) -> None:
    rules = json.loads(site.ortflow("schema").stdout)["$defs"]["TrainerSection"]["allOf"]
    required = {
        rule["if"]["properties"]["name"]["const"]: rule["then"]["properties"]["options"]["required"] for rule in rules
    }
    assert required == {"linear": ["target"], "scaled": ["target"]}
