"""`ortflow evaluate` and `predict` on files as people have them: tables and folders of images."""

from __future__ import annotations

import csv
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow.parquet as pq
import pytest
import yaml
from in_process import command_here
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from project import command, of_kind
from small_network import save_model

from ortflow.workflow.onnx_runtime import onnxruntime

SPECIES = ["cat", "dog", "owl"]
COLUMNS = {"x": ["age", "s?", "sex"], "labels": "species"}
TABLE: dict[str, Any] = {
    "name": "table",
    "model": {"path": "model.onnx", "loss": {"kind": "cross_entropy", "label": "labels"}, "metrics": ["accuracy"]},
    "data": {
        "train": {
            "path": "train.csv",
            "columns": COLUMNS,
            "fields": [
                {"columns": ["age"], "standardize": True, "missing": "mean"},
                {"columns": ["sex"], "one_hot": True},
            ],
            "bad_rows": 0.02,
        },
        "eval": {"fraction": 0.3, "stratify": "species"},
        "eval_sets": {"other": {"path": "other.csv", "columns": deepcopy(COLUMNS)}},
        "micro_batch": 8,
    },
    "train": {"steps": 20, "optimizer": {"name": "adamw", "lr": 1e-2}, "evaluation": {"every_steps": 20}},
    "resources": {"ranks_per_node": 1, "cpus_per_rank": 1},
}


