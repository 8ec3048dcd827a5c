"""Bad programs on this machine: one clear sentence each, nothing lost, no process left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from messages import mentions
from program_runs import Programs
from waits import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups and adoption of orphans are Linux's")


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def test_a_script_that_is_not_there(programs: Programs) -> None:
    code, output = programs.run("train.py")
    assert code == 2
    assert mentions(output, "there is no file train.py")
    (programs.folder / "run.yaml").write_text("name: train\nprogram: train.py\n")
    code, output = programs.run("run.yaml")
    assert code == 2
    assert mentions(output, "run.yaml:2 program.script", f"there is no file {programs.folder / 'train.py'}")
    assert not (programs.folder / "runs").exists()


def test_a_syntax_error(programs: Programs) -> None:
    path = programs.write("x = 1\nif x\n    pass\n")
    code, output = programs.run("train.py", "--ranks", "2")
    assert code == 2
    assert mentions(output, f"{path}:2", "syntax error")
    assert not (programs.folder / "runs").exists()
    (programs.folder / "run.yaml").write_text("name: train\nprogram: train.py\n")
    validated = programs.start("validate", "run.yaml")
    output, _ = validated.communicate(timeout=PATIENCE)
    assert validated.returncode == 2
    assert mentions(output, "program.script", f"{path}:2", "syntax error")


@pytest.mark.parametrize(
    ("text", "code", "reported"),
    [
        ("import no_such_module\n", 2, ["ModuleNotFoundError: No module named 'no_such_module'", "train.py:1"]),
        ("import sys\nsys.exit(3)\n", 1, ["the program of rank 0 ended with exit code 3"]),
        ("raise ValueError('too hot')\n", 1, ["exit code 1: ValueError: too hot", "train.py:1"]),
        (
            "import argparse\nargparse.ArgumentParser().parse_args()\n",
            2,
            ["exit code 2", "unrecognized arguments"],
        ),
        ("import os\nos._exit(7)\n", 1, ["the program of rank 0 ended with exit code 7"]),
        ("import os\nos.abort()\n", 1, ["the program of rank 0 was killed by SIGABRT"]),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", 1, ["of rank 0 was killed by SIGKILL"]),
        ("import ctypes\nctypes.string_at(0)\n", 1, ["the program of rank 0 was killed by SIGSEGV"]),
    ],
)
def test_it_ends_with_an_error(programs: Programs, text: str, code: int, reported: list[str]) -> None:
    programs.write(text)
    found, output = programs.run("train.py", "restart.failures=0", "--", "--x")
    assert (found, mentions(output.splitlines()[-1], *reported)) == (code, True), output
    assert programs.left() == []


def test_the_rank_that_failed_is_named(programs: Programs) -> None:
    """The other rank loses its connection to it, and fails a moment before."""
    programs.write(
        """
        import os, time
        here = os.environ["ORTFLOW_RUN_DIR"] + "/rank-1-is-there"
        if os.environ["RANK"] == "0":
            while not os.path.exists(here):
                time.sleep(0.01)
            raise RuntimeError("Connection closed by peer")
        open(here, "w").close()
        time.sleep(0.2)
        raise ValueError("the cause")
        """
    )
    code, output = programs.run("train.py", "--ranks", "2", "restart.failures=0")
    assert code == 1
    assert mentions(output.splitlines()[-1], "the program of rank 1", "ValueError: the cause"), output
    assert programs.left() == []


def test_exit_code_0_before_its_declared_end(programs: Programs) -> None:
    programs.write(
        """
        import ortflow.program
        run = ortflow.program.context()
        run.total = 10
        for step in range(1, 4):
            run.log(step=step, loss=1.0)
            run.step(step)
        """
    )
    code, output = programs.run("train.py", "restart.failures=0")
    assert code == 1
    assert mentions(output.splitlines()[-1], "exit code 0 at step 3 of 10", "nothing asked it to stop"), output


def test_children_that_it_leaves_behind(programs: Programs) -> None:
    """In its process group, and in a session of their own, started by an intermediate process."""
    programs.write(
        """
        import os, subprocess, sys
        subprocess.Popen(["sleep", "300"])
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "300"])
            os._exit(0)
        os.wait()
        """
    )
    code, output = programs.run("train.py")
    assert code == 0, output
    assert mentions(output, "the program of rank 0 left 2 processes behind: killed")
    assert programs.left() == []


def test_100_mb_of_output(programs: Programs) -> None:
    programs.write("import sys\nfor _ in range(1000): sys.stdout.write('x' * 99_999 + chr(10))\nprint('the end')\n")
    code, output = programs.run("train.py")
    assert code == 0
    assert "the end" in output
    log = programs.folder / "runs/train/logs/attempt-00/rank-0000.log"
    assert log.stat().st_size > 100_000_000


def test_it_closes_its_output(programs: Programs) -> None:
    programs.write(
        """
        import os
        os.close(1)
        os.close(2)
        open("done", "w").close()
        """
    )
    code, output = programs.run("train.py")
    assert code == 0, output
    assert (programs.folder / "done").exists()


def test_it_ignores_the_request_to_stop(programs: Programs) -> None:
    programs.write(
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        while True:
            time.sleep(1)
        """
    )
    process = programs.start("run", "train.py", "program.stop_seconds=1.0")
    assert process.stdout is not None
    assert any(line.startswith("deaf") for line in process.stdout)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    assert mentions(output, "was killed: it did not stop within 1 s", "program.stop_seconds")
    assert time.monotonic() - begun < 60, "by itself, the limit is two minutes"
    assert programs.left() == []


