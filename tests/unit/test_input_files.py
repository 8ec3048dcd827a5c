"""Which files of a run are compared between its attempts, and what a change of each leads to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from run_files import spec_of

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.steps.input_files import input_hashes, refuse_other_files
from ortflow.workflow.trainer import Report

FILES = {
    "model.loss.terms[0].loss.teacher": "teacher.onnx",
    "model.graphs.optimizer": "update.onnx",
    "data.train.text.tokenizer": "tokenizer.json",
    "data.train.transforms[0].onnx": "augment.onnx",
    "data.train.transforms[1].function": "change.py",
    "data.train.transforms[2].function": "changes_of_a_package.py",
    "model.metrics[0].path": "metric.onnx",
    "data.eval.transforms[0].function": "change.py",
    "data.eval_sets.other.text.tokenizer": "other.json",
}
OF_EVALUATIONS = [key for key in FILES if key.startswith(("model.metrics", "data.eval"))]


@pytest.fixture
def sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in FILES.values():
        (tmp_path / name).write_text(name)
    monkeypatch.syspath_prepend(str(tmp_path))
    terms = [{"loss": {"kind": "kl_div", "teacher": "teacher.onnx"}}, {"loss": {"kind": "cross_entropy"}}]
    transforms = [
        {"onnx": "augment.onnx"}, {"column": "x", "function": "change.py:f"},
        {"column": "x", "function": "changes_of_a_package:f"}, {"column": "x", "function": "nowhere_to_be_found:f"},
    ]  # fmt: skip
    text = {"path": "a.txt", "text": {"tokenizer": "tokenizer.json"}, "transforms": transforms}
    return {
        "model": {
            "path": "model.onnx", "loss": {"kind": "sum", "terms": terms}, "graphs": {"optimizer": "update.onnx"},
            "metrics": [{"name": "graph", "path": "metric.onnx"}],
        },
        "data": {
            "train": text, "eval": {"path": "b.txt", "transforms": transforms[1:2]}, "micro_batch": 4,
            "eval_sets": {"other": {"path": "c.txt", "text": {"tokenizer": "other.json"}}},
        },
    }  # fmt: skip


@pytest.mark.parametrize("exact", [True, False])
def test_each_file_is_compared_by_content(sections: dict[str, Any], tmp_path: Path, exact: bool) -> None:
    spec = resolve_paths(spec_of(**sections, checkpoint={"exact": exact}), tmp_path / "run.yaml")
    before = input_hashes(spec)
    assert before.keys() == FILES.keys()
    for key, name in FILES.items():
        os.utime(tmp_path / name, (1, 1))
        assert input_hashes(spec) == before, "a file that is only touched is the same"
        (tmp_path / name).write_text(name.upper())
        now, warnings = {**before, key: input_hashes(spec)[key]}, list[str]()
        report = Report(note=warnings.append, warn=warnings.append, record=lambda kind, **values: None)
        refuse_other_files(before, now, spec, report, saved=False)
        if exact and key not in OF_EVALUATIONS:
            with pytest.raises(UserError, match="has changed since this run began: the loss curve would") as error:
                refuse_other_files(before, now, spec, report, saved=True)
            assert error.value.where == key
        else:
            refuse_other_files(before, now, spec, report, saved=True)
        assert len(warnings) == 1 + (not exact or key in OF_EVALUATIONS)
        assert all(line.startswith(f"{key}: {tmp_path / name} has changed") for line in warnings)
        (tmp_path / name).write_text(name)
