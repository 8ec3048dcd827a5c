"""`ortflow validate` and `ortflow schema`: their output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from messages import alike, mentions, says
from run_files import SMALL
from typer.testing import CliRunner, Result

from ortflow.cli.schema import schema
from ortflow.cli.validate import validate

app = typer.Typer()
app.command()(validate)
app.command()(schema)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def whole(file: Path) -> Path:
    """The small run with a linear classifier of 3 classes over 4 numbers and 8 samples."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from ortflow.workflow.data.convert import convert_arrays

    weight = onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "weight")
    node = onnx.helper.make_node("MatMul", ["x", "weight"], ["logits"], name="head")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "g", [value("x", 1, ["batch", 4])], [value("logits", 1, ["batch", 3])], [weight]
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), file.parent / "model.onnx")
    samples = file.parent / "samples.npz"
    np.savez(samples, x=np.ones((8, 4), np.float32), labels=np.arange(8) % 3)
    convert_arrays([samples], file.parent / "train.arrow")
    return file


def test_faults_exit_with_2_and_all_are_printed(file: Path) -> None:
    done = run("validate", str(file), "train.stpes=3", "data.micro_batch=0")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert alike([line.partition(": ")[2].replace(str(file), "run.yaml") for line in done.stderr.splitlines()], [
        f"run.yaml:3 model.path: … {file.parent / 'model.onnx'} … correct the path … `prepare`",
        f"run.yaml:6 data.train.path: … {file.parent / 'train.arrow'} … correct the path … `prepare`",
        "on the command line, data.micro_batch: … more than 0 … 0",
        "on the command line, train.stpes: unknown key … steps?",
    ])  # fmt: skip


def test_json(file: Path) -> None:
    done = run("validate", str(file), "prepare=make", "train.optimizer.lr=x", "--json")
    assert done.exit_code == 2
    (fault,) = json.loads(done.stdout)["faults"]
    assert fault == {
        "file": str(file),
        "line": None,
        "key": "train.optimizer.lr",
        "what": "must be a number, not the text 'x'",
        "fix": None,
    }


def test_what_is_not_there_yet_is_not_checked(file: Path) -> None:
    done = run("validate", str(file), "prepare=python make.py")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{file}: valid, as far as it was checked\nnot checked: the model and the data")
    assert json.loads(run("validate", str(file), "prepare=python make.py", "--json").stdout)["valid"]


def test_a_batch_that_was_given_twice(file: Path) -> None:
    def reported(*overrides: str) -> Result:
        return run("validate", str(file), "prepare=python make.py", *overrides)

    done = reported("train.global_batch=16", "train.gradient_accumulation=3")
    assert done.exit_code == 2
    assert mentions(done.output, "train.gradient_accumulation: … 3 … train.global_batch 16 … 4")
    assert reported("train.global_batch=12", "train.gradient_accumulation=3").exit_code == 0
    undivided = "train.global_batch: … 18 … 1 rank x 4 samples (data.micro_batch)"
    assert mentions(reported("train.global_batch=18").output, undivided)


def test_a_machine_without_the_packages_of_a_rank(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ortflow.launchers import interpreter

    monkeypatch.setattr(interpreter, "examine", lambda path: interpreter.Interpreter(path, (3, 13), "linux", {}))
    done = run("validate", str(whole))
    assert done.exit_code == 0
    assert mentions(done.stdout, "not checked: the model and the data")
    assert "onnxruntime, ortflow, onnx, numpy, pyarrow, safetensors, mpi4py" in done.stdout


def test_a_whole_run_is_valid(whole: Path) -> None:
    done = run("validate", str(whole))
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{whole}: valid\n", "")
    assert sorted(path.name for path in whole.parent.iterdir()) == [
        "model.onnx", "run.yaml", "samples.npz", "train.arrow",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("model.parameters.freeze=[nothing]", "on the command line, model.parameters.freeze[0]: "),
        ("data.train.columns={labels: missing}", "on the command line, data.train.columns.labels: "),
        ("data.micro_batch=9", "run.yaml:5 data.last_batch: "),
        ("model.loss.output=nowhere", "on the command line, model.loss.output: "),
    ],
)
def test_faults_of_model_and_data_have_their_line(whole: Path, override: str, place: str) -> None:
    done = run("validate", str(whole), override)
    assert done.exit_code == 2
    assert done.stderr.replace(str(whole), "run.yaml").startswith(f"error: {place}")
    assert "Traceback" not in done.stderr


def test_an_invalid_model(whole: Path) -> None:
    (whole.parent / "model.onnx").write_bytes(b"hello")
    done = run("validate", str(whole))
    assert done.exit_code == 2
    assert str(whole.parent / "model.onnx") in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_signs_of_an_export_for_inference(whole: Path) -> None:
    import onnx

    model = onnx.load(whole.parent / "model.onnx")
    ones = onnx.numpy_helper.from_array(np.ones(4, np.float32), "scale")
    norms = [onnx.helper.make_node("Mul", [read, "scale"], [f"s{i}"], f"n{i}") for i, read in enumerate(("x", "s0"))]
    model.graph.node[0].input[0] = "s1"
    head = model.graph.node.pop()
    model.graph.node.extend([*norms, head])
    model.graph.initializer.append(ones)
    onnx.save(model, whole.parent / "model.onnx")
    sign = "parameter 'scale' … 2 places (Mul) … merged parameters of equal value"
    done = run("validate", str(whole))
    assert (done.exit_code, done.stdout) == (2, "")
    assert mentions(done.stderr, sign)
    assert done.stderr.startswith("error: ")
    done = run("validate", str(whole), "model.accept_inference_export=true")
    assert (done.exit_code, done.stdout) == (0, f"{whole}: valid\n")
    assert says(done.stderr, f"warning: {sign}")


def test_constants_by_judgement_are_reported(whole: Path) -> None:
    import onnx

    model = onnx.load(whole.parent / "model.onnx")
    model.graph.node[0].input[0] = "scaled"
    model.graph.node.insert(0, onnx.helper.make_node("Mul", ["x", "inv_freq"], ["scaled"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([1, 2, 3, 5]), "inv_freq"))
    onnx.save(model, whole.parent / "model.onnx")
    done = run("validate", str(whole))
    assert done.exit_code == 0
    assert says(done.stderr, "warning: not trained … constant … 'inv_freq' … buffer's name")
    assert len(done.stderr.splitlines()) == 1


def test_the_schema_is_printed() -> None:
    done = run("schema")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["title"] == "ortflow run file"
