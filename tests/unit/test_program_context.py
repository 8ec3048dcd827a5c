"""Level 1 of `ortflow.program`: programs that stop, commit and log, in their own processes, against a small server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program_server import ProgramServer

LOOP = """
import sys, time
import ortflow.program
run = ortflow.program.context()
run.total = 10_000
for step in range(10_000):
    if run.should_stop:
        print("stopped at", step, run.stop_reason, run.seconds_left is not None, flush=True)
        break
    {body}
    run.log(step=step, loss=0.5)
    run.step(step + 1)
"""


def program(folder: Path, text: str) -> Path:
    script = folder / "program.py"
    script.write_text(text)
    return script


def outputs(processes: list[subprocess.Popen[str]], seconds: float = 60) -> list[str]:
    return [process.communicate(timeout=seconds)[0] for process in processes]


def test_every_rank_stops_at_the_same_check_while_one_sleeps(tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    body = f"""
    time.sleep(0.03)
    while run.rank == 1 and step == 2 and os.path.exists({str(tmp_path / "gate")!r}): time.sleep(0.01)
    """
    script = program(tmp_path, "import os" + LOOP.format(body=body))
    with ProgramServer(tmp_path / "checkpoints", world_size=2) as server:
        processes = server.start(script)
        server.wait(lambda s: s.steps(0) and s.steps(1) and s.steps(0)[-1] >= 3 and s.steps(1)[-1] == 2)
        check = server.ask("preemption")  # the thread answers while the loop sleeps
        (tmp_path / "gate").unlink()
        fast, slow = outputs(processes)
    assert fast == slow == f"stopped at {check} preemption True\n"


def test_a_signal_to_the_program_stops_all_ranks(tmp_path: Path) -> None:
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
        script = program(tmp_path, LOOP.format(body="time.sleep(0.01)"))
        with ProgramServer(tmp_path / "checkpoints", world_size=2) as server:
            processes = server.start(script)
            server.wait(lambda s: s.steps(0) and s.steps(1))
            processes[1].send_signal(getattr(signal, name))
            first, second = outputs(processes)
            assert first == second
            assert name in first


def test_a_signal_is_passed_on_while_the_main_thread_is_in_c_code(tmp_path: Path) -> None:
    # A mutex that is locked twice: unlike a sleep, this wait does not end with a signal.
    body = "run.step(1); import ctypes; c = ctypes.CDLL(None); m = ctypes.create_string_buffer(64); "
    script = program(tmp_path, LOOP.format(body=body + "c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"))
    with ProgramServer(tmp_path / "checkpoints") as server:
        (process,) = server.start(script)
        server.wait(lambda s: s.steps())
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        server.wait(lambda s: s.of_kind("stop_requested"))
        process.kill()
        process.communicate()


def test_handlers_of_the_program_still_run(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        "import signal\nsignal.signal(signal.SIGTERM, lambda *a: print('mine', flush=True))"
        + LOOP.format(body="time.sleep(0.01)"),
    )
    with ProgramServer(tmp_path / "checkpoints") as server:
        (process,) = server.start(script)
        server.wait(lambda s: s.steps())
        process.send_signal(signal.SIGTERM)
        (output,) = outputs([process])
    assert output.startswith("mine\nstopped at")


def test_a_lost_rank_process_stops_the_program(tmp_path: Path) -> None:
    script = program(tmp_path, LOOP.format(body="time.sleep(0.01)"))
    with ProgramServer(tmp_path / "checkpoints") as server:
        (process,) = server.start(script)
        server.wait(lambda s: s.steps())
    (output,) = outputs([process])
    assert "stopped at" in output
    assert "closed the connection" in output


def test_logs_steps_and_total_arrive_even_at_the_end(tmp_path: Path) -> None:
    script = program(tmp_path, """
import ortflow.program
run = ortflow.program.context()
run.total = 3
for step in range(3):
    assert not run.should_stop
    run.step()
    run.log(loss=1.5 * step, note="text")
run.finished()
""")  # fmt: skip
    with ProgramServer(tmp_path / "checkpoints") as server:
        assert outputs(server.start(script)) == [""]
        server.wait(lambda s: not s.ranks)
        assert [(m["step"], m["values"]) for m in server.of_kind("log")] == [
            (1, {"loss": 0.0, "note": "text"}), (2, {"loss": 1.5, "note": "text"}), (3, {"loss": 3.0, "note": "text"}),
        ]  # fmt: skip
        assert server.of_kind("total") == [{"kind": "total", "steps": 3}]
        assert server.of_kind("finished")
        assert server.steps()[-1] == 3
        assert server.of_kind("step")[-1]["checks"] == 3


COMMITS = """
import os, sys
import ortflow.program
run = ortflow.program.context()
print("found", run.latest() and run.latest().name, flush=True)
for step in (1, 2):
    with run.commit(step) as folder:
        (folder / f"rank-{run.rank}").write_text(str(step))
        if step == 2 and "fail" in sys.argv and run.rank == 1:
            raise OSError(28, "No space left on device")
    print("committed", run.latest().name, flush=True)
