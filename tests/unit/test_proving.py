"""Where two traces part, and the name of the state that a resume forgot."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from ortflow.launchers.proving.causes import _CAUSES, _OF_READINGS, Cause, causes, causes_between_calm_runs
from ortflow.launchers.proving.parting import Effect, Parting, harmless, noise, parting, root, unsteady, without
from ortflow.launchers.proving.sources import readings
from ortflow.launchers.proving.traces import Entry, Line, Steps, parse

STEPS, RESUMED = 8, 4


def steps(**entries: str) -> Steps:
    """A rank's lines: `kind__name` and the state of it, in which `{step}` is replaced."""
    lines = {}
    for step in range(STEPS + 1):
        state = {}
        for name, value in entries.items():
            kind, _, variable = name.partition("__")
            kind = kind.replace("_", " ")
            key = f"random:{kind}" if kind.endswith("generator") else f"train.py::{variable}"
            state[key] = Entry(kind.replace("dot ", "torch."), value.format(step=step), file="train.py")
        lines[step] = Line(0, step, f"batch {step}" if step < STEPS else None, {"loss": f"loss {step}"}, state)
    return lines


def resumed(calm: Steps, changed: str, **effects: int) -> Steps:
    """The lines of a run in which entries of one kind differ from the resume on; `effects` begin at a step."""
    lines = {}
    for step in range(RESUMED, STEPS + 1):
        line = calm[step]
        state = {
            key: entry._replace(digest="other " + entry.digest)
            if entry.kind == changed or (entry.kind in ("registered", "parameter") and step >= effects.get("state", 99))
            else entry
            for key, entry in line.state.items()
        }
        batch = line.batch and ("other " if step + 1 >= effects.get("batch", 99) else "") + line.batch
        loss = ("other " if step >= effects.get("loss", 99) else "") + line.logged["loss"]
        lines[step] = replace(line, batch=batch, logged={"loss": loss}, state=state)
    return lines


FIRST = RESUMED + 1
CASES = [
    ("python_generator", "python generator", {"batch": FIRST}, "random state of Python"),
    ("torch_generator", "torch generator", {"loss": FIRST}, "random state of torch"),
    ("iterator__stream", "iterator", {"batch": FIRST}, "the position in the data"),
    ("sampler__sampler", "sampler", {"batch": FIRST}, "the epoch of the sampler"),
    ("scheduler__schedule", "scheduler", {"state": FIRST + 1}, "the learning rate schedule"),
    ("optimizer__optimizer", "optimizer", {"state": FIRST}, "the state of the optimizer"),
    ("scaler__scaler", "scaler", {"state": FIRST}, "the gradient scaler"),
    ("buffer__norm", "buffer", {"loss": FIRST}, "buffers of a module, such as the statistics of BatchNorm"),
    ("dict__memory", "dict", {"loss": FIRST + 1}, "a variable that the loop changes"),
    ("parameter__ema", "parameter", {}, "a copy of the parameters, such as an EMA"),
]


@pytest.mark.parametrize(("name", "kind", "effects", "cause"), CASES, ids=[case[0] for case in CASES])
def test_the_forgotten_state_is_named(name: str, kind: str, effects: dict[str, int], cause: str) -> None:
    """Beside it, a list of losses and a start step differ, which nothing depends on."""
    calm = steps(**{name: "{step}", "registered__model": "{step}", "list__losses": "{step}", "number__start": "0"})
    other = resumed(calm, kind, **effects)
    for step, line in other.items():
        changed = {key: entry._replace(digest="x") for key, entry in line.state.items() if entry.kind == "number"}
        changed |= {
            key: entry._replace(digest=f"-{step}") for key, entry in line.state.items() if key.endswith("losses")
        }
        other[step] = replace(line, state={**line.state, **changed})
    found = parting(calm, other)
    assert found is not None
    assert found.resumed == RESUMED
    assert causes(found)[0].name == cause


