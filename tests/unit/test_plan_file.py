"""The plan of a run on the disk: a changed number is noticed, because a run would go on with another batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ortflow.workflow.steps.run_plan import Plan, number_in

PLAN = Plan("f", 4, 2, 3, 5, 30, 1000, 33, 660, 12345, {"train": "abc"}, "data")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    PLAN.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_plan_is_read_as_it_was_written(file: Path) -> None:
    assert Plan.load(file) == PLAN
    assert number_in(file, "global_batch") == 30
    assert number_in(file, "fingerprint") is None
    assert number_in(file, "nothing") is None


@pytest.mark.parametrize("key", ["world_size", "global_batch", "samples", "fingerprint"])
def test_a_changed_value_does_not_match_the_hash(file: Path, key: str) -> None:
    body = json.loads(file.read_text())
    file.write_text(json.dumps({**body, key: body[key] * 2}))
    with pytest.raises(ValueError, match="does not match its hash"):
        Plan.load(file)
    assert number_in(file, "global_batch") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch": "30"}, "global_batch is '30'"),
        ({"global_batch": -1}, "global_batch is '-1'"),
        ({"global_batch": True}, "global_batch is 'True'"),
        ({"global_batch": 2**63}, "global_batch is"),
        ({"fingerprint": 1}, "fingerprint is '1'"),
        ({"graphs": {"train": 1}}, "graphs is"),
        ({"odd": 1}, "odd"),
    ],
)
def test_values_of_another_type_are_refused_where_there_is_no_hash(
    file: Path, change: dict[str, object], words: str
) -> None:
    """Plans of earlier versions have none."""
    body = json.loads(file.read_text())
    del body["hash"]
    file.write_text(json.dumps({**body, **change}))
    with pytest.raises(ValueError, match="is not a valid plan") as raised:
        Plan.load(file)
    assert words in str(raised.value)
