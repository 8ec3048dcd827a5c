"""The batch script of a run whose code was copied to the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from ortflow.manifests.slurm import Placement, script
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.run import TrainerRunSpec

PLACEMENT = Placement(Path("/s/runs/r"), "/p/python", "/p/python", "none", "id", code=Path("/s/it's/code/abc"))


def spec(folder: Path, **slurm: object) -> TrainerRunSpec:
    values = {
        "name": "r", "run_dir": "/s/runs/r", "model": {"path": "/m/model.onnx", "loss": "mse"},
        "data": {"train": {"path": "/d"}, "micro_batch": 1},
        "train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 0.1}}, "backends": {"slurm": slurm},
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return load_run_file(file)


def test_the_code_stands_behind_the_prologue_and_before_the_run_supervisor(tmp_path: Path) -> None:
    text = script(spec(tmp_path, prologue=["export PYTHONPATH=/own"]), PLACEMENT)
    line = "export PYTHONPATH='/s/it'\"'\"'s/code/abc'\"${PYTHONPATH:+:$PYTHONPATH}\"\n"
    assert text.index("export PYTHONPATH=/own") < text.index(line) < text.index("exec /p/python")
    assert "PYTHONPATH" not in script(spec(tmp_path), replace(PLACEMENT, code=None))


def test_in_a_container_it_is_mounted_and_wins(tmp_path: Path) -> None:
    text = script(
        spec(tmp_path, container={"kind": "apptainer", "image": "/i/box.sif"}),
        replace(PLACEMENT, code=Path("/s/code/abc")),
    )
    words = text.replace("\\\n", " ").split()
    assert "--bind=/s/code/abc:/s/code/abc" in words
    place = words.index("/i/box.sif")
    assert words[place + 1 : place + 4] == ["env", "PYTHONPATH=/s/code/abc", "python"]
