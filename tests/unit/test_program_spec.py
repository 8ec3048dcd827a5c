"""The run file of a training program: its types, its arguments, and what is refused beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from messages import alike

from ortflow.launchers.changes import refuse_other_kind
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import load_run_file, load_run_text, read_run_file
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.program import ProgramSection
from ortflow.workflow.spec.run import ProgramRunSpec, RunSpec, TrainerRunSpec, trainer_run

MODEL = """
name: digits
model: {path: model.onnx, loss: mse}
data: {train: data, micro_batch: 4}
train: {steps: 10, optimizer: {name: adamw, lr: 0.001}}
"""


def load(text: str) -> RunSpec:
    return load_run_text(text, "run.yaml")


def faults(folder: Path, text: str, *overrides: str, files: bool = False) -> list[str]:
    (folder / "run.yaml").write_text(text)
    return [str(fault) for fault in read_run_file(folder / "run.yaml", overrides, files=files).faults]


def test_the_key_program_chooses_the_kind_of_run() -> None:
    program = load("name: a\nprogram: train.py\n")
    assert type(program) is ProgramRunSpec
    assert program.program.script == "train.py"
    assert (program.data, program.train, program.model) == (None, None, None)
    model = load(MODEL)
    assert type(model) is TrainerRunSpec
    assert model.global_batch == 4


def test_short_forms() -> None:
    spec = load("name: a\nprogram: {command: ./run.sh 'a b', args: --lr 1e-3}\n")
    assert spec.program is not None
    assert spec.program.words == ["./run.sh", "a b", "--lr", "1e-3"]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("program: {args: [x]}", ["program: names no program … script, module, function or command"]),
        (
            "program: {script: a.py, module: b}",
            ["program.module: cannot be combined with program.script …"],
        ),
        ("program: {function: main}", ["program.function: … 'main' … pkg.mod:main"]),
        ("program: {module: a/b}", ["program.module: … 'a/b' … pkg.mod"]),
        ("program: {command: [a], start: torchrun}", ["program.start: is torchrun … script"]),
        ("program: {script: a.py, args: ['{lr}']}", ["program.args[0]: … parameter lr … none … program.parameters.lr"]),
        ("program: {script: a.py, parameters: {lr: 1}}", ["program.parameters.lr: … no argument … {lr}"]),
        ("program: a.py\ndata: {train: x}", ["data: is for models … remove it"]),
        ("program: a.py\ntrain: {steps: 3}", ["train: is for models … remove it"]),
        ("program: a.py\nmodel: {path: m.onnx}", ["model: is for models … remove it"]),
        ("program: a.py\ntrainer: other", ["trainer: is for models … remove it"]),
        ("program: a.py\nparallel: {zero: 1}", ["parallel: is for models … remove it"]),
        ("program: a.py\nexport: {tolerance: 0.1}", ["export.tolerance: is for models … remove it"]),
        ("program: a.py\nresources: {kernels: onnxruntime}", ["resources.kernels: is for models … remove it"]),
        ("program: a.py\ncheckpoint: {asynchronous: false}", ["checkpoint.asynchronous: is for models … remove it"]),
        ("program: a.py\ncheckpoint: {exact: false}", ["checkpoint.exact: is for models … remove it"]),
        ("program: a.py\ncheckpoint: {best: {metric: loss}}", ["checkpoint.best: is for models … remove it"]),
        ("program: a.py\nmonitor: {runtime_log: info}", ["monitor.runtime_log: is for models … remove it"]),
        ("program: a.py\nresources: {cuda_graph: false}", ["resources.cuda_graph: is for models … remove it"]),
        (
            "program: {script: a.py, module: b, function: 'c:d', command: [e]}",
            [
                f"program.{key}: cannot be combined with program.script … use one"
                for key in ("module", "function", "command")
            ],
        ),
        ("program: {function: 'a.b'}", ["program.function: is 'a.b' … pkg.mod:main"]),
        ("program: {function: 'a:1'}", ["program.function: is 'a:1' … pkg.mod:main"]),
        ("program: {module: .a}", ["program.module: is '.a' … pkg.mod"]),
        ("program: {script: a.py, env: {'A=B': c}}", ["program.env.A=B: is not the name of an environment variable …"]),
        ("program: {command: [a, '{n}']}", ["program.command[1]: … parameter n … program.parameters.n"]),
        (
            "program: {function: 'a:b', start: accelerate}",
            ["program.start: is accelerate … scripts and modules … script"],
        ),
        (
            "program: {script: a.py, start: accelerate}\nresources: {ranks_per_node: 2}",
            ["program.start: is accelerate … GPUs only … torchrun"],
        ),
        (
            "program: {script: a.py, start: horovod}\nresources: {nodes: 2}",
            ["program.start: is horovod … other nodes by ssh … direct"],
        ),
        ("program: {scrpt: a.py}", ["program.scrpt: unknown key; did you mean script?"]),
        ("program: {args: [a], cwd: b}", ["program: names no program …"]),
    ],
)
def test_what_is_refused(text: str, reported: list[str], tmp_path: Path) -> None:
    found = [fault.partition(" ")[2] for fault in faults(tmp_path, f"name: a\n{text}\n")]
    assert len(found) == len(reported), found
    assert all(any(alike([fault], [one]) for fault in found) for one in reported), found


@pytest.mark.parametrize(
    "text",
    [
        "program: {script: a.py, start: accelerate}",
        "program: {script: a.py, start: accelerate}\nresources: {ranks_per_node: 2, gpus_per_rank: 1}",
        "program: {script: a.py, start: horovod}\nresources: {ranks_per_node: 2}",
        "program: {module: a.b_1, start: torchrun, env: {A: b}}",
        "program: {function: 'a.b:c_1.d', args: ['{n', '{}']}",
        "program: {command: [a, '{n}'], parameters: {n: 1}}",
        "program: a.py\nexport: {path: there}\ncheckpoint: {every_steps: 3}",
    ],
)
def test_what_is_accepted(text: str, tmp_path: Path) -> None:
    assert faults(tmp_path, f"name: a\n{text}\n") == []


def test_an_override_of_a_trainer_is_refused(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "name: a\nprogram: a.py\n", "train.steps=3")
    assert alike([fault], ["on the command line, train: is for models … remove it"])


def test_a_missing_script_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    fault, _ = faults(tmp_path, "name: a\nprogram: {script: a.py, cwd: b}\n", files=True)
    assert alike([fault], [f"{tmp_path / 'run.yaml'}:2 program.script: there is no file {tmp_path / 'a.py'} … path"])
    (tmp_path / "a.py").touch()
    (fault,) = faults(tmp_path, "name: a\nprogram: {script: a.py, cwd: b}\n", files=True)
    assert alike([fault], [f"… program.cwd: there is no folder {tmp_path / 'b'} … path"])


def test_parameters_become_arguments() -> None:
    section = ProgramSection(
        script="a.py",
        args=["--lr={lr}", "--flag", "{on}", "{{lr}}", '{"a": 1}', "{}", "{lr}{n}"],
        parameters={"lr": 1e-3, "on": True, "n": 4},
    )
    assert section.words == ["--lr=0.001", "--flag", "true", "{lr}", '{"a": 1}', "{}", "0.0014"]
    assert section.unused == []


def test_a_sweep_of_a_parameter_that_no_argument_names_is_refused(tmp_path: Path) -> None:
    text = "name: a\nprogram: {script: a.py, args: ['{lr}'], parameters: {lr: 1}}\n"
    assert faults(tmp_path, text, "program.parameters.lr=1e-4") == []
    (fault,) = faults(tmp_path, text, "program.parameters.lrr=1e-4")
    assert alike([fault], ["… program.parameters.lrr: … no argument …"])


@pytest.mark.parametrize("nodes", [1, 4])
def test_it_is_written_and_read_again(tmp_path: Path, nodes: int) -> None:
    program = {"script": "a.py", "args": ["--lr", "{lr}"], "parameters": {"lr": 0.1}, "env": {"A": ""}}
    values: dict[str, Any] = {"name": "a", "program": program, "resources": {"nodes": nodes}}
    spec = resolve_paths(ProgramRunSpec.model_validate(values), tmp_path / "run.yaml", tmp_path)
    assert spec.program is not None
    assert (spec.program.script, spec.program.cwd) == (str(tmp_path / "a.py"), str(tmp_path))
    assert spec.export.path == str(tmp_path / "runs/a/export")
    text = dump_run_file(spec)
    assert "\ndata:" not in text
    (tmp_path / "dumped.yaml").write_text(text)
    assert load_run_file(tmp_path / "dumped.yaml") == spec


def test_a_program_is_no_model() -> None:
    spec = load("name: a\nprogram: train.py\n")
    with pytest.raises(UserError, match="ortflow plan is for runs that ortflow trains itself"):
        trainer_run(spec, "ortflow plan")
    with pytest.raises(UserError, match="holds a run of a model, and this run file is of a program"):
        refuse_other_kind(Path("runs/a"), load(MODEL), spec)
