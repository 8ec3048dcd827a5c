"""`ortflow evaluate` and `ortflow predict`: the numbers of the run's own evaluation, and a row for each sample."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from data_sets import write_batches
from in_process import command_here
from tiny_runs import RUN, Tiny

from ortflow.workflow.onnx_runtime import onnxruntime


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A run of one epoch that evaluates at its end on 21 other samples, and micro-batches that do not divide them."""
    tiny = Tiny.make(
        tmp_path_factory.mktemp("applied"),
        model={**RUN["model"], "metrics": ["accuracy"]},
        data={**RUN["data"], "eval": "held.arrow"},
        train={**RUN["train"], "evaluation": {"every_steps": 12}},
        export={"quantize": "int8", "quantize_tolerance": 0.5, "metric_tolerance": 1.0, "optimize": True},
    )
    random = np.random.default_rng(2)
    samples = {"x": random.normal(size=(21, 5)).astype(np.float32), "labels": random.integers(0, 3, 21)}
    write_batches(tiny.folder / "held.arrow", samples)
    other = {"features": samples["x"], "labels": samples["labels"]}
    write_batches(tiny.folder / "other.arrow", other)
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    return tiny


def own_evaluation(run: Tiny) -> dict[str, float]:
    lines = (run.run_dir / "events/rank-0000.jsonl").read_text().splitlines()
    return next(event for line in reversed(lines) if (event := json.loads(line))["event"] == "evaluation")


def test_evaluate_prints_the_run_s_own_numbers(run: Tiny) -> None:
    expected = own_evaluation(run)
    for target, more in (("tiny", ()), ("runs/tiny/export/model.onnx", ("--loss", "cross_entropy"))):
        options = ("--metric", "accuracy", *more) if more else ()
        done = command_here("evaluate", target, "--data", "held.arrow", "--json", *options, folder=run.folder)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["samples"] == 21
        assert found["step"] == (None if more else 12)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["accuracy"] == pytest.approx(expected["accuracy"])
    mapped = ("--data", "other.arrow", "--column", "x=features")
    done = command_here("evaluate", "tiny", *mapped, folder=run.folder)
    assert f"{expected['loss']:.6g}" in done.stdout


