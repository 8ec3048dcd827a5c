"""The local launcher with real processes under a real mpirun; the ranks are tests/support/fake_rank.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import Bench
from messages import alike, mentions, says
from terminal import Terminal
from waits import wait_until

KILL_RANK_1 = {"rank": 1, "step": 4, "do": f"signal {signal.SIGKILL.value}"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench.make(tmp_path)
    made.write()
    yield made
    made.close()


def nobody_left(bench: Bench) -> None:
    wait_until(lambda: not bench.processes())


@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_to_the_end_and_reports_it(bench: Bench, ranks: int) -> None:
    bench.write(ranks)
    done = bench.run("run", "run.yaml")
    assert done.code == 0, done.err
    assert "step 10" in done.out
    assert "finished at step 10" in done.out
    assert [record["outcome"] for record in bench.attempts("end")] == ["finished"]
    for rank in range(ranks):
        log = bench.run_dir / "logs" / "attempt-00" / f"rank-{rank:04d}.log"
        assert f"rank {rank} of {ranks} begins" in log.read_text()
    nobody_left(bench)


def test_the_opening_lines_give_the_period_of_checkpoints(bench: Bench) -> None:
    bench.write(1)
    done = bench.run("run", "run.yaml")
    opening = done.out[: done.out.index("step 1 ")] if "step 1 " in done.out else done.out
    assert "a checkpoint is saved every" in opening, done.out


def test_a_killed_rank_is_named_and_the_run_starts_again(bench: Bench) -> None:
    done = bench.run("run", "run.yaml", script={0: KILL_RANK_1})
    assert done.code == 0, done.err
    assert "rank 1 was killed by SIGKILL" in done.out
    assert "rank 1 now does signal 9" in done.out, "the last lines of its log are shown"
    first, second = bench.attempts("end")
    assert (first["outcome"], first["rank"], first["next"]) == ("failure", 1, "restart")
    assert second["outcome"] == "finished"


def test_a_rank_killed_after_every_rank_has_finished_is_not_a_failure(bench: Bench) -> None:
    done = bench.run("run", "run.yaml", script={0: {"rank": 1, "step": "done", "do": "signal 9"}})
    assert done.code == 0, done.err
    (end,) = bench.attempts("end")
    assert (end["outcome"], end["next"]) == ("finished", "stop")
    nobody_left(bench)


def test_a_rank_killed_while_others_have_not_finished_is_a_failure(bench: Bench) -> None:
    done = bench.run("run", "run.yaml", script={0: {"rank": 1, "step": 10, "do": "signal 9"}})
    assert done.code == 0, done.err
    assert [end["outcome"] for end in bench.attempts("end")] == ["failure", "finished"]


def test_killed_alone(bench: Bench) -> None:
    bench.write(1)
    done = bench.run("run", "run.yaml", script={0: {**KILL_RANK_1, "rank": 0}})
    assert done.code == 0, done.err
    assert "rank 0 was killed by SIGKILL" in done.out


@pytest.mark.parametrize("ranks", [1, 2])
def test_as_the_first_process_of_a_container(bench: Bench, ranks: int) -> None:
    unshare = "unshare --pid --fork --mount-proc "
    if subprocess.run(f"{unshare}true", shell=True, capture_output=True, check=False).returncode:
        pytest.skip("no process namespace can be made here")
    bench.write(ranks)
    done = bench.run("run", "run.yaml", shell=f"exec {unshare}")
    assert done.code == 0, done.err
    assert [record["outcome"] for record in bench.attempts("end")] == ["finished"]


def test_failure_budget_ends_the_run_and_survives_its_launcher(bench: Bench) -> None:
    always = dict.fromkeys(range(9), KILL_RANK_1)
    done = bench.run("run", "run.yaml", script=always)
    assert done.code == 1
    assert [record["next"] for record in bench.attempts("end")] == ["restart", "restart", "stop"]
    (line,) = done.err.splitlines()
    assert mentions(
        line, "error: rank 1", "SIGKILL", "budget of 2 failures", "`ortflow resume fake`", "`ortflow logs fake`"
    )
    again = bench.run("resume", "fake", script=always)
    assert again.code == 1
    assert "3 failures and 0 preemptions" in again.err
    assert len(bench.attempts("end")) == 6


def test_back_off_doubles(bench: Bench) -> None:
    bench.write(restart={"failures": 3, "backoff": {"first": 0.1, "limit": 0.3}})
    bench.run("run", "run.yaml", script=dict.fromkeys(range(9), KILL_RANK_1))
    assert [record["pause"] for record in bench.attempts("end")] == [0.1, 0.2, 0.3, 0.0]
    ends, starts = bench.attempts("end"), bench.attempts("start")
    waited = [start["time"] - end["time"] for end, start in zip(ends, starts[1:], strict=False)]
    assert all(took >= pause for took, pause in zip(waited, [0.1, 0.2, 0.3], strict=True))


def test_wrong_input_is_not_tried_again_and_leaves_nothing(bench: Bench) -> None:
    done = bench.run("run", "run.yaml", script={0: {"rank": 0, "step": 0, "do": "fail 2"}})
    assert done.code == 2
    assert done.err == "error: rank 0 is told to fail\n"
    assert not (bench.folder / "runs").exists()


def test_wrong_input_later_keeps_the_run(bench: Bench) -> None:
    done = bench.run("run", "run.yaml", script={0: {"rank": 0, "step": 4, "do": "fail 2"}})
    assert done.code == 2
    assert len(bench.events("step")) == 3
    assert bench.state() == "failed"
    (line,) = done.err.splitlines()
    assert mentions(line, "error: rank 0", "`ortflow resume fake KEY=VALUE`")


def test_a_failing_rank_reports_its_cause(bench: Bench) -> None:
    done = bench.run("run", "run.yaml", script={0: {"rank": 1, "step": 3, "do": "fail 1"}})
    assert done.code == 0
    assert mentions(done.out, "rank 1 is told to fail … the end of")


def test_sigterm_from_outside_is_a_preemption(bench: Bench) -> None:
    bench.write(restart={"failures": 0, "backoff": {"first": 0.05}})
    script = {0: {"rank": 1, "step": 3, "do": "signal 15"}, 1: {"rank": 0, "step": 6, "do": "sigterm-default"}}
    done = bench.run("run", "run.yaml", script=script)
    assert done.code == 0, done.err
    assert [record["outcome"] for record in bench.attempts("end")] == ["preempted", "preempted", "finished"]
    assert "resumed at step 3" in done.out


def test_preemption_budget(bench: Bench) -> None:
    bench.write(restart={"failures": 0, "preemptions": 1, "backoff": {"first": 0.05}})
    script = {attempt: {"rank": 0, "step": 2 + attempt, "do": "signal 15"} for attempt in range(5)}
    done = bench.run("run", "run.yaml", script=script)
    assert done.code == 75
    assert len(bench.attempts("end")) == 2
    assert mentions(done.err, "budget of 1 preemption")


def test_a_rank_that_dies_before_mpi_does_not_hang_the_run(bench: Bench) -> None:
    done = bench.run("run", "run.yaml", script={0: {"rank": 1, "step": 0, "do": "exit 3"}})
    assert done.code == 0, done.err
    end = bench.attempts("end")[0]
    assert (end["outcome"], end["rank"]) == ("failure", 1)


def test_out_of_memory_is_reported(bench: Bench) -> None:
    group = memory_cgroup(300 << 20)
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    try:
        enter = f"echo $$ > {group}/cgroup.procs && exec "
        hog = {0: {"rank": 1, "step": 3, "do": "hog"}}
        done = bench.run("run", "run.yaml", script=hog, shell=enter)
        assert done.code == 0, done.err
        assert mentions(done.out, "rank 1", "SIGKILL", "out of memory")
    finally:
        group.rmdir()


def memory_cgroup(limit: int) -> Path | None:
    """A new memory cgroup below this process's own, of version 1 or 2."""
    for row in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = row.split(":", 2)
        root = Path("/sys/fs/cgroup") / ("memory" if controllers else "") / path.lstrip("/")
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        if controllers in ("memory", ""):
            group = root / f"ortflow-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                (group / file).write_text(str(limit))
            except OSError:
                group.rmdir()
                continue
            return group
    return None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_once_saves_and_exits(bench: Bench, number: signal.Signals) -> None:
    running = bench.start("run", "run.yaml", steps=1000)
    running.until_step(3)
    running.send(number)
    done = running.wait()
    assert done.code == 75
    saved = int((bench.run_dir / "saved").read_text())
    assert f"saved at step {saved}" in done.out
    assert "`ortflow resume fake` continues" in done.err
    nobody_left(bench)