def test_sigterm_ends_a_program_that_does_nothing_about_it(programs: Programs) -> None:
    programs.write("import time\nprint('sleeps', flush=True)\ntime.sleep(300)\n")
    process = programs.start("run", "train.py", "--ranks", "2", "program.stop_seconds=600.0")
    assert process.stdout is not None
    assert any(line.startswith("sleeps") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    assert programs.left() == []


def test_it_changes_its_folder_and_writes_into_the_run_directory(programs: Programs) -> None:
    programs.write(
        """
        import os
        root = os.environ["ORTFLOW_RUN_DIR"]
        os.chdir(root)
        open("mine.txt", "w").write("mine")
        open("checkpoints.txt", "w").write("mine")
        """
    )
    code, output = programs.run("train.py")
    assert code == 0, output
    root = programs.folder / "runs/train"
    assert (root / "mine.txt").read_text() == "mine"
    shown = programs.start("status", "train")
    output, _ = shown.communicate(timeout=PATIENCE)
    assert shown.returncode == 0
    assert "finished" in output


def test_files_of_its_own_among_those_of_the_run(programs: Programs) -> None:
    """Its folders beside checkpoints, and damage to what ortflow records: nothing of either is lost."""
    programs.write(
        """
        import os, pathlib
        import ortflow.program

        run = ortflow.program.context()
        root = pathlib.Path(os.environ["ORTFLOW_RUN_DIR"])
        run.total = 2
        first = 0 if run.latest() is None else int((run.latest() / "state").read_text())
        print("begins after", first, flush=True)
        for step in range(first + 1, 3):
            run.step(step)
            with run.commit(step) as folder:
                (folder / "state").write_text(str(step))
            if step == 1:
                (root / "checkpoints/step-00000099").mkdir()
                (root / "checkpoints/step-00000099/own.pt").write_text("own")
                (root / "checkpoints/best.pt").write_text("own")
                (root / "plan.json").write_text("{")
                with open(root / "events/rank-0000.jsonl", "a") as file:
                    file.write("not an event\\n")
                os._exit(3)
        """
    )
    code, output = programs.run("train.py", "restart.failures=1", "restart.backoff.first=0.0")
    assert code == 0, output
    assert "begins after 1" in programs.log(attempt=1)
    checkpoints = programs.folder / "runs/train/checkpoints"
    assert (checkpoints / "best.pt").read_text() == "own"
    assert [path.read_text() for path in checkpoints.glob("*/own.pt")] == ["own"]
    shown = programs.start("status", "train")
    output, _ = shown.communicate(timeout=PATIENCE)
    assert (shown.returncode, "finished" in output, "Traceback" in output) == (0, True, False), output


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.mark.parametrize("victim", ["rank", "program", "worker"])
def test_kill_9_of_a_process_leaves_none(programs: Programs, victim: str) -> None:
    programs.write(
        """
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "301"])
        print("pids", os.getppid(), os.getpid(), child.pid, flush=True)
        if child.wait() != 0:
            sys.exit(4)
        """
    )
    process = programs.start("run", "train.py", "--ranks", "2", "restart.failures=0")
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("pids"))
    pids = dict(zip(("rank", "program", "worker"), map(int, line.split()[1:]), strict=True))
    time.sleep(0.5)
    os.kill(pids[victim], signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, output
    assert programs.left() == []
    assert not any(lives(pid) for pid in pids.values())
    said = {"rank": "rank 0", "program": "the program of rank 0 was killed by SIGKILL", "worker": "exit code 4"}
    assert mentions(output.splitlines()[-1], said[victim]), output


def test_a_second_process_of_a_rank_is_refused(programs: Programs) -> None:
    """A process that the program starts afresh runs the same code; the rank's own connection stays."""
    programs.write(
        """
        import os, subprocess, sys
        import ortflow.program
        if len(sys.argv) > 1:
            try:
                ortflow.program.context()
            except Exception as error:
                print("second:", error, flush=True)
            sys.exit()
        same = dict(os.environ)
        run = ortflow.program.context()
        subprocess.run([sys.executable, __file__, "again"], env=same)
        with run.commit(1) as folder:
            (folder / "x").write_text("x")
        """
    )
    code, output = programs.run("train.py")
    assert code == 0, output
    assert mentions(output, "second:", "another process of rank 0 has called ortflow.program")
    assert (programs.folder / "runs/train/checkpoints/step-00000001/COMMITTED").exists()


def test_wrong_arguments_leave_no_run_directory(programs: Programs) -> None:
    programs.write("import argparse\nargparse.ArgumentParser().parse_args()\n")
    code, output = programs.run("train.py", "--", "--x")
    assert code == 2, output
    assert not (programs.folder / "runs").exists()


def test_a_program_that_prints_nothing_more_hangs(programs: Programs) -> None:
    programs.write("import time\nprint('one', flush=True)\ntime.sleep(1)\nprint('two', flush=True)\ntime.sleep(300)\n")
    code, output = programs.run("train.py", "restart.hung_seconds=4.0", "restart.failures=0")
    assert code == 1
    assert mentions(output, "two", "the ranks hung: no heartbeat for 4 s"), output
    assert programs.left() == []