def test_equal_runs_do_not_part_and_a_list_of_losses_is_harmless() -> None:
    calm = steps(registered__model="{step}", list__losses="{step}")
    other = resumed(calm, "list")
    assert parting(calm, calm) is None
    assert parting(calm, other) is None
    assert harmless(calm, other) == ["train.py::losses"]


def test_what_differs_between_calm_runs_is_no_suspect() -> None:
    calm = steps(registered__model="{step}", number__started="1", number__count="{step}")
    again = steps(registered__model="{step}", number__started="2", number__count="{step}")
    ignored = noise(calm, again)
    assert ignored == {"train.py::started"}
    found = parting(calm, resumed(calm, "number", state=FIRST), ignored)
    assert found is not None
    assert [suspect.key for suspect in found.suspects] == ["train.py::count"]


def with_values(run: Steps, **values: str) -> Steps:
    """The lines with further logged values, in which `{step}` is replaced."""
    return {
        step: replace(line, logged={**line.logged, **{key: text.format(step=step) for key, text in values.items()}})
        for step, line in run.items()
    }


def test_values_that_measure_the_machine_are_not_compared() -> None:
    calm = steps(registered__model="{step}")
    first, second = with_values(calm, seconds="a{step}"), with_values(calm, seconds="b{step}")
    assert unsteady(first, second) == {"seconds"}
    assert parting(first, second) is not None
    assert parting(without(first, unsteady(first, second)), second) is None
    apart = {step: replace(line, batch=f"other {line.batch}") for step, line in second.items()}
    apart = with_values(apart, loss="x{step}")
    assert unsteady(first, apart) == {"seconds"}, "the loss follows the batch"


def test_a_constant_generator_is_not_the_cause() -> None:
    calm = steps(python_generator="same", torch_generator="{step}", registered__model="{step}")
    other = resumed(resumed_all(calm), "torch generator", loss=FIRST)
    found = parting(calm, other)
    assert found is not None
    assert [cause.name for cause in causes(found)] == ["random state of torch"]


def resumed_all(calm: Steps) -> Steps:
    """Lines in which Python's generator differs and nothing depends on it."""
    return {
        step: replace(
            line, state={k: e._replace(digest="0") if "python" in e.kind else e for k, e in line.state.items()}
        )
        for step, line in calm.items()
    }


def test_old_gradients_are_the_cause_only_while_they_are_accumulated() -> None:
    calm = steps(parameter__model="{step}", gradient__grad="{step}", list__memory="{step}")
    found = parting_of(calm)
    assert not found.accumulating
    assert causes(found)[0].name == "a variable that the loop changes"
    found = parting_of({step: keep(line) for step, line in calm.items()})
    assert found.accumulating
    assert causes(found)[0].name == "gradients that are accumulated over several steps"


