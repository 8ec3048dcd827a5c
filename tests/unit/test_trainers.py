"""Trainers from packages: found by name, with their own options, refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from messages import alike, says
from run_files import SMALL, reported, spec_of

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.schema import run_file_schema
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.trainers import builder_of, installed, load_builder
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.builder import GraphBuilder

MODULE = """
from ortflow.workflow.spec.base import Positive, Section, Text
from ortflow.workflow.trainer import TrainerBuilder

class Options(Section):
    target: Text
    \"\"\"Column that is predicted.\"\"\"
    window: Positive = 3

class Whole(TrainerBuilder):
    Options = Options
    def __init__(self, context): self.context = context
    def prepare(self, dataset, before): ...
    def inputs(self): ...
    def open(self, communicator, device, threads, machines, *, training=True): ...

class Half:
    Options = Section
    def prepare(self, dataset, before): ...
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with four trainers, on the import path."""
    about = tmp_path / "site" / "brought-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    names = {
        "whole": "brought_trainers:Whole", "half": "brought_trainers:Half", "graph": "brought_trainers:Half",
        "gone": "brought_elsewhere:Whole",
    }  # fmt: skip
    lines = [f"{name} = {value}" for name, value in names.items()]
    (about / "entry_points.txt").write_text("\n".join(["[ortflow.trainers]", *lines, ""]))
    (tmp_path / "site" / "brought_trainers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "site")


def run_of(name: str, **options: Any) -> TrainerRunSpec:
    return spec_of(model=None, trainer={"name": name, "options": options})


def test_the_trainer_of_graphs_is_built_in_and_no_package_takes_its_name() -> None:
    assert load_builder("graph") is GraphBuilder
    assert set(installed()) == {"graph", "whole", "half", "gone"}


def test_a_trainer_gets_its_options_typed(tmp_path: Path) -> None:
    builder = builder_of(run_of("whole", target="y"), RunDir(tmp_path), Report())
    assert (builder.context.options.target, builder.context.options.window) == ("y", 3)  # type: ignore[attr-defined]
    assert builder.context.folder == tmp_path / "graphs"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "expected_text"),
    [
        ("whale", {}, "trainer.name: … 'whale' … whole?"),
        ("x", {}, "trainer.name: … 'x' … gone, graph, half, whole"),
        ("gone", {}, "trainer.name: … 'gone' … brought_elsewhere:Whole … ModuleNotFoundError"),
        ("half", {}, "trainer.name: … 'half' … brought_trainers:Half … no check_machine and no inputs"),
        ("whole", {}, "trainer.options.target: is missing …"),
        ("whole", {"target": "y", "windw": 3}, "trainer.options.windw: unknown key … window?"),
        ("whole", {"target": "y", "window": "3"}, "trainer.options.window: … whole number … '3'"),
    ],
)
def test_faults_are_reported_in_one_sentence(
    tmp_path: Path, name: str, options: dict[str, Any], expected_text: str
) -> None:
    with pytest.raises(UserError) as caught:
        builder_of(run_of(name, **options), RunDir(tmp_path), Report())
    assert says(str(caught.value), expected_text)
    assert "\n" not in str(caught.value)


def test_the_schema_has_the_options_of_what_is_installed() -> None:
    schema = run_file_schema({"whole": load_builder("whole").Options})
    (rule,) = json.loads(json.dumps(schema))["$defs"]["TrainerSection"]["allOf"]
    assert rule["if"]["properties"]["name"] == {"const": "whole"}
    options = rule["then"]["properties"]["options"]
    assert options["required"] == ["target"]
    assert options["properties"]["target"]["description"] == "Column that is predicted."
    assert "allOf" not in run_file_schema()["$defs"]["TrainerSection"]


WITHOUT_MODEL = SMALL.replace("model:\n  path: model.onnx\n  loss: cross_entropy\n", "")


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (WITHOUT_MODEL, ["run.yaml model: is missing … add it"]),
        (WITHOUT_MODEL + "trainer: whole\n", []),
        (SMALL + "trainer: graph\n", []),
        (SMALL + "trainer: whole\n", ["run.yaml:2 model: … trainer graph … trainer.name is whole"]),
        (
            SMALL + "trainer: {options: {a: 1}}\n",
            ["run.yaml:13 trainer.options: … graph … no options"],
        ),
        (WITHOUT_MODEL + "trainer: {nme: whole}\n", ["run.yaml:10 trainer.nme: unknown key … name?"]),
    ],
)
def test_a_model_is_for_the_trainer_of_graphs_alone(tmp_path: Path, text: str, faults: list[str]) -> None:
    found = reported(tmp_path, text)
    assert alike(found, faults)


def test_a_run_without_a_model_is_written_and_read(tmp_path: Path) -> None:
    spec = run_of("whole", target="y", deep={"a": [1, 2.5, None, True]})
    (tmp_path / "run.yaml").write_text(dump_run_file(spec))
    assert load_run_file(tmp_path / "run.yaml") == spec
