"""`ortflow init model.onnx --data SET`: what is guessed, and that the run file is valid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from data_sets import write_batches
from in_process import command_here
from PIL import Image
from small_network import save_model

from ortflow.workflow.errors import UserError
from ortflow.workflow.planning.first_run import Array, guess, micro_batch
from ortflow.workflow.planning.guessed_set import guess_for

IMAGE = Array("pixels", "float32", (3, 8, 8))


def test_labels_and_losses() -> None:
    classes = Array("y", "int64", (), 0, 4)
    logits = Array("logits", "float32", (5,))
    made = guess([IMAGE], [logits], [IMAGE, classes])
    assert made.loss == {"kind": "cross_entropy", "label": "y"}
    assert (made.columns, made.metrics) == ({}, ("accuracy",))
    renamed = Array("image", "float32", (3, 8, 8))
    assert guess([IMAGE], [logits], [renamed, classes]).columns == {"pixels": "image"}
    masks = Array("labels", "uint8", (8, 8), 0, 20)
    pixels = Array("out", "float32", (21, None, None))
    assert guess([IMAGE], [pixels], [IMAGE, masks]).loss == {"kind": "cross_entropy", "class_axis": 1}
    one = Array("out", "float32", (1,))
    assert guess([IMAGE], [one], [IMAGE, Array("target", "int64", (1,), 0, 1)]).loss["kind"] == "bce_with_logits"
    assert guess([IMAGE], [one], [IMAGE, Array("target", "float64", (1,), 0, 1)]).loss["kind"] == "mse"
    two = guess([IMAGE], [Array("hidden", "float32", (9,)), logits], [IMAGE, Array("id", "int64", (7,)), classes])
    assert two.loss == {"kind": "cross_entropy", "output": "logits", "label": "y"}
    assert two.unused == ["id"]
    with pytest.raises(UserError, match="can be the label"):
        guess([IMAGE], [logits], [IMAGE, Array("y", "int64", (), 0, 5)])


def test_a_language_model_and_a_loss_of_its_own() -> None:
    tokens, logits = Array("input_ids", "int64", (None,)), Array("logits", "float32", (None, 100))
    made = guess([tokens], [logits], [Array("text", "uint16", (64,))])
    assert made.columns == {"input_ids": "text[:-1]", "labels": "text[1:]"}
    assert made.loss == {"kind": "cross_entropy", "output": "logits"}
    label = Array("labels", "int64", (None,))
    own = guess([tokens, label], [Array("loss", "float32", ()), logits], [tokens, label])
    assert own.loss == {"kind": "output", "output": "loss"}
    assert own.labels == ["labels"]


def test_what_cannot_be_guessed_is_one_sentence() -> None:
    logits = Array("logits", "float32", (5,))
    with pytest.raises(UserError, match=r"no column for input 'pixels' \(float32 3 x 8 x 8\); it has y \(int64 scalar"):
        guess([IMAGE], [logits], [Array("y", "int64", ())])
    with pytest.raises(UserError, match=r"no column of the set can be the label of the outputs logits"):
        guess([IMAGE], [logits], [IMAGE, Array("y", "float32", (4,))])


def test_a_micro_batch_that_fits() -> None:
    assert micro_batch(1000, None, 0, 1.0, 1 << 30) == 32
    assert micro_batch(7, None, 0, 1.0, 1 << 30) == 4
    assert micro_batch(1000, 6, 0, 1.0, 1) == 6
    assert micro_batch(1000, None, 400, 10.0, 1000) == 8
    assert micro_batch(1000, None, 4000, 10.0, 1000) == 1


def test_the_file_is_valid_and_says_what_it_guessed(tmp_path: Path) -> None:
    save_model(tmp_path / "net.onnx")
    random = np.random.default_rng(1)
    samples = {"features": random.normal(size=(64, 5)).astype(np.float32), "kind": random.integers(0, 3, 64)}
    write_batches(tmp_path / "set.arrow", samples)
    done = command_here("init", "net.onnx", "--data", "set.arrow", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "net.yaml").read_text()
    assert "x: features" in text
    assert "label: kind" in text
    assert "kind has numbers of the classes in y" in text
    valid = command_here("validate", "net.yaml", folder=tmp_path)
    assert valid.returncode == 0, valid.stderr
    for arguments, message in (
        (("net.onnx", "--data", "set.arrow"), "net.yaml exists"),
        (("net.onnx",), "needs --data"),
        (("net.onnx", "--data", "set.arrow", "--ranks", "2"), "--ranks is for programs"),
        (("none.onnx", "--data", "set.arrow"), "does not exist"),
        (("net.onnx", "--data", "none.arrow", "-o", "b.yaml"), "none.arrow"),
        (("train.py", "--data", "set.arrow"), "--data is for ONNX models"),
    ):
        wrong = command_here("init", *arguments, folder=tmp_path)
        assert wrong.returncode == 2, arguments
        assert message in wrong.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "net.yaml", "set.arrow"]


def test_missing_truth_values_become_their_mean(tmp_path: Path) -> None:
    rows = [f"{row},{('true', 'false', '')[row % 3]},{'ab'[row % 2]}" for row in range(12)]
    (tmp_path / "set.csv").write_text("\n".join(["age,active,kind", *rows]))
    samples, made = guess_for(tmp_path / "set.csv", [Array("x", "float32", (2,))], [Array("logits", "float32", (2,))])
    assert len(samples) == 12
    assert made.preparation["fields"] == [
        {"columns": ["age"], "standardize": True}, {"columns": ["active"], "missing": "mean"},
    ]  # fmt: skip


def test_a_table_and_a_folder_of_images(tmp_path: Path) -> None:
    save_model(tmp_path / "net.onnx")
    rows = [
        f"{'' if row % 9 == 3 else 20 + row},{row / 7},{-row},{'fm'[row % 2]},{'abc'[row % 3]}" for row in range(40)
    ]
    (tmp_path / "set.csv").write_text("\n".join(["age,s1,s2,sex,species", *rows]))
    done = command_here("init", "net.onnx", "--data", "set.csv", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = yaml.safe_load((tmp_path / "net.yaml").read_text())
    assert run["model"]["loss"] == {"kind": "cross_entropy", "label": "species"}
    assert run["data"]["train"] == {
        "path": "set.csv",
        "columns": {"x": ["age", "s1", "s2", "sex"]},
        "fields": [
            {"columns": ["s1", "s2"], "standardize": True},
            {"columns": ["age"], "standardize": True, "missing": "mean"},
            {"columns": ["sex"], "one_hot": True},
        ],
    }
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (12, 10)).save(tmp_path / "images" / name / "0.png")
    samples, made = guess_for(tmp_path / "images", [IMAGE], [Array("logits", "float32", (2,))])
    assert samples.columns["image"].shape == (3, 8, 8)
    assert made.preparation == {"images": {"resize": [8, 8]}}
    assert (made.columns, made.loss) == ({"pixels": "image"}, {"kind": "cross_entropy", "label": "label"})
    (tmp_path / "bad.csv").write_text("age,s1\n1,2\n3\n")
    done = command_here("init", "net.onnx", "--data", "bad.csv", "-o", "bad.yaml", folder=tmp_path)
    assert done.returncode == 2
    assert "bad.csv, line 3: has 1 field, and the header has 2" in done.stderr
    assert not (tmp_path / "bad.yaml").exists()
