"""A signal to a child process of configure is not a fault of the model: the run stops, or starts again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from messages import mentions, says
from project import of_kind
from struck_child import Struck
from tiny_runs import Tiny, has_traceback, result
from waits import PATIENCE

from ortflow.workflow.assembly.child import RuntimeFault
from ortflow.workflow.errors import EndedBySignal, check_signal
from ortflow.workflow.run.rundir import RunDir

CHILD = "ortflow.workflow.assembly.child"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny.make(tmp_path_factory.mktemp("whole"))
    assert tiny.command("run", "run.yaml").code == 0
    return tiny.run_dir


def child_of(launcher: subprocess.Popen[str]) -> psutil.Process:
    """The process in which ONNX Runtime loads the graphs."""
    while launcher.poll() is None:
        for process in psutil.Process(launcher.pid).children(recursive=True):
            try:
                if CHILD in process.cmdline():
                    return process
            except psutil.Error:
                continue
        time.sleep(0.005)
    raise AssertionError(launcher.communicate())


def test_sigterm_to_every_process_is_a_preemption(tmp_path: Path, whole: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    launcher = tiny.start("run", "run.yaml")
    child = child_of(launcher)
    for process in (child, *psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)):
        with suppress(psutil.NoSuchProcess):  # the child is among the launcher's, and may be gone by then
            process.send_signal(signal.SIGTERM)
    out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 75, out + err
    assert not has_traceback(out + err)
    assert "model" not in err
    again = tiny.command("resume", "tiny")
    assert again.code == 0, again.said
    assert result(tiny.run_dir) == result(whole)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_is_killed_alone_is_a_failure_that_is_tried_again(
    tmp_path: Path, whole: Path, number: signal.Signals
) -> None:
    tiny = Tiny.make(tmp_path / "p")
    launcher = tiny.start("run", "run.yaml")
    child_of(launcher).send_signal(number)
    out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, out + err
    (failure,) = of_kind(tiny.run_dir, "failure")
    assert says(failure["reason"], f"… process in which … loads the graphs … {number.name}")
    assert failure["exit_code"] == 1
    assert result(tiny.run_dir) == result(whole)
    assert [r.get("outcome") for r in RunDir(tiny.run_dir).read_attempts() if r["event"] == "end"] == [
        "failure", "finished",
    ]  # fmt: skip


def test_a_repeated_crash_is_a_fault_of_the_graph() -> None:
    with Struck(signal.SIGSEGV, signal.SIGSEGV) as child, pytest.raises(RuntimeFault, match="signal 11") as fault:
        child.load(b"no graph")
    assert fault.value.crashed
    with Struck(signal.SIGTERM) as child, pytest.raises(EndedBySignal):
        child.load(b"no graph")


def test_a_crash_that_is_not_repeated_was_a_signal(tmp_path: Path) -> None:
    model = Tiny.make(tmp_path / "p").folder / "model.onnx"
    with Struck(signal.SIGSEGV) as child:
        child.load(model.read_bytes())
        child.load(model.read_bytes())


def test_an_interrupt_of_the_child_alone_changes_nothing(tmp_path: Path, whole: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    launcher = tiny.start("run", "run.yaml")
    child_of(launcher).send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, out + err
    assert result(tiny.run_dir) == result(whole)


def test_a_killed_prepare_command_is_not_wrong_input(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p", prepare=["sh", "-c", "kill -KILL $$"])
    (tiny.folder / "set.arrow").unlink()
    done = tiny.command("run", "run.yaml")
    assert done.code == 1, done.said
    assert mentions(done.err, "SIGKILL", "out of memory")
    assert not tiny.run_dir.exists()
    for code in (0, 1, 2, 127, 139, -11, -6):
        check_signal(code, "x")
    for code in (-15, -9, 137, 143):
        with pytest.raises(EndedBySignal):
            check_signal(code, sys.executable)
