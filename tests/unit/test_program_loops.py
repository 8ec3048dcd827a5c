"""Level 2 of `ortflow.program` without torch: position, random states, epochs, periods, refusals; fast programs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from forks import Forks
from program_server import ProgramServer

from ortflow.program import trees
from ortflow.program.boundary import LONGEST_ACCUMULATION, Boundary
from ortflow.program.trees import TensorPlace

PROGRAM = """
import os, random, signal, sys
import numpy as np
import ortflow.program

class Loader:
    "Shuffled anew in each pass, with numbers of the process's own generators."
    def __len__(self):
        return 5
    def __iter__(self):
        order = random.sample(range(5), 5)
        for number in order:
            yield number, random.random()

class Counter:
    value = 0
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

class Stateful(Loader):
    "Continues by itself."
    at = 0
    def __iter__(self):
        while self.at < 5:
            self.at += 1
            yield self.at, 0.0
        self.at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

class WithSampler:
    num_workers = 0
    def __init__(self, sampler):
        self.batch_sampler = sampler
    def __iter__(self):
        for samples in self.batch_sampler:
            yield samples, random.random()

kind, kill = sys.argv[1], int(sys.argv[2])
loader = {"replay": Loader, "state": Stateful,
          "sampler": lambda: WithSampler(ortflow.program.Sampler(23, batch=4, seed=2))}[kind]()
counter, own = Counter(), np.random.default_rng(3)
random.seed(1)
np.random.seed(1)
run = ortflow.program.start(counter=counter, own=own)
def train(batch):
    counter.value += batch[0] if isinstance(batch[0], int) else sum(batch[0])
    print(run.position, run.epoch, batch, random.random(), np.random.rand(), own.random(), counter.value, flush=True)
    if run.position + 1 == kill and run.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
if "epochs" in sys.argv:
    for epoch in run.epochs(4):
        for batch in run.steps(loader):
            train(batch)
        print("validate", epoch, random.random(), flush=True)
elif "phases" in sys.argv:
    for batch in run.steps(loader, total=8):
        train(batch)
    print("second", random.random(), flush=True)
    second = WithSampler(ortflow.program.Sampler(9, batch=2, seed=5)) if kind == "sampler" else type(loader)()
    for batch in run.steps(second, total=20):
        train(batch)
else:
    for batch in run.steps(loader, total=20):
        train(batch)
print("final", counter.value, random.random(), own.random(), run.total, flush=True)
"""


def run(folder: Path, *arguments: str, attempt: int = 0, period: int = 3, ranks: int = 1) -> list[list[str]]:
    script = folder.parent / "program.py"
    script.write_text(PROGRAM)
    with ProgramServer(folder, ranks, attempt, period={"steps": period, "seconds": None}) as server:
        processes = server.start(script, *arguments)
        return [process.communicate(timeout=60)[0].splitlines() for process in processes]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks("numpy", "ortflow.program.run", environment=os.environ)
    yield forks
    forks.end()


@pytest.mark.parametrize("loops", ["", "epochs", "phases"])
@pytest.mark.parametrize("kind", ["replay", "state", "sampler"])
def test_a_program_that_is_killed_anywhere_continues_exactly(
    tmp_path: Path, forks: Forks, kind: str, loops: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def forked(folder: Path, kill: int, attempt: int = 0) -> list[str]:
        with ProgramServer(folder, attempt=attempt, period={"steps": 3, "seconds": None}) as server:
            ended = forks.run(
                str(script), kind, str(kill), loops, folder=tmp_path, environment=server.environment(), timeout=60
            )
            return [*ended.stdout.splitlines(), *ended.stderr.splitlines()]

    calm = forked(tmp_path / "calm", 0)
    assert calm[-1].startswith("final"), calm[-20:]
    for kill in (4, 5, 6, 8, 9, 10, 13, 20):
        folder = tmp_path / f"killed-{kill}"
        first = forked(folder, kill)
        assert len(first) >= kill
        assert first == calm[: len(first)]
        second = forked(folder, 0, attempt=1)
        saved = [step for step in range(kill) if step % 3 == 0 or (step == 8 and loops == "phases")]
        steps = [line for line in second if line[0].isdigit()]
        assert int(steps[0].split()[0]) == saved[-1]
        # Between two loops the random states are those of the program's start, until the second loop continues.
        again = [line for line in second if loops != "phases" or not line.startswith("second")]
        expected = [line for line in calm if loops != "phases" or not line.startswith("second")]
        assert again == expected[-len(again) :], kill


def test_other_ranks_are_refused_unless_the_loader_has_a_sampler(tmp_path: Path) -> None:
    """Without torch, nothing compares the ranks' states: the change is refused with every loader."""
    for part in run(tmp_path / "checkpoints", "replay", "0", ranks=2):
        assert part[-1].startswith("final")
    (lines,) = run(tmp_path / "checkpoints", "replay", "0", attempt=1)
    assert "the checkpoint is of 2 ranks, and this run has 1" in lines[-1]


