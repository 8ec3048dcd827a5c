"""The trace of a program: digests of values, and the entries of living objects."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflow.program.digests import digest, leaves, order_digest
from ortflow.program.living import Entry, living
from ortflow.program.trace import Tracer, registered_states
from ortflow.workflow.run.strike import Plan, struck_at

MEMORY: dict[str, int] = {}


def entries(registered: dict[str, Any] | None = None) -> dict[str, Entry]:
    """The entries of the calling test's variables, by path alone."""
    found = living(sys._getframe(1), registered or {})
    return {key.split(":", 2)[2]: entry for key, entry in found.items()}


def test_digests_differ_in_one_bit_and_are_equal_for_equal_bits() -> None:
    assert digest(0.1) == digest(0.1)
    assert digest(0.1) != digest(np.nextafter(0.1, 1).item())
    assert digest(0.0) != digest(-0.0)
    assert digest([1, "2"]) == digest([1, "2"]) != digest(["1", 2])
    assert digest(np.zeros(3)) != digest(np.zeros((3, 1)))
    assert digest({"a": 1, "b": 2}) != digest({"b": 2, "a": 1})


def test_the_digest_of_a_set_ignores_its_order() -> None:
    words = [str(number) for number in range(40)]
    assert digest(set(words)) == digest({*words[20:], *words[:20]})
    assert order_digest(set(words)) == order_digest(set(words))


def test_the_order_of_a_set_differs_between_seeds_of_the_hash() -> None:
    code = "from ortflow.program.digests import *; s = {str(i) for i in range(99)}; print(digest(s), order_digest(s))"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][1] != outputs[1][1]


def test_leaves_of_a_state_dict_have_the_path_of_their_keys() -> None:
    array = np.ones(2)
    state = {"state": {0: {"exp_avg": array}}, "groups": [{"lr": 0.1, "of": array}], "betas": [0.9, 0.99]}
    assert dict(leaves(state)) == {
        "state.0.exp_avg": array, "groups.0.lr": 0.1, "groups.0.of": array, "betas": [0.9, 0.99],
    }  # fmt: skip


def drawing(seed: int) -> Callable[[], float]:
    hidden = random.Random(seed)
    return lambda: hidden.random()


class Augmentation:
    generator = random.Random(3)

    def __init__(self) -> None:
        self.private = np.random.default_rng(5)
        self.seen = 0


def test_generators_are_entries_wherever_they_are() -> None:
    augmentation = Augmentation()
    by_closure = {"draw": drawing(1)}
    before = entries()
    assert before["augmentation.private"].kind == "numpy.random.Generator"
    assert before["Augmentation.generator"].kind == "random.Random"
    assert before["by_closure['draw'].hidden"].kind == "random.Random"
    augmentation.private.random(), by_closure["draw"](), Augmentation.generator.random()
    after = entries()
    changed = {name for name, entry in after.items() if before.get(name) != entry}
    assert {"augmentation.private", "Augmentation.generator", "by_closure['draw'].hidden"} <= changed
    assert "augmentation.seen" not in changed


def numbers() -> Any:
    place = 0
    while True:
        place += 1
        yield place


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2, 3, 4]),
        lambda: iter(range(9)),
        lambda: enumerate(["a", "b", "c"]),
        lambda: zip([1, 2, 3], [4, 5, 6], strict=False),
        lambda: itertools.count(3),
        numbers,
    ],
    ids=["list", "range", "enumerate", "zip", "count", "generator"],
)
def test_the_position_of_an_iterator_is_an_entry_and_reading_it_does_not_move_it(make: Callable[[], Any]) -> None:
    stream, other = make(), make()
    next(stream)
    before = {name: entry for name, entry in entries().items() if name.startswith("stream")}
    again = {name: entry for name, entry in entries().items() if name.startswith("stream")}
    assert before == again
    next(other)
    assert next(stream) == next(other)
    after = {name: entry for name, entry in entries().items() if name.startswith("stream")}
    assert before != after
    assert any(entry.kind == "iterator" for entry in after.values())


