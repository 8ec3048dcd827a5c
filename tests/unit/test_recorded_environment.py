"""The recorded environment: differences, which of them break reproducibility, and whether graphs are intact."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ortflow.workflow.run.graph_hashes import damage, hashes_of
from ortflow.workflow.run.recorded_environment import ASKED, PLACE, breaking, differences, merged
from ortflow.workflow.steps.run_plan import Plan

RECORD = {
    "asked": "auto",
    "kernels": "ortflow's (12345678)",
    "package": "onnxruntime-training-cpu",
    "onnxruntime": "1.19.2",
    "settings": "none",
    "graphs": "abc",
    "device": "cpu",
    "instructions": "AVX-512",
    "library": "def",
    "threads": "2",
}


def names(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [difference.name for difference in differences(before, now)]


def test_the_same_environment_has_no_difference() -> None:
    assert names(RECORD, dict(RECORD)) == []
    assert breaking(RECORD, dict(RECORD), same_ranks=True) == []


@pytest.mark.parametrize("name", [name for name in RECORD if name != ASKED])
def test_each_entry_is_compared_and_only_the_set_up_breaks_the_promise(name: str) -> None:
    now = RECORD | {name: "other"}
    assert names(RECORD, now) == [name]
    broken = [difference.name for difference in breaking(RECORD, now, same_ranks=True)]
    assert broken == ([name] if name not in PLACE else [])
    broken = [difference.name for difference in breaking(RECORD, now, same_ranks=False)]
    assert broken == (["graphs"] if name == "graphs" else [])


def test_other_kernels_that_were_asked_for_break_nothing() -> None:
    now = RECORD | {"kernels": "ONNX Runtime's", "asked": "onnxruntime", "library": "none"}
    assert names(RECORD, now) == ["kernels"]
    assert breaking(RECORD, now, same_ranks=True) == []
    assert breaking(now, RECORD, same_ranks=True) == []
    assert breaking(RECORD, now | {"graphs": "other"}, same_ranks=True) != []


def test_a_record_of_an_earlier_version_shows_no_difference() -> None:
    assert names({}, RECORD) == []
    assert breaking({}, RECORD, same_ranks=True) == []


def test_ranks_that_differ_are_all_named() -> None:
    assert merged([RECORD, RECORD | {"instructions": "AVX2"}, RECORD])["instructions"] == "AVX-512, AVX2"
    assert merged([RECORD, RECORD]) == RECORD


def flip(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


@pytest.mark.parametrize(("harm", "expected_text"), [(Path.unlink, "is missing"), (flip, "is damaged")])
@pytest.mark.parametrize("name", ["train.onnx", "train.kernels.onnx", "graphs.json", "initial.safetensors"])
def test_each_file_of_the_graphs_is_checked(
    tmp_path: Path, name: str, harm: Callable[[Path], None], expected_text: str
) -> None:
    for file in ("train.onnx", "train.kernels.onnx", "graphs.json", "initial.safetensors", ".hidden.onnx", "notes.txt"):
        (tmp_path / file).write_text(file)
    hashes = hashes_of(tmp_path)
    assert damage(tmp_path, hashes) is None
    (tmp_path / "notes.txt").unlink()
    assert damage(tmp_path, hashes) is None
    harm(tmp_path / name)
    assert damage(tmp_path, hashes) == f"{tmp_path / name} {expected_text}"
    shutil.rmtree(tmp_path)
    assert "is missing" in str(damage(tmp_path, hashes))


def test_graphs_of_an_earlier_version_are_not_known_to_be_whole(tmp_path: Path) -> None:
    assert "not a valid record" in str(damage(tmp_path, {}))


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "{}", '{"samples": 3}', "\udcff"])
def test_an_invalid_plan_is_a_value_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError):  # noqa: PT011 - of any kind: whoever reads it makes it again
        Plan.load(path)
