"""Optional capabilities of trainers: which of them a trainer has, and what is refused before the first step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from clocked_steps import FakeTrainer
from fake_clock import FakeClock
from messages import mentions
from run_files import spec_of

from ortflow.workflow.errors import UserError
from ortflow.workflow.trainer.step import GraphTrainer
from ortflow.workflow.trainer_protocol import capabilities
from ortflow.workflow.trainer_protocol.capabilities import (
    CAPABILITIES,
    Averaging,
    CopyingState,
    check_capabilities,
    members,
)
from ortflow.workflow.trainer_protocol.trainer import Trainer

PAGE = Path(__file__).resolve().parents[2] / "docs/trainers.md"
SGD = {"steps": 4, "optimizer": {"name": "sgd", "lr": 0.1}}


class Saves(FakeTrainer):
    """Half of `CopyingState`."""

    def before_save(self) -> None:
        """Nothing is copied."""


class Copies(Saves):
    """All of it."""

    def after_load(self) -> None:
        """Nothing was copied."""


def test_a_trainer_has_the_capabilities_whose_members_it_has() -> None:
    assert isinstance(Copies(FakeClock()), CopyingState)
    assert not isinstance(Saves(FakeClock()), CopyingState)
    assert not [each for each in CAPABILITIES if isinstance(FakeTrainer(FakeClock()), each)]
    check_capabilities(Copies(FakeClock()), spec_of(train=SGD))


def test_a_part_of_a_capability_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        check_capabilities(Saves(FakeClock()), spec_of(train=SGD))
    assert mentions(str(caught.value), "has before_save and no after_load", "CopyingState")


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"average": {"name": "ema", "decay": 0.9}}, "train.average"),
        ({"groups": [{"match": ["w"], "frozen_until": "2 steps"}]}, "train.groups"),
    ],
)
def test_a_key_that_needs_a_capability_is_refused_without_it(section: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        check_capabilities(FakeTrainer(FakeClock()), spec_of(train={**SGD, **section}))
    assert caught.value.where == key


def test_the_page_has_each_capability_with_its_members() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.read_text().split("| capability |")[1], re.MULTILINE))
    documented = {name: sorted(re.findall(r"`(\w+)", cell)) for name, cell in rows.items()}
    assert documented == {each.__name__: members(each) for each in CAPABILITIES}


def test_every_capability_is_in_the_list_and_the_graph_trainer_has_all() -> None:
    defined = {each for each in vars(capabilities).values() if getattr(each, "_is_protocol", False)}
    assert {each for each in defined if each.__module__ == capabilities.__name__} == {*CAPABILITIES}
    flags = {"prefetches", "begins", "before_wait"}
    missing = [name for each in CAPABILITIES for name in members(each) if not hasattr(GraphTrainer, name)]
    assert {*missing} == flags, "set when it is created"
    assert members(Averaging) == ["exchange_average"]
    assert len(members(Trainer)) == 9