def test_variables_of_modules_and_of_callers_are_entries(tmp_path: Path) -> None:
    history, count = [0.5], 3  # noqa: F841  read through the frame
    file = (tmp_path / "text").open("w+")
    file.write("some text")
    file.seek(4)
    found = entries()
    assert found["history"].kind == "list"
    assert (found["count"].kind, found["count"].shown) == ("number", "3")
    assert found["file<position>"].shown == "at byte 4"
    MEMORY["a"] = 1
    assert entries()["MEMORY"].digest != found["MEMORY"].digest
    MEMORY.clear()
    file.close()


def test_objects_of_torch_are_entries_unless_they_are_registered() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    draws = torch.Generator().manual_seed(3)  # noqa: F841  read through the frame
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    schedule.step()
    found = entries()
    assert found["model.1.running_mean"].kind == "buffer"
    assert found["model.0.weight.grad"].kind == "gradient"
    assert found["optimizer.state.0.exp_avg"].kind == "optimizer"
    assert found["schedule.last_epoch"].shown == "1"
    assert found["draws"].kind == "torch.Generator"
    less = entries({"model": model, "optimizer": optimizer})
    assert "model.1.running_mean" not in less
    assert not any(entry.kind == "optimizer" for entry in less.values())
    assert "schedule.last_epoch" in less


def test_a_tracer_writes_a_line_for_each_step_and_strikes_once(tmp_path: Path) -> None:
    Plan(100, "SIGCONT", step=1).write(tmp_path)
    first = Tracer(tmp_path, 0, 0, None)
    for step in range(4):
        first.log({"loss": step / 2})
        first.before(step, [step], {})
        if step == 2:
            assert struck_at(tmp_path) is None, "nothing is committed yet"
            first.committed()
    assert struck_at(tmp_path) == 3
    Tracer(tmp_path, 0, 1, 1).before(1, [1], {})
    lines = [json.loads(line) for line in (tmp_path / "rank-0000-attempt-00.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[1]["logged"] == {"loss": digest(0.5)}
    (resumed,) = (tmp_path / "rank-0000-attempt-01.jsonl").read_text().splitlines()
    assert json.loads(resumed)["batch"] == lines[1]["batch"] != lines[2]["batch"]
    assert struck_at(tmp_path) == 3


def test_in_a_loop_of_the_programs_own_a_line_is_written_at_the_first_call_of_a_module(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    Plan(100).write(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    tracer = Tracer(tmp_path, 0, 0, None)
    tracer.watch_modules()
    try:
        for step in range(1, 4):
            model(torch.full((3, 2), float(step)))
            tracer.after(step)
    finally:
        tracer.close()
    lines = [json.loads(line) for line in (tmp_path / "rank-0000-attempt-00.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert len({line["batch"] for line in lines}) == 3


def test_the_line_after_a_pass_is_completed_by_the_first_batch_of_the_next(tmp_path: Path) -> None:
    Plan(100).write(tmp_path)
    tracer = Tracer(tmp_path, 0, 0, None)
    tracer.before(0, [1], {})
    tracer.log({"loss": 0.5})
    for batch in (None, [2], [3]):
        tracer.before(1, batch, {})
    lines = [json.loads(line) for line in (tmp_path / "rank-0000-attempt-00.jsonl").read_text().splitlines()]
    assert [(line["step"], line["batch"]) for line in lines] == [(0, digest([1])), (1, None), (1, digest([2]))]
    assert [line["logged"] for line in lines] == [{}, {"loss": digest(0.5)}, {"loss": digest(0.5)}]


def test_registered_generators_are_states_of_their_own() -> None:
    noise = random.Random(3)
    before = registered_states({"noise": noise})
    noise.random()
    assert before.keys() == registered_states({"noise": noise}).keys() == {"noise"}
    assert before != registered_states({"noise": noise})
    assert not any(name.endswith("noise") for name in entries({"noise": noise}))
