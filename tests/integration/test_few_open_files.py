"""Limits of open files that are too low for anything: one sentence, whatever the verb."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from messages import mentions
from project import ORTFLOW, environment
from tiny_runs import Done, Tiny, has_traceback

from ortflow.launchers.open_files import OF_ANY_COMMAND

pytestmark = pytest.mark.rotates

LIMITS = [3, 4, 5, 6, 8, 10, 12, 16, 24, 31, 32, 40, 64]
OF_PYTHON = 4
"""Up to here the interpreter itself has no file left to read a module from: the words are its own."""
PAIR = {"resources": {"ranks_per_node": 2, "cpus_per_rank": 1}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    tiny = Tiny.make(tmp_path_factory.mktemp("finished"))
    assert tiny.command("run", "run.yaml", timeout=120).code == 0
    return tiny


def limited(tiny: Tiny, limit: int, *words: str) -> Done:
    """A command that hangs is what the limit of time is for."""
    shell = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh", *ORTFLOW, *words]
    done = subprocess.run(
        shell, cwd=tiny.folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    return Done(done.returncode, done.stdout, done.stderr, 0.0, 0)


def is_refused(done: Done, limit: int) -> None:
    assert not has_traceback(done.said) or limit <= OF_PYTHON, done.said
    assert done.code != 0
    if limit > OF_PYTHON:
        assert done.code == 2, done.said
        (line,) = done.err.splitlines()
        assert mentions(line, "error: ", "open files", str(limit)), line
        assert "ulimit -n" in line


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_refused_in_a_sentence(tmp_path: Path, ranks: int, limit: int) -> None:
    tiny = Tiny.make(tmp_path, **(PAIR if ranks == 2 else {}))
    is_refused(limited(tiny, limit, "run", "run.yaml"), limit)
    assert not tiny.run_dir.exists()


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("words", [("validate", "run.yaml"), ("status", "tiny"), ("list",), ("inspect", "model.onnx")])
def test_other_verbs_work_or_are_refused_in_a_sentence(finished: Tiny, words: tuple[str, ...], limit: int) -> None:
    done = limited(finished, limit, *words)
    if limit < OF_ANY_COMMAND:
        is_refused(done, limit)
    else:
        assert done.code == 0, done.said
        assert not has_traceback(done.said)