def keep(line: Line) -> Line:
    """The line of a run that updates its parameters in every fourth step, from the third on."""
    state = {
        key.replace("grad", "model.grad"): entry._replace(digest=str((line.step + 1) // 4))
        if entry.kind == "parameter"
        else entry
        for key, entry in line.state.items()
    }
    return replace(line, state=state)


def parting_of(calm: Steps) -> Parting:
    """Of a run with other gradients and another list after the resume."""
    found = parting(calm, resumed(resumed(calm, "list"), "gradient", loss=FIRST + 2))
    assert found is not None
    return found


def test_workers_are_named_when_a_batch_differs_and_nothing_else() -> None:
    calm = steps(workers__loader="2", registered__model="{step}")
    found = parting(calm, resumed(calm, "nothing", batch=FIRST))
    assert found is not None
    assert causes(found) == [Cause("random state in the workers of the loader", "loader in train.py")]


def test_every_cause_has_a_fix() -> None:
    names = {*_CAUSES.values(), *_OF_READINGS.values(), *(case[3] for case in CASES)}
    assert all(Cause(name, "").fix for name in names)


def test_variables_that_the_first_step_assigns_are_no_suspects() -> None:
    calm = steps(registered__model="{step}", tensor__output="{step}", optimizer__adam="{step}")
    calm = {step: with_state(line) for step, line in calm.items()}
    other = resumed(calm, "nothing", state=FIRST)
    other[RESUMED] = replace(
        other[RESUMED],
        state={key: entry for key, entry in other[RESUMED].state.items() if not key.endswith(("output", "exp_avg"))},
    )
    found = parting(calm, other)
    assert found is not None
    assert [suspect.key for suspect in found.suspects] == ["train.py::adam.state.0.exp_avg"]


def with_state(line: Line) -> Line:
    """The line with a moment of the optimizer, which an optimizer that was just made has not."""
    moment = Entry("optimizer", f"moment {line.step}")
    return replace(line, state={**line.state, "train.py::adam.state.0.exp_avg": moment})


@pytest.mark.parametrize(
    ("key", "variable"),
    [
        ("train.py::model.0.weight", "train.py::model"),
        ("train.py:main:memory['a.b']", "train.py:main:memory"),
        ("train.py::stream<position>", "train.py::stream"),
        ("random:torch", "random:torch"),
    ],
)
def test_the_variable_of_a_key(key: str, variable: str) -> None:
    assert root(key) == variable


def test_a_line_of_a_trace() -> None:
    line = parse({
        "rank": 1, "attempt": 0, "step": 3, "batch": "b", "logged": {"loss": "l"}, "random": {"python": "p"},
        "registered": {"model.weight": "w"}, "living": {"train.py::count": ["number", "d", "3", "train.py"]},
    })  # fmt: skip
    assert line.state["random:python"].kind == "python generator"
    assert line.state["registered:model.weight"] == Entry("registered", "w")
    assert line.state["train.py::count"].shown == "3"


SOURCE = textwrap.dedent("""
    import os, random, time
    from time import time as now
    names = {"b", "a"}
    started = time.time()
    salt = os.getpid()
    random.seed(salt)
    draw = random.Random(7 + run.attempt)
    for name in names: pass
    for name in sorted(names): pass
    files = sorted(os.listdir("."))
    other = os.listdir(".")
    numbered = sorted(os.listdir("."), key=len)
    jitter = now() % 1
    rank = os.environ["RANK"]
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
""")


def test_readings_of_a_source() -> None:
    found = [(reading.kind, reading.line, reading.seeds) for reading in readings(SOURCE, "train.py")]
    assert found == [
        ("time", 5, False), ("process", 6, True), ("attempt", 8, True), ("hash", 9, False), ("folder", 12, False),
        ("time", 14, False), ("attempt", 16, False),
    ]  # fmt: skip
    assert readings("not Python (", "x") == []


def test_between_calm_runs_the_seed_is_named_before_a_clock_that_only_measures() -> None:
    found = Parting(0, 0, Effect("batch", 1), ())
    (cause,) = causes_between_calm_runs(found, readings(SOURCE, "train.py"), by_hash=False)
    assert cause == Cause("the process or the machine in the data path", "os.getpid() in train.py, line 6")
    (cause,) = causes_between_calm_runs(found, readings(SOURCE, "train.py"), by_hash=True)
    assert cause == Cause("the order of a set", "names in train.py, line 9")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sum(weights[name] for name in {'a', 'b', 'c'})", True),
        ("sum([weights[name] for name in names])", True),
        ("sum(len(name) + 1 for name in names)", False),
        ("sum(name != 'a' for name in names)", False),
        ("sum(len(name) / 3 for name in names)", True),
        ("math.fsum(weights[name] for name in names)", False),
        ("max(names)", False),
        ("max(names, key=len)", True),
        ("sorted((name for name in names), key=len)", True),
        ("sorted(name for name in names)", False),
    ],
)
def test_what_depends_on_the_order_of_a_set(text: str, found: bool) -> None:
    read = readings(f"names = {{'a', 'b', 'c'}}\nvalue = {text}\n", "train.py")
    assert [reading.kind for reading in read] == ["hash"] * found