def test_ctrl_c_in_a_terminal_leaves_a_clean_screen(bench: Bench) -> None:
    bench.write(ranks=1)
    command = [sys.executable, "-m", "ortflow", "run", "run.yaml"]
    terminal = Terminal(command, bench.folder, bench.environment(None, steps=1000))
    terminal.until(lambda: "samples/s" in str(terminal.screen))
    opening, _, panel = str(terminal.screen).partition("╭─ fake ─")
    assert panel
    assert mentions(opening, "a checkpoint is saved", "at the end")
    terminal.press(b"\x03")
    assert terminal.wait() == 75
    lines = str(terminal.screen).splitlines()[len(opening.splitlines()) :]
    saved = int((bench.run_dir / "saved").read_text())
    assert alike(
        [line[10:] for line in lines[:-1]],
        [
            "Ctrl-C: saving and stopping …",
            f"checkpoint at step {saved}",
            f"saved at step {saved}",
        ],
    )
    assert says(lines[-1], "stopped: … Ctrl-C … `ortflow resume fake`")
    assert bench.state() == "stopped"
    nobody_left(bench)


def test_asked_before_ranks_handle_signals(bench: Bench) -> None:
    running = bench.start("run", "run.yaml", script={0: {"step": -1, "do": "born late"}})
    running.until(lambda: len(bench.processes()) >= 3)
    time.sleep(0.5)
    running.send(signal.SIGTERM)
    assert running.wait().code == 75
    (end,) = bench.attempts("end")
    assert end["outcome"] == "preempted"
    assert mentions(end["cause"], "before all ranks had started")
    nobody_left(bench)