"""


def test_a_commit_is_complete_or_not_there(tmp_path: Path) -> None:
    script = program(tmp_path, COMMITS)
    with ProgramServer(tmp_path / "checkpoints", world_size=2) as server:
        first, second = outputs(server.start(script, "fail"))
        assert first.startswith("found None\ncommitted step-00000001\n")
        assert "CommitFailed: the checkpoint of step 2 was not made: rank 1: OSError" in first
        assert "No space left on device" in second.splitlines()[-1]
        assert server.newest() == tmp_path / "checkpoints" / "step-00000001"
        assert sorted(p.name for p in (tmp_path / "checkpoints" / "step-00000001").iterdir()) == [
            "COMMITTED", "rank-0", "rank-1",
        ]  # fmt: skip
        assert (
            outputs(server.start(script))
            == ["found step-00000001\ncommitted step-00000001\ncommitted step-00000002\n"] * 2
        )


def test_a_rank_that_ends_before_its_commit_fails_the_others(tmp_path: Path) -> None:
    script = program(tmp_path, COMMITS.replace("with run", "run.rank and os._exit(9)\n    with run"))
    with ProgramServer(tmp_path / "checkpoints", world_size=2) as server:
        first, _ = outputs(server.start(script))
        assert "CommitFailed: the checkpoint of step 1 was not made: rank 1 has ended" in first.splitlines()[-1]


def test_forked_children_are_not_ranks(tmp_path: Path) -> None:
    script = program(tmp_path, """
import multiprocessing, os, signal, time
import ortflow.program
run = ortflow.program.context()
def child():
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not run.should_stop
    run.log(loss=1.0)
    run.step(99)
    try:
        with run.commit(1): pass
    except ortflow.program.ProgramError as error:
        assert "forked" in str(error)
    else:
        raise AssertionError
    os.kill(os.getpid(), signal.SIGUSR1)
context = multiprocessing.get_context("fork")
process = context.Process(target=child)
process.start()
process.join()
print("child", process.exitcode, flush=True)
with context.Pool(2) as pool:  # its end terminates the children, which must not ignore it
    pool.map(abs, range(4))
with run.commit(1) as folder:
    (folder / "file").touch()
run.log(loss=2.0)
print(run.latest().name)
""")  # fmt: skip
    with ProgramServer(tmp_path / "checkpoints") as server:
        assert outputs(server.start(script)) == ["child 0\nstep-00000001\n"]
        server.wait(lambda s: not s.ranks)
        assert [m["values"]["loss"] for m in server.of_kind("log")] == [2.0]
        assert len(server.of_kind("hello")) == 1


def test_programs_that_it_starts_are_not_ranks(tmp_path: Path) -> None:
    script = program(tmp_path, """
import subprocess, sys
import ortflow.program
run = ortflow.program.context()
code = "import ortflow.program; run = ortflow.program.context(); print(run.attempt, run.should_stop)"
subprocess.run([sys.executable, "-c", code], check=True)
""")  # fmt: skip
    with ProgramServer(tmp_path / "checkpoints", attempt=3) as server:
        assert outputs(server.start(script)) == ["0 False\n"]
        assert len(server.of_kind("hello")) == 1


def test_a_wrong_token_or_nobody_there_is_said(tmp_path: Path) -> None:
    script = program(tmp_path, "import ortflow.program; ortflow.program.context()")
    with ProgramServer(tmp_path / "checkpoints") as server:
        (output,) = outputs(server.start(script, ORTFLOW_PROGRAM_TOKEN="other"))
        assert output.splitlines()[-1] == "ortflow.program.errors.ProgramError: the token is not this run's"
    (output,) = outputs(server.start(script))
    assert "no rank process of ortflow answers at 127.0.0.1:" in output


@pytest.mark.parametrize("stopped", [False, True])
def test_without_ortflow_the_same_program_runs(tmp_path: Path, stopped: bool) -> None:
    script = program(tmp_path, """
import os, signal, sys
import ortflow.program
run = ortflow.program.context()
print(run.rank, run.world_size, run.attempt, run.seconds_left, run.latest() and run.latest().name)
first = int((run.latest() / "state").read_text()) if run.latest() else 0
for step in range(first, 5):
    if run.should_stop:
        print("stop", step, run.stop_reason)
        break
    with run.commit(step + 1) as folder:
        (folder / "state").write_text(str(step + 1))
    run.log(step=step, loss=1)
    if step == 2 and "stop" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
run.finished()
try:
    with run.commit(9) as folder:
        raise ValueError("mine")
except ValueError:
    print(sorted(path.name for path in run.checkpoint_dir.iterdir()))