def test_without_ortflow_a_program_stops_on_a_signal_and_continues(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGTERM)"))

    def alone(kill: int) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return subprocess.run(
            [sys.executable, str(script), "replay", str(kill)],
            cwd=tmp_path,
            env=environment,
            text=True,
            capture_output=True,
        )

    stopped = alone(7)
    assert stopped.returncode == 75
    assert "stopped after step 7 (SIGTERM)" in stopped.stderr
    resumed = alone(0)
    assert "resumed after step 7" in resumed.stderr
    (calm,) = run(tmp_path / "calm", "replay", "0")
    assert stopped.stdout.splitlines() + resumed.stdout.splitlines() == calm


def test_other_objects_than_the_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    text = PROGRAM.replace("start(counter=counter, own=own)", "start(counter=counter)")
    run(tmp_path / "checkpoints", "replay", "0")
    script.write_text(text)
    with ProgramServer(tmp_path / "checkpoints", attempt=1) as server:
        (process,) = server.start(script, "replay", "0")
        last = process.communicate(timeout=60)[0].splitlines()[-1]
        (rejected,) = server.of_kind("rejected")
    assert "start() was called with counter, and the checkpoint has the state of counter, own" in last
    assert rejected["step"] == 20
    assert rejected["reason"] in last


def test_objects_without_state_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import ortflow.program\nortflow.program.start(thing=3)")
    with ProgramServer(tmp_path / "checkpoints") as server:
        (process,) = server.start(script)
        assert "start(thing=…): int has no state_dict" in process.communicate(timeout=60)[0]


class Optimizer:
    """Calls its hook, as torch's do; `param_groups` has one parameter, with a gradient or None."""

    def __init__(self, grad: float | None) -> None:
        self.param_groups = [{"params": [SimpleNamespace(grad=grad)]}]

    def register_step_post_hook(self, hook: object) -> None:
        self.step = hook


def test_saves_are_due_by_steps_requests_and_whole_accumulations() -> None:
    boundary = Boundary({"steps": 3}, None)
    due = []
    for position in range(10):
        if boundary.due(position, (False, position == 5)):
            boundary.saved()
            due.append(position)
    assert due == [3, 5, 6, 9]
    assert boundary.stopping is False


def test_saves_wait_for_whole_accumulations() -> None:
    optimizer = Optimizer(0.5)
    boundary = Boundary({"steps": 3}, None)
    boundary.watch(optimizer)
    due = []
    for position in range(14):
        if boundary.due(position, (position == 9, False)):
            boundary.saved()
            due.append(position)
        if position % 4 == 3:
            optimizer.step()  # type: ignore[operator]
    assert due == [4, 8, 12]
    assert boundary.stopping
    for grad, first in ((None, 3), (0.5, LONGEST_ACCUMULATION + 3)):  # an optimizer that is never called
        boundary = Boundary({"steps": 3}, None)
        boundary.watch(Optimizer(grad))
        assert next(position for position in range(1, 1000) if boundary.due(position, (False, False))) == first


def test_saves_wait_for_an_engine() -> None:
    """One that accumulates gradients of two steps by itself: positions that are odd are within an update."""
    position, due = 0, []
    boundary = Boundary({"steps": 3}, None)
    boundary.wait_for(lambda: position % 2 == 0)
    for position in range(12):
        if boundary.due(position, (position == 7, False)):
            boundary.saved()
            due.append(position)
    assert due == [4, 6, 8, 10]  # of 3, 6, the stop after 7, and 9
    assert boundary.stopping


