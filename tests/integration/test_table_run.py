"""A run from a CSV: its curve is that of the same numbers in an Arrow file; what it skips and holds out is recorded."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from caches import cache_without_gradients
from data_sets import write_batches
from messages import mentions
from project import command, of_kind
from small_network import save_model

from ortflow.workflow.data.selected import Selected
from ortflow.workflow.data.sources import open_evaluation, open_training
from ortflow.workflow.spec.data import DataSection

SPECIES = ["cat", "dog", "owl"]
COLUMNS = {"x": ["age", "s?", "sex"], "labels": "species"}
TABLE: dict[str, Any] = {
    "train": {
        "path": "table.csv",
        "columns": COLUMNS,
        "fields": [
            {"columns": ["age"], "standardize": True, "missing": "mean", "type": "number"},
            {"columns": ["sex"], "one_hot": True},
        ],
        "bad_rows": 0.02,
    },
    "eval": {"fraction": 0.25, "stratify": "species"},
    "micro_batch": 8,
}


def write_table(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A table of 240 rows, of which two are bad; the ages (NaN where there is none), two numbers, sex and species."""
    random = np.random.default_rng(0)
    numbers, labels = random.normal(size=(240, 2)), random.integers(0, 3, 240)
    ages, sexes = random.integers(18, 80, 240).astype(float) + 10 * labels, random.integers(0, 2, 240)
    ages[17] = np.nan
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "note", "s1", "s2", "sex", "species"])
        for age, pair, sex, label in zip(ages, numbers.tolist(), sexes, labels, strict=True):
            shown = "" if np.isnan(age) else int(age)
            writer.writerow([shown, 'a "note",\non two lines', *pair, "fm"[sex], SPECIES[label]])
    with path.open("a") as file:
        file.write("old,x,1,2,f,cat\n1,2\n")
    return np.column_stack([ages, numbers, sexes == 0, sexes == 1]), labels


def write_run(folder: Path, name: str, data: dict[str, Any]) -> None:
    run = {
        "name": name,
        "model": {"path": "model.onnx", "loss": {"kind": "cross_entropy", "label": "labels"}, "metrics": ["accuracy"]},
        "data": data,
        "train": {"steps": 30, "optimizer": {"name": "adamw", "lr": 1e-2}, "evaluation": {"every_steps": 10}},
        "monitor": {"every_steps": 1},
        "resources": {"ranks_per_node": 1, "cpus_per_rank": 1},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(run))


def events(folder: Path, name: str, event: str) -> list[dict[str, Any]]:
    return of_kind(folder / "runs" / name, event)


def test_a_csv_from_nothing_to_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    cache = str(cache_without_gradients(tmp_path / "cache"))
    save_model(tmp_path / "model.onnx")
    x, labels = write_table(tmp_path / "table.csv")
    write_run(tmp_path, "table", TABLE)
    done = command("run", "table.yaml", folder=tmp_path, XDG_CACHE_HOME=cache)
    assert done.returncode == 0, done.stdout + done.stderr

    (skipped,) = events(tmp_path, "table", "bad_rows")
    assert (skipped["skipped"], skipped["samples"]) == (2, 180)
    assert mentions(skipped["first"], "table.csv, line 482", "'old'", "'age'")
    made = json.loads((tmp_path / "runs" / "table" / "export" / "inputs.json").read_text())
    assert made["labels"]["parts"][0]["classes"] == SPECIES

    # The same numbers, put together by hand, have the same curve.
    monkeypatch.setenv("ORTFLOW_CACHE", cache)
    section = {**TABLE, "train": {**TABLE["train"], "path": str(tmp_path / "table.csv")}}
    sets = DataSection.model_validate(section)
    train, evaluation = open_training(sets, 0), open_evaluation(sets, 0)
    assert isinstance(train, Selected)
    assert isinstance(evaluation, Selected)
    assert sorted([*train.rows, *evaluation.rows]) == list(range(240))
    assert np.bincount(labels[evaluation.rows]).tolist() == [round(n * 0.25) for n in np.bincount(labels)]
    own = x[train.rows, 0]
    mean, std = np.nanmean(own), np.nanstd(own)
    x[:, 0] = (np.where(np.isnan(x[:, 0]), mean, x[:, 0]) - mean) / std
    assert np.allclose(made["x"]["parts"][0]["mean"], mean)
    for name, rows in (("train", train.rows), ("eval", evaluation.rows)):
        write_batches(tmp_path / f"{name}.arrow", {"x": x[rows], "labels": labels[rows]})
    arrays = {"train": {"path": "train.arrow"}, "eval": {"path": "eval.arrow"}, "micro_batch": 8}
    write_run(tmp_path, "arrays", arrays)
    done = command("run", "arrays.yaml", folder=tmp_path, XDG_CACHE_HOME=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [[record["loss"] for record in events(tmp_path, name, "step")] for name in ("table", "arrays")]
    assert len(losses[0]) == 30
    assert np.allclose(losses[0], losses[1], rtol=0, atol=1e-5)
    scores = [[record["accuracy"] for record in events(tmp_path, name, "evaluation")] for name in ("table", "arrays")]
    assert scores[0] == scores[1]

    # Other rows than the run began with are refused.
    text = (tmp_path / "table.csv").read_text()
    (tmp_path / "table.csv").write_text(text.replace("cat\n1,2\n", "owl\n1,2\n").replace("f,owl", "m,owl", 1))
    done = command("run", "table.yaml", "train.steps=40", folder=tmp_path, XDG_CACHE_HOME=cache)
    assert done.returncode == 2
    assert mentions(done.stderr, "data.train.path", "other samples", "--fresh")