def test_a_rank_that_dies_while_it_leaves_is_a_failure(bench: Bench) -> None:
    """Also when the record is so long that the start of the attempt is far from its end."""
    deaf = {0: {"step": -1, "do": "deaf"}}
    running = bench.start("run", "run.yaml", "restart.failures=0", steps=100_000, pause=0.0, script=deaf)
    record = bench.run_dir / "events/rank-0001.jsonl"
    running.until(lambda: record.exists() and record.stat().st_size > 1 << 17)
    running.send(signal.SIGTERM)
    running.until(lambda: (bench.run_dir / ".stop").exists())
    begun = json.loads(record.read_text().splitlines()[0])
    os.kill(begun["pid"], signal.SIGKILL)
    assert running.wait().code == 1
    (end,) = bench.attempts("end")
    assert (end["outcome"], end["rank"]) == ("failure", 1)
    nobody_left(bench)


def test_resume_continues(bench: Bench) -> None:
    running = bench.start("run", "run.yaml", steps=1000)
    running.until_step(3)
    running.send(signal.SIGINT)
    assert running.wait().code == 75
    saved = int((bench.run_dir / "saved").read_text())
    on = bench.run("resume", "fake", steps=saved + 2)
    assert on.code == 0, on.err
    assert f"resumed at step {saved}" in on.out


def test_ctrl_c_twice_leaves_now(bench: Bench) -> None:
    running = bench.start("run", "run.yaml", steps=1000, script={0: {"step": -1, "do": "deaf"}})
    running.until_step(3)
    running.send(signal.SIGINT)
    running.until(lambda: (bench.run_dir / ".stop").exists())
    assert running.process.poll() is None
    running.send(signal.SIGINT)
    done = running.wait()
    assert done.code == 75
    assert not (bench.run_dir / "saved").exists()
    cause = bench.attempts("end")[0]["cause"]
    assert "killed without saving" in cause
    assert "did not leave within" not in cause, "by the second Ctrl-C, not by the limit of the first"
    nobody_left(bench)