def test_a_checkpoint_of_level_1_is_the_programs(tmp_path: Path) -> None:
    """`start(jax=True)` with nothing to register; but its steps have no position."""
    script = tmp_path / "program.py"
    script.write_text("""
import sys
import ortflow.program
run = ortflow.program.start()
print("latest", run.latest() and (run.latest() / "own").read_text(), flush=True)
if "steps" in sys.argv:
    next(run.steps([1]))
with run.commit(3) as folder:
    (folder / "own").write_text("mine")
""")
    texts = [run_script(script, tmp_path / "checkpoints", *words) for words in ((), (), ("steps",))]
    assert [text.splitlines()[0] for text in texts] == ["latest None", "latest mine", "latest mine"]
    assert "step-00000003 was not saved by run.steps: load it with run.latest(), or remove it" in texts[2]


def run_script(script: Path, folder: Path, *words: str) -> str:
    """What a program prints."""
    with ProgramServer(folder) as server:
        (process,) = server.start(script, *words)
        output: str = process.communicate(timeout=60)[0]
        return output


def test_the_period_in_seconds_asks_once() -> None:
    now, asked = [0.0], []
    boundary = Boundary({"seconds": 10.0}, lambda: asked.append(now[0]), clock=lambda: now[0])
    for second in range(30):
        now[0] = float(second)
        if boundary.due(second, (False, second in (13, 25))):
            boundary.saved()
    assert asked == [10.0, 23.0]


def test_trees_are_taken_apart_and_put_together() -> None:
    from collections import OrderedDict, namedtuple

    pair = namedtuple("pair", "first second")
    tree = {"a": [1, (2, None)], 3: OrderedDict(b=4), "p": pair(5, {"c": 6})}
    assert dict(trees.leaves(tree)) == {"a.0": 1, "a.1.0": 2, "a.1.1": None, "3.b": 4, "p.0": 5, "p.1.c": 6}
    copy = trees.replace(tree, lambda path, leaf: leaf)
    assert copy == tree
    assert type(copy[3]) is OrderedDict
    assert isinstance(copy["p"], pair)
    assert trees.digest(tree) == trees.digest(copy)
    assert trees.digest({"a": 1.0}) != trees.digest({"a": 1})
    assert trees.digest({"a": TensorPlace("a", (1,), "f", "cpu")}) != trees.digest(
        {"a": TensorPlace("a", (2,), "f", "cpu")}
    )
    random.seed(0)
    assert trees.digest({"state": random.getstate()}) == trees.digest({"state": random.getstate()})


DIGESTS = """
from collections import deque
from ortflow.program import trees

class Names(set):
    pass

class Node:
    def __init__(self, *edges):
        self.edges = set(edges)

words = [f"word {number}" for number in range(20)]
named, other = Names(words), Names(words)
named.kind, other.kind = "verb", "noun"
start = Node("end")
start.edges.add(start)
for tree in (
    {"seen": set(words)}, [(1, frozenset(words))], {"queue": deque([{"a": set(words)}])}, {"sets": {frozenset(words)}},
    {frozenset(words): 1}, {"named": named}, {"named": other}, {"graph": start},
):
    print(trees.digest(tree))
"""


def test_the_digest_of_a_set_does_not_depend_on_the_seed_of_hashes(tmp_path: Path) -> None:
    """Ranks of one run have different ones."""
    outputs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], cwd=tmp_path, env=environment, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) == 8


def test_unequal_leaves_have_unequal_digests() -> None:
    values = [
        set("ab"), frozenset("ab"), set("abc"), {1, 2}, {1.0, 2.0}, {frozenset("ab")}, {frozenset("a")},
        {(1, "a")}, {(1, "b")}, Fraction(1, 2), Fraction(1, 3),
    ]  # fmt: skip
    assert len({trees.digest({"a": value}) for value in values}) == len(values)


def test_equal_leaves_have_equal_digests_whatever_objects_they_share() -> None:
    word = "".join(["tw", "ice"])
    assert trees.digest(deque([word, word])) == trees.digest(deque([word, "".join(["twi", "ce"])]))
    ring: deque[object] = deque([word])
    ring.append(ring)
    assert trees.digest(ring) == trees.digest(ring)
