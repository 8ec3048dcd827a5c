"""Training programs on a cluster: each rank knows its place, a stop is agreed on all nodes, sweeps, lost nodes."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from cluster import ENDS, Cluster, Run
from project import Project
from testbed import Testbed, wait_until

WORLD = """
    import json, os
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
             "TORCHELASTIC_RUN_ID", "JAX_COORDINATOR_ADDRESS", "SLURM_PROCID", "SLURM_NTASKS"]
    print(json.dumps({name: os.environ.get(name) for name in names}))
"""

COUNTING = """
    import json, time
    import ortflow.program

    run = ortflow.program.context()
    run.total = 400
    latest = run.latest()
    first = 0 if latest is None else json.loads((latest / f"rank-{run.rank}.json").read_text())["step"]
    print("begins after", first, flush=True)
    for step in range(first + 1, 401):
        time.sleep(0.05)
        run.log(step=step, loss=1 / step)
        run.step(step)
        stop = run.should_stop  # asked once a step: the ranks agree on one of its answers
        if stop or step % 100 == 0:
            with run.commit(step) as folder:
                (folder / f"rank-{run.rank}.json").write_text(json.dumps({"step": step}))
        if stop:
            break
"""


@pytest.fixture
def programs(testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A folder that all nodes see, with programs."""
    return Cluster(testbed, Project(tmp_path_factory.mktemp("programs")))


def write(programs: Cluster, name: str, text: str) -> Path:
    path = programs.project.folder / name
    path.write_text(textwrap.dedent(text))
    return path


def log(run: Run, rank: int, attempt: int = 0) -> str:
    return (run.run_dir / "logs" / f"attempt-{attempt:02d}" / f"rank-{rank:04d}.log").read_text()


def test_a_program_prints_its_world(programs: Cluster) -> None:
    write(programs, "world.py", WORLD)
    done = programs.ortflow("submit", "-b", "slurm", "world.py", "--nodes", "2", "--ranks", "4", "--", "--lr", "1")
    assert done.returncode == 0, done.stderr
    run = Run(programs, "world")
    run.finish()
    worlds = [json.loads(next(x for x in log(run, rank).splitlines() if x.startswith("{"))) for rank in range(4)]
    assert [world["RANK"] for world in worlds] == ["0", "1", "2", "3"]
    assert [world["SLURM_PROCID"] for world in worlds] == ["0", "1", "2", "3"]
    assert [world["NODE_RANK"] for world in worlds] == ["0", "0", "1", "1"]
    assert [world["LOCAL_RANK"] for world in worlds] == ["0", "1", "0", "1"]
    assert {(world["WORLD_SIZE"], world["LOCAL_WORLD_SIZE"], world["TORCHELASTIC_RUN_ID"]) for world in worlds} == {
        ("4", "2", "world")
    }
    assert len({(world["MASTER_ADDR"], world["MASTER_PORT"]) for world in worlds}) == 1
    assert worlds[0]["MASTER_ADDR"] != "127.0.0.1"