def rows_of(count: int, seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        label = int(random.integers(0, 3))
        age = "" if number % 17 == 3 else int(random.integers(18, 80)) + 30 * label
        s1, s2 = random.normal(size=2).tolist()
        rows.append({"age": age, "s1": s1, "s2": s2, "sex": "fm"[random.integers(0, 2)], "species": SPECIES[label]})
    return rows


def write(path: Path, rows: list[dict[str, Any]], *without: str) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name not in without], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path.name


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained on a CSV, of which it held a part out."""
    folder = tmp_path_factory.mktemp("table")
    save_model(folder / "model.onnx")
    write(folder / "train.csv", rows_of(120, 0))
    write(folder / "other.csv", rows_of(40, 1))
    (folder / "run.yaml").write_text(yaml.safe_dump(TABLE))
    done = command("run", "run.yaml", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def logits_of(folder: Path, rows: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """What the exported model gives for rows that are prepared by hand, as `inputs.json` says."""
    export = folder / "runs/table/export"
    age = json.loads((export / "inputs.json").read_text())["x"]["parts"][0]
    x = [
        [
            ((age["fill"] if row["age"] == "" else row["age"]) - age["mean"]) / age["std"],
            row["s1"],
            row["s2"],
            row["sex"] == "f",
            row["sex"] == "m",
        ]
        for row in rows
    ]
    session = onnxruntime.InferenceSession(str(export / "model.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": np.array(x, np.float32)})
    return np.asarray(logits)


def test_another_table_is_read_with_the_means_of_the_training_rows(table: Path) -> None:
    rows = rows_of(40, 1)
    logits, labels = logits_of(table, rows), [SPECIES.index(row["species"]) for row in rows]
    exact = logits.astype(float)
    losses = np.log(np.exp(exact).sum(1)) - exact[np.arange(40), labels]
    done = command_here("evaluate", "table", "--data", "other.csv", "--json", folder=table)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["samples"] == 40
    assert values["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert values["accuracy"] == pytest.approx((logits.argmax(1) == labels).mean())
    (own,) = of_kind(table / "runs" / "table", "evaluation")
    assert own["other/loss"] == pytest.approx(losses.mean(), rel=1e-5)


def test_predictions_of_a_table_without_labels_have_the_names_of_classes(table: Path, tmp_path: Path) -> None:
    rows = rows_of(30, 2)
    write(table / "unlabelled.csv", rows, "species")
    out = tmp_path / "out.parquet"
    done = command_here("predict", "table", "--data", "unlabelled.csv", "-o", str(out), folder=table)
    assert done.returncode == 0, done.stderr
    written, logits = pq.read_table(out), logits_of(table, rows)
    np.testing.assert_allclose(np.array(written["y"].to_pylist()), logits, rtol=1e-5, atol=1e-6)
    assert written["predicted"].to_pylist() == logits.argmax(1).tolist()
    assert written["predicted_class"].to_pylist() == [SPECIES[number] for number in logits.argmax(1)]


def test_a_table_that_does_not_fit_is_named_by_line(table: Path, tmp_path: Path) -> None:
    rows = rows_of(60, 3)
    unknown = write(table / "unknown.csv", [*rows[:3], {**rows[3], "species": "emu"}])
    word = write(table / "word.csv", [*rows[:5], {**rows[5], "age": "old"}])
    lacking = write(table / "lacking.csv", rows, "sex")
    short = write(table / "short.csv", rows)
    with (table / short).open("a") as file:
        file.write("1,2\n")
    out = ("-o", str(tmp_path / "out.parquet"))
    for arguments, messages in (
        (("evaluate", "table", "--data", unknown), ("unknown.csv, line 5", "'emu'", "'species'")),
        (("evaluate", "table", "--data", word), ("word.csv, line 7", "'old'", "'age'")),
        (("predict", "table", "--data", word, *out), ("word.csv, line 7", "'old'", "'age'")),
        (("predict", "table", "--data", lacking, *out), ("lacking.csv", "has no column 'sex'", "input 'x'")),
        # Training may skip bad rows; a prediction belongs to its row.
        (("predict", "table", "--data", short, *out), ("short.csv, line 62", "1 of 61 rows are bad; correct them\n")),
    ):
        done = command_here(*arguments, folder=table)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert all(message in done.stderr for message in messages), (arguments, done.stderr)
    done = command_here("evaluate", "table", "--data", short, folder=table)
    assert "60 samples" in done.stdout
    assert "1 bad row was skipped: " in done.stdout
    text = (table / "train.csv").read_text()
    (table / "train.csv").write_text(text + "30,0,0,f,auk\n")
    done = command_here("predict", "table", "--data", "other.csv", *out, folder=table)
    (table / "train.csv").write_text(text)
    assert done.returncode == 2
    assert "train.csv: has changed since the run was trained" in done.stderr
    assert not [*tmp_path.iterdir()]


def save_classifier(path: Path) -> None:
    """Images of 8 x 8 to three classes."""
    random = np.random.default_rng(0)
    tensors = {"w": random.normal(size=(6, 3, 3, 3)) / 3, "b": np.zeros(6), "u": random.normal(size=(6, 3))}
    nodes = [
        helper.make_node("Conv", ["pixels", "w", "b"], ["c"], name="/conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="/relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], name="/pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="/flat"),
        helper.make_node("MatMul", ["f", "u"], ["logits"], name="/out"),
    ]
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array.astype("float32"), name) for name, array in tensors.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def save_images(root: Path, count: int, seed: int, classes: list[str]) -> None:
    """Images of 12 x 12, each class of its own colour."""
    random = np.random.default_rng(seed)
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 120, (12, 12, 3))
            pixels[..., SPECIES.index(name)] += 100
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{number:02}.png")


def test_another_folder_of_images(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model.onnx")
    save_images(tmp_path / "images", 16, 0, SPECIES)
    save_images(tmp_path / "two", 5, 1, ["dog", "owl"])
    train = {
        "path": "images",
        "images": {"resize": 10, "crop": 8},
        "columns": {"pixels": "image", "labels": "label"},
        "transforms": [{"random_crop": {"scale": [0.5, 1.0]}}, {"flip": "horizontal"}],
    }
    data = {"train": train, "eval": {"fraction": 0.25, "stratify": "label"}, "micro_batch": 6, "workers": 0}
    steps = {"epochs": 10, "optimizer": {"name": "adamw", "lr": 3e-2}, "evaluation": {"every_steps": 30}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**TABLE, "data": data, "train": steps}))
    done = command("run", "run.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = command_here("data", "show", "two", folder=tmp_path)
    assert "two: 10 samples in 1 file" in done.stdout
    assert "classes: dog, owl" in done.stdout
    done = command_here("data", "verify", "two", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "two: 10 samples, all of them can be read\n")
    done = command_here("evaluate", "table", "--data", "two", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    # The classes have the numbers of the training set, where dog is 1 and owl is 2.
    assert json.loads(done.stdout)["accuracy"] == 1
    done = command_here("predict", "table", "--data", "two", "-o", "out.parquet", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    labelled = pq.read_table(tmp_path / "out.parquet")
    assert labelled["predicted_class"].to_pylist() == ["dog"] * 5 + ["owl"] * 5

    # Images without labels, and a class that the training set lacks.
    flat, strange = tmp_path / "flat", tmp_path / "strange" / "emu"
    flat.mkdir()
    strange.mkdir(parents=True)
    for place, file in enumerate(sorted((tmp_path / "two").glob("*/*.png"))):
        (flat / f"{place:02}.png").write_bytes(file.read_bytes())
    (strange / "0.png").write_bytes(file.read_bytes())
    done = command_here("predict", "table", "--data", "flat", "-o", "flat.parquet", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "flat.parquet").equals(labelled)
    for name, message in (("flat", "has no column 'label'"), ("strange", "has the class 'emu'")):
        done = command_here("evaluate", "table", "--data", name, folder=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr
    (flat / "00.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (flat / "03.png").write_bytes((flat / "03.png").read_bytes()[:60])
    done = command_here("data", "verify", "flat", folder=tmp_path)
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("00.png: cannot", "03.png: cannot", "2 of 10 images are bad"))
    done = command_here("predict", "table", "--data", "flat", "-o", "bad.parquet", folder=tmp_path)
    assert done.returncode == 2
    assert "00.png: cannot be decoded" in done.stderr
    assert "object at 0x" not in done.stderr
    assert not (tmp_path / "bad.parquet").exists()