""")  # fmt: skip

    def run(*arguments: str) -> list[str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(
            [sys.executable, str(script), *arguments], cwd=tmp_path, env=environment, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    five = str([f"step-{step:08d}" for step in range(1, 6)])
    if stopped:
        three = str([f"step-{step:08d}" for step in range(1, 4)])
        assert run("stop") == ["0 1 0 None None", "stop 3 SIGTERM", three]
        assert run() == ["0 1 0 None step-00000003", five]
    else:
        assert run() == ["0 1 0 None None", five]


def test_ranks_of_torchrun_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortflow.program import ProgramError
    from ortflow.program.world import world

    assert world({}) == (0, 1, 0)
    assert world({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == (3, 4, 1)
    horovod = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}
    assert world(horovod) == (1, 2, 1)
    assert world({**horovod, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == (0, 1, 0)
    for wrong in ({"RANK": "3"}, {"RANK": "x", "WORLD_SIZE": "4"}, {"RANK": "-1", "WORLD_SIZE": "2"}):
        with pytest.raises(ProgramError, match="RANK="):
            world(wrong)


def test_values_are_numbers_and_text() -> None:
    import numpy as np

    from ortflow.program import ProgramError
    from ortflow.program.values import plain

    assert plain("loss", np.float32(0.5)) == 0.5
    assert plain("loss", np.array([2])) == 2
    assert len(str(plain("text", "x" * 10**7))) < 10**4
    for wrong in (np.zeros(2), [1.0], None, {}):
        with pytest.raises(ProgramError, match="loss"):
            plain("loss", wrong)


def test_without_ortflow_a_strangers_folder_stays(tmp_path: Path) -> None:
    from ortflow.program.alone import commit, newest
    from ortflow.program.errors import CommitFailed
    from ortflow.program.world import world

    mine = tmp_path / "step-00000004"
    mine.mkdir()
    (mine / "results.csv").write_text("1")
    (tmp_path / "step-last").mkdir()
    (tmp_path / "step-last" / "COMMITTED").touch()
    with pytest.raises(CommitFailed, match="is not a checkpoint"), commit(tmp_path, 4, world({})):
        raise AssertionError("the block of a commit that cannot be")
    assert (mine / "results.csv").read_text() == "1"
    for text in ("first", "second"):
        with commit(tmp_path, 5, world({})) as folder:
            (folder / "state").write_text(text)
    assert newest(tmp_path) == tmp_path / "step-00000005"
    assert (tmp_path / "step-00000005" / "state").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005", "step-last"]


def test_without_ortflow_a_commit_that_cannot_be_written_fails(tmp_path: Path) -> None:
    """Rank 0 reports it to the others, which wait for it."""
    from ortflow.program.alone import commit, newest
    from ortflow.program.errors import CommitFailed
    from ortflow.program.world import world

    with commit(tmp_path, 5, world({})) as folder:
        (folder / "state").write_text("first")
    with pytest.raises(CommitFailed, match=r"step 5 was not made: .*link: No such file"):  # noqa: SIM117
        with commit(tmp_path, 5, world({})) as folder:
            (folder / "link").symlink_to("nothing")
    assert newest(tmp_path) == tmp_path / "step-00000005"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


KILLED_COMMITS = """
import os, pathlib, signal, sys
from ortflow.program.alone import commit, newest
from ortflow.program.world import world

def save(folder, text):
    with commit(folder, 5, world({})) as made:
        (made / "state").write_text(text)

survived = False
for moment in range(100):
    folder = pathlib.Path(f"kill-{moment}")
    save(folder, "first")
    if (child := os.fork()) == 0:
        left = moment
        def hook(event, _):
            global left
            if event.startswith(("os.", "shutil.")) or event == "open":
                left -= 1
                if left == -1:  # os.kill is heard, too
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        save(folder, "second")
        left = -1
        os._exit(0)
    survived = os.waitpid(child, 0)[1] == 0
    found = newest(folder)
    print(moment, found and found.name, found and (found / "state").read_text())
    save(folder, "third")
    print(moment, newest(folder).name, (newest(folder) / "state").read_text(), sorted(os.listdir(folder)))
    if survived:
        break
"""


def test_without_ortflow_a_kill_loses_no_checkpoint_of_a_replaced_step(tmp_path: Path) -> None:
    """At each moment at which the second commit of a step changes the file system."""
    script = program(tmp_path, KILLED_COMMITS)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()]
    first, second = "step-00000005 first", "step-00000005 second"
    count = lines[::2].count(first)
    assert lines[::2] == [first] * count + [second] * (len(lines[::2]) - count)
    assert count > 5
    assert lines[-2] == second
    assert set(lines[1::2]) == {"step-00000005 third ['step-00000005']"}


def test_the_import_brings_no_other_package() -> None:
    """benchmarks/program_step.py measures its time."""
    code = (
        "import sys; before = set(sys.modules); import ortflow.program; new = set(sys.modules) - before\n"
        "print(*sorted({name.partition('.')[0] for name in new}))"
    )
    text = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout
    assert set(text.split()) <= set(sys.stdlib_module_names) | {"ortflow"}
    assert "ortflow" in text