def test_a_program_stops_at_one_step_and_resumes(programs: Cluster) -> None:
    write(programs, "count.py", COUNTING)
    done = programs.ortflow("submit", "-b", "slurm", "count.py", "--nodes", "2", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    run = Run(programs, "count")
    run.until_step(5)
    assert programs.ortflow("cancel", "count").returncode == 0
    run.until_state("cancelled")
    # On a busy machine the program may have saved its hundredth step before it was asked.
    folder = max((run.run_dir / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    saved = {json.loads((folder / f"rank-{rank}.json").read_text())["step"] for rank in (0, 1)}
    assert saved == {int(folder.name.removeprefix("step-"))}
    assert programs.ortflow("resume", "count").returncode == 0
    run.finish()
    assert f"begins after {saved.pop()}" in log(run, 1, attempt=1)


DEADLINE = """
    import os, time
    import ortflow.program

    run = ortflow.program.context()
    print("job ends", os.environ["SLURM_JOB_END_TIME"], round(run.seconds_left or -1), flush=True)
    for step in range(10_000):
        time.sleep(0.05)
        run.step(step + 1)
        if run.should_stop:
            print("left", run.stop_reason, run.seconds_left, flush=True)
            break
"""


def test_a_program_knows_the_grace_of_a_preemption(programs: Cluster) -> None:
    write(programs, "deadline.py", DEADLINE)
    programs.testbed.grace(30)
    done = programs.ortflow("submit", "-b", "slurm", "deadline.py", "resources.time_limit=30")
    assert done.returncode == 0, done.stderr
    run = Run(programs, "deadline")
    wait_until(lambda: "job ends" in first_log(run), 120, run.transcript)
    ends, left = map(int, re.findall(r"job ends (\d+) (\d+)", first_log(run))[0])
    shown = programs.testbed.reported("env", "SLURM_TIME_FORMAT=%s", "squeue", "-h", "-o", "%e", "-j", run.job)
    assert abs(ends - int(shown)) <= 5
    assert 1700 < left < 1800
    programs.testbed.preempt(run.job, seconds=1)
    wait_until(lambda: "left SIG" in first_log(run), 120, run.transcript)
    seconds = float(re.findall(r"left SIG\w+ ([\d.]+)", first_log(run))[0])
    kill = int(re.findall(r"KillWait\s*=\s*(\d+)", programs.testbed.reported("scontrol", "show", "config"))[0])
    assert 30 + kill - 3 < seconds <= 31 + kill, f"grace 30 s and KillWait {kill} s"
    programs.testbed.grace(0)
    wait_until(lambda: "job ends" in first_log(run, 1), 120, run.transcript)
    programs.testbed.reported("scancel", run.job)
    wait_until(lambda: "left SIG" in first_log(run, 1), 120, run.transcript)
    seconds = float(re.findall(r"left SIG\w+ ([\d.]+)", first_log(run, 1))[0])
    assert kill - 3 < seconds <= kill, "no grace"


def first_log(run: Run, attempt: int = 0) -> str:
    try:
        return log(run, 0, attempt)
    except FileNotFoundError:
        return ""


@pytest.mark.rotates("Slurm restarts")
def test_a_preempted_run_that_is_not_back_is_reported_from_the_queue(programs: Cluster) -> None:
    """Nothing of the run is alive while its job waits: a small job that Slurm starts later sends the message."""
    write(programs, "count.py", COUNTING)
    told = programs.project.folder / "told"
    file = programs.project.folder / "waiting.yaml"
    file.write_text(
        "name: waiting\nprogram: {script: count.py, cwd: .}\nresources: {time_limit: 30, ranks_per_node: 1}\n"
        f"monitor: {{notify: [{{on: [not_back], not_back_seconds: 2, command: [sh, -c, 'cat >> {told}']}}]}}\n"
    )
    done = programs.ortflow("submit", "-b", "slurm", str(file))
    assert done.returncode == 0, done.stderr
    run = Run(programs, "waiting")
    run.until_step(5)
    programs.testbed.preempt(run.job, seconds=25)
    wait_until(told.exists, 120, run.transcript)
    assert '"event": "not_back"' in told.read_text()
    assert programs.testbed.state(run.job) != "RUNNING", "the job still waits"
    wait_until(lambda: '"event": "back"' in told.read_text(), 120, run.transcript)
    assert told.read_text().count("not_back") == 1
    assert programs.ortflow("cancel", "waiting").returncode == 0


PARAMETERS = """
    import json, os, sys, time
    import ortflow.program

    run = ortflow.program.context()
    run.total = 3
    print(json.dumps({"argv": sys.argv[1:], "job": os.environ["SLURM_JOB_ID"]}), flush=True)
    for step in range(1, 4):
        time.sleep(0.1)
        run.log(step=step, loss=float(sys.argv[2]) / step)
        run.step(step)
    run.finished()
"""


def test_a_sweep_reaches_the_arguments_and_another_run_waits_for_it(programs: Cluster) -> None:
    write(programs, "train.py", PARAMETERS)
    for name in ("swept", "after"):
        file = f'name: {name}\nprogram: {{script: train.py, args: "--lr {{lr}}", parameters: {{lr: 1}}}}\n'
        (programs.project.folder / f"{name}.yaml").write_text(file)
    sets = ("--set", "program.parameters.lr=0.5,0.25,2")
    done = programs.ortflow("submit", "-b", "slurm", "swept.yaml", *sets)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [Run(programs, f"swept-{number}") for number in range(3)]
    array = runs[0].job.partition("_")[0]
    assert [run.job for run in runs] == [f"{array}_{task}" for task in range(3)]
    done = programs.ortflow("submit", "-b", "slurm", "after.yaml", "--after", "swept-2")
    assert done.returncode == 0, done.stdout + done.stderr
    after = Run(programs, "after")
    after.finish()
    assert after.records("start")[0]["time"] >= runs[2].records("end")[-1]["time"]
    wait_until(lambda: all(row["state"] == "finished" for row in swept(programs)), ENDS, runs[0].transcript)
    arguments = [json.loads(next(x for x in log(run, 0).splitlines() if x.startswith("{")))["argv"] for run in runs]
    assert arguments == [["--lr", "0.5"], ["--lr", "0.25"], ["--lr", "2"]]
    assert [row["values"] for row in swept(programs)] == [
        {"program.parameters.lr": value} for value in ("0.5", "0.25", "2")
    ]


def swept(programs: Cluster) -> list[dict[str, Any]]:
    done = programs.ortflow("list", "--sweep", "swept", "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return rows


def test_status_logs_list_cancel_and_resume(programs: Cluster) -> None:
    # Long enough for all of it on a busy machine.
    write(programs, "verbs.py", COUNTING.replace("400", "2000").replace("401", "2001"))
    done = programs.ortflow("submit", "-b", "slurm", "verbs.py", "--ranks", "2", "checkpoint.keep.newest=2")
    assert done.returncode == 0, done.stderr
    run = Run(programs, "verbs")
    run.until_step(3)
    status = run.status()
    assert (status["state"], status["job"], status["total_steps"]) == ("running", run.job, 2000)
    assert "begins after 0" in programs.ortflow("logs", "verbs", "--rank", "1").stdout
    (row,) = [line for line in programs.ortflow("list").stdout.splitlines() if line.startswith("verbs ")]
    assert "running" in row
    assert programs.ortflow("cancel", "verbs").returncode == 0
    run.until_state("cancelled")
    saved = run.status()["checkpoint"]
    assert programs.ortflow("resume", "verbs").returncode == 0
    run.until_attempt(1, 1)
    assert f"begins after {saved}" in programs.ortflow("logs", "verbs").stdout
    assert programs.ortflow("cancel", "verbs").returncode == 0
    run.until_state("cancelled")


ELASTIC = """
restart: {failures: 0, preemptions: 0, grow_seconds: 2.0, backoff: {first: 0.0, limit: 0.0}}
resources: {nodes: 4, min_nodes: 3, ranks_per_node: 1}
name: elastic
program: elastic.py
"""


@pytest.mark.rotates("programs on Slurm")
def test_a_program_goes_on_with_fewer_nodes(programs: Cluster) -> None:
    text = COUNTING.replace('f"rank-{run.rank}.json"', '"rank-0.json"').replace("step % 100", "step % 10")
    text = text.replace('print("begins', 'print(run.world_size, "ranks; begins')
    write(programs, "elastic.py", text)
    (programs.project.folder / "elastic.yaml").write_text(ELASTIC)
    done = programs.ortflow("submit", "-b", "slurm", "elastic.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(programs, "elastic")
    run.until_step(25)
    lost = programs.testbed.hosts(run.job)[3]
    programs.testbed.node("off", lost)
    run.until_attempt(1, 30)
    assert run.records("start")[1]["world_size"] == 3
    first = re.findall(r"3 ranks; begins after (\d+)", log(run, 0, attempt=1))
    assert int(first[0]) >= 20
    programs.testbed.node("start", lost)
    wait_until(lambda: len(run.records("start")) > 2, ENDS, run.transcript)
    run.finish()
    # Seconds later the ranks on 22.05 get a SIGTERM that Slurm does not log; they save, and go on.
    assert [start["world_size"] for start in run.records("start")][:3] == [4, 3, 4], run.transcript()
    assert run.status()["failures"] == 0
