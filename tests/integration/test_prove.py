"""`ortflow prove` on small programs that each forget one piece of state, named in their first line, and on an ONNX run.

A few run each time. pytest -m "chaos or not chaos" tests/integration/test_prove.py runs all, ORTFLOW_PART=K/N a part.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from messages import mentions
from project import command
from rotation import rotating
from tiny_runs import Tiny

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))
ALWAYS = ("correct_plain", "random_python", "generator_python")
OF_TORCH = {name for name in NAMES if "import torch" in (PROGRAMS / f"{name}.py").read_text()}
FORGETS = re.compile(r'"""Forgets: (.+?)\.[ "]')

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")


def forgotten(name: str) -> str:
    """The cause that a program's first line names."""
    match = FORGETS.match((PROGRAMS / f"{name}.py").read_text())
    assert match is not None
    return match[1]


def programs() -> Iterator[Any]:
    """The names of the programs, rotating; those that import PyTorch have its mark."""
    for param in rotating(NAMES, ALWAYS):
        (name,) = param.values
        marks = (*param.marks, pytest.mark.torch) if name in OF_TORCH else param.marks
        yield pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", list(programs()))
def test_the_forgotten_state_of_a_program_is_named(name: str, tmp_path: Path) -> None:
    if name in OF_TORCH and find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    shutil.copy(PROGRAMS / f"{name}.py", tmp_path / "train.py")
    done = command("prove", "train.py", folder=tmp_path)
    cause = forgotten(name)
    if cause == "nothing":
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(": equal") == 3
        assert not (tmp_path / "runs" / "train.prove").exists()
    else:
        assert done.returncode == 1, done.stdout + done.stderr
        named = re.findall(r"^  cause: (.+)$", done.stdout, re.MULTILINE)
        assert named, done.stdout
        assert all(line.startswith(cause) for line in named), done.stdout
        trace = tmp_path / "runs" / "train.prove" / "calm" / "trace" / "rank-0000-attempt-00.jsonl"
        assert json.loads(trace.read_text().splitlines()[-1])["step"] == 12, "the traces are kept"
    assert not (tmp_path / "runs" / "train").exists(), "the run itself is not touched"


def test_there_are_twenty_programs_with_one_omission_each() -> None:
    assert len([name for name in NAMES if forgotten(name) != "nothing"]) >= 20


@pytest.mark.rotates("prove")
def test_a_program_on_two_ranks(tmp_path: Path) -> None:
    """Each rank is compared with itself; both are killed when one is."""
    shutil.copy(PROGRAMS / "generator_python.py", tmp_path / "train.py")
    text = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(
        text.replace("start(model=model)", "start(model=model, noise=augmentation.random)")
    )
    done = command("prove", "train.py", "--ranks", "2", "--steps", "8", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_onnx_run_is_killed_and_stopped_and_equal(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path)
    done = command("prove", "run.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^SIGKILL after step \d+: equal$", done.stdout, re.MULTILINE)
    assert re.search(r"^SIGTERM after step \d+: equal$", done.stdout, re.MULTILINE)
    assert not tiny.run_dir.exists()


@pytest.mark.rotates("prove")
def test_a_program_without_the_library_has_nothing_to_compare(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = command("prove", "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert mentions(done.stderr, "no step", "ortflow.program.start")


@pytest.mark.rotates("prove")
def test_a_program_that_saves_nothing_is_refused(tmp_path: Path) -> None:
    text = "import ortflow.program\nrun = ortflow.program.context()\nfor step in range(1, 40): run.step(step)\n"
    (tmp_path / "train.py").write_text(text)
    done = command("prove", "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert mentions(done.stderr, "no checkpoint", "--steps")


@pytest.mark.rotates("prove")
def test_a_program_that_fails_is_told_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import ortflow.program\nraise ValueError('no such data')\n")
    done = command("prove", "train.py", folder=tmp_path)
    assert done.returncode == 1
    assert mentions(done.stderr, "calm", "ValueError: no such data")


@pytest.mark.rotates("prove")
def test_a_folder_of_the_users_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    folder = tmp_path / "runs" / "train.prove"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    done = command("prove", "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert mentions(done.stderr, str(folder))
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.rotates("prove")
def test_too_few_steps_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = command("prove", "train.py", "--steps", "3", folder=tmp_path)
    assert done.returncode == 2
    assert mentions(done.stderr, "3 steps are too few", "--steps")
    assert not (tmp_path / "runs").exists(), "nothing is left"


@pytest.mark.rotates("prove")
def test_a_program_that_is_complete_before_the_steps_is_struck_within_them(tmp_path: Path) -> None:
    text = (PROGRAMS / "correct_plain.py").read_text()
    (tmp_path / "train.py").write_text(text.replace("range(done + 1, 41)", "range(done + 1, 9)"))
    done = command("prove", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mentions(done.stdout, "two runs of 8 steps", "SIGKILL", "equal", "SIGTERM", "equal")


@pytest.mark.rotates("prove")
@pytest.mark.parametrize(
    ("text", "changed", "cause"),
    [
        ("range(done + 1, 41)", "range(done + 1, done + 9 if done == 0 else done + 3)", "steps that are missing"),
        ("run.should_stop", "False", "a request to stop that is not followed"),
    ],
    ids=["ends early", "does not stop"],
)
def test_an_attempt_that_does_not_do_what_it_must_is_a_difference(
    tmp_path: Path, text: str, changed: str, cause: str
) -> None:
    program = (PROGRAMS / "correct_plain.py").read_text()
    assert text in program
    (tmp_path / "train.py").write_text(program.replace(text, changed))
    done = command("prove", "train.py", "--steps", "8", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"cause: {cause}" in done.stdout