def test_asked_between_two_attempts(bench: Bench) -> None:
    bench.write(restart={"failures": 5, "backoff": {"first": 60.0, "limit": 60.0}})
    running = bench.start("run", "run.yaml", script={0: KILL_RANK_1})
    running.until(lambda: bench.attempts("end"))
    assert bench.state() == "restarting"
    running.send(signal.SIGINT)
    assert running.wait(50).code == 75, "within the minute before the next attempt"
    assert bench.state() == "stopped"


def test_time_limit(bench: Bench) -> None:
    bench.write(resources={"ranks_per_node": 2, "python": str(bench.folder / "python"), "time_limit": "0:00:02"})
    done = bench.run("run", "run.yaml", steps=1000)
    assert done.code == 75
    assert bench.attempts("end")[0]["asked"] == "time limit"


def test_killed_launcher_leaves_no_process(bench: Bench) -> None:
    running = bench.start("run", "run.yaml", steps=10000)
    running.until_step(2)
    running.send(signal.SIGKILL)
    running.wait()
    nobody_left(bench)
    assert bench.state() == "lost"
    done = bench.run("run", "run.yaml", steps=5)
    assert done.code == 0, done.err
    assert [record["outcome"] for record in bench.attempts("end")] == ["lost", "finished"]


def test_killed_mpirun_is_a_failure(bench: Bench) -> None:
    running = bench.start("run", "run.yaml", script={0: {"step": 5, "do": "wait"}})
    running.until_step(2)
    os.kill(bench.attempts("start")[0]["pid"], signal.SIGKILL)
    done = running.wait()
    assert done.code == 0, done.err
    assert bench.attempts("end")[0]["cause"] == "mpirun was killed by SIGKILL"


def test_a_directory_in_use_is_refused(bench: Bench) -> None:
    running = bench.start("run", "run.yaml", steps=10_000)
    running.until_step(1)
    second = bench.run("run", "run.yaml")
    assert second.code == 2
    assert f"is in use by process {running.process.pid} on" in second.err
    assert second.err.count("\n") == 1
    running.send(signal.SIGINT)
    assert running.wait().code == 75


def test_detached_and_its_verbs(bench: Bench) -> None:
    done = bench.run("run", "run.yaml", "--detach", steps=10_000)
    assert done.code == 0, done.err
    assert "ortflow logs -f fake" in done.out
    wait_until(lambda: bench.events("step"))
    how = json.loads(bench.run("status", "--json").out)
    assert (how["state"], how["name"], how["launcher"]) == ("running", "fake", "local")
    assert psutil.pid_exists(how["pid"])
    assert how["step"] >= 1
    assert [one["name"] for one in json.loads(bench.run("list", "--json").out)] == ["fake"]
    following = bench.start("logs", "-f", "fake", "--rank", "1")
    cancelled = bench.run("cancel", "fake")
    assert cancelled.code == 0, cancelled.err
    assert cancelled.out.startswith("fake: cancelled at step")
    assert "rank 1 of 2 begins" in following.wait().out
    nobody_left(bench)
    assert "not running" in bench.run("cancel", "fake").out
    assert bench.run("resume", "fake", "--detach", steps=5).code == 0
    wait_until(lambda: bench.state() == "finished")
    assert "finished at step" in (bench.run_dir / "logs" / "supervisor.log").read_text()


def test_cancel_now_does_not_wait_for_a_save(bench: Bench) -> None:
    deaf = {0: {"step": -1, "do": "deaf"}}
    assert bench.run("run", "run.yaml", "--detach", steps=10000, script=deaf).code == 0
    wait_until(lambda: bench.events("step"))
    assert bench.run("cancel", "fake", "--now").code == 0
    nobody_left(bench)


def test_killed_supervisor_leaves_no_process(bench: Bench) -> None:
    assert bench.run("run", "run.yaml", "--detach", steps=10000).code == 0
    wait_until(lambda: bench.events("step"))
    os.kill(bench.supervisor(), signal.SIGKILL)
    nobody_left(bench)
    assert bench.state() == "lost"