def test_the_run_and_its_export_write_further_forms(run: Tiny) -> None:
    lines = (run.run_dir / "events/rank-0000.jsonl").read_text().splitlines()
    events = [event for line in lines if (event := json.loads(line))["event"] == "export_variant"]
    assert [event["kind"] for event in events] == ["optimized", "int8"]
    assert all(Path(event["path"]).stat().st_size == event["bytes"] for event in events)
    own = own_evaluation(run)
    for event in events:
        assert event["exported_metrics"] == pytest.approx({name: own[name] for name in ("loss", "accuracy")}, rel=1e-5)
        assert event["metrics"].keys() == {"loss", "accuracy"}
    assert events[0]["metrics"] == pytest.approx(events[0]["exported_metrics"], rel=1e-5)
    done = command_here("export", "tiny", "-o", "copy.onnx", folder=run.folder)
    assert done.returncode == 0, done.stderr
    assert "copy.int8.onnx: " in done.stdout


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "npz"])
def test_predict_writes_a_row_for_each_sample(run: Tiny, suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"new/out.{suffix}"
    data = ("--data", "held.arrow", "-o", str(out), "--micro-batch", "4")
    done = command_here("predict", "tiny", *data, folder=run.folder)
    assert done.returncode == 0, done.stderr
    assert "21 rows of y, predicted, step 12" in done.stdout
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    samples = pa.ipc.open_file(run.folder / "held.arrow").read_all()["x"]
    x = np.array(samples.to_pylist(), np.float32)
    session = onnxruntime.InferenceSession(str(run.run_dir / "export/model.onnx"), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    if suffix == "npz":
        with np.load(out) as archive:
            y, predicted = archive["y"], archive["predicted"]
    elif suffix == "csv":
        table = pyarrow.csv.read_csv(out)
        y = np.stack([table[f"y_{place}"].to_numpy() for place in range(3)], 1)
        predicted = table["predicted"].to_numpy()
    else:
        table = pq.read_table(out) if suffix == "parquet" else pa.ipc.open_file(out).read_all()
        y, predicted = np.array(table["y"].to_pylist()), table["predicted"].to_numpy()
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(predicted, expected.argmax(1))
    again = command_here("predict", "tiny", *data, folder=run.folder)
    assert again.returncode == 2
    assert "exists, so it is not replaced" in again.stderr


def test_several_ranks_give_the_same_bytes(run: Tiny, tmp_path: Path) -> None:
    data = ("--data", "held.arrow", "--micro-batch", "2")
    for target, several in (("tiny", "2"), ("runs/tiny/export/model.onnx", "3")):
        files = []
        for ranks in ("1", several):
            files.append(tmp_path / f"{Path(target).stem}-{ranks}.parquet")
            done = command_here("predict", target, *data, "-o", str(files[-1]), "--ranks", ranks, folder=run.folder)
            assert done.returncode == 0, done.stderr
        assert len({file.read_bytes() for file in files}) == 1
    printed = [
        command_here("evaluate", "tiny", *data, "--json", "--ranks", ranks, folder=run.folder) for ranks in ("1", "2")
    ]
    assert printed[0].stdout == printed[1].stdout != "", printed[1].stderr


def test_wrong_questions_are_one_sentence(run: Tiny, tmp_path: Path) -> None:
    model, data = "runs/tiny/export/model.onnx", ("--data", "held.arrow")
    out = ("-o", str(tmp_path / "o.csv"))
    for arguments, message in (
        (("evaluate", model, *data), "an ONNX model needs --loss"),
        (("evaluate", model, *data, "--loss", "crossentropy"), "error: --loss: must be cross_entropy, focal, "),
        (
            ("evaluate", model, *data, "--loss", "crossentropy"),
            "not the text 'crossentropy'; did you mean cross_entropy",
        ),
        (
            ("evaluate", model, *data, "--loss", "mse", "--metric", "f7"),
            "error: --metric: must be accuracy, perplexity",
        ),
        (
            ("evaluate", model, *data, "--loss", "mse", "--metric", "graph"),
            "error: --metric: is graph, which needs the key `path`",
        ),
        (("evaluate", model, *data, "--loss", "mse", "--label", ""), "error: --label: must not be empty"),
        (("evaluate", model, *data, "--loss", "info_nce"), "error: --output: is missing; add it"),
        (("evaluate", model, *data, "--loss", "info_nce"), "error: --loss: needs other; write a run file with it"),
        (("evaluate", model, *data, "--loss", "output", "--label", "y"), "error: --label: is not for this loss"),
        (("evaluate", "tiny", *data, "--label", "y"), "are for ONNX models"),
        (("evaluate", "tiny", "--data", ""), "error: --data: is empty"),
        (("evaluate", "tiny", *data, "--loss", "mse"), "are for ONNX models"),
        (("evaluate", "tiny", *data, "--step", "7"), "no checkpoint of step 7"),
        (("evaluate", "tiny", "--data", "none.arrow"), "none.arrow"),
        (("evaluate", "tiny", "--data", "other.arrow"), "has no column 'x'"),
        (("evaluate", "tiny", *data, "--column", "x"), "is not INPUT=COLUMN"),
        (("predict", "tiny", *data, *out, "--column", "X=x"), "the model has no input 'X'"),
        (("evaluate", "none.onnx", *data), "there is no file none.onnx"),
        (("predict", model, "--data", "other.arrow", *out), "has no column 'x'"),
        (("predict", model, *data, "-o", "o.txt"), "unknown suffix"),
        (("predict", model, *data, *out, "--step", "3"), "--step is for runs"),
    ):
        done = command_here(*arguments, folder=run.folder)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert message in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
    assert not [*tmp_path.iterdir()]
