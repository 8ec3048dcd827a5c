"""Training programs on this machine: placed, told their place, ended, stopped, resumed; through the command line."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from pathlib import Path

import pytest
from messages import mentions
from program_runs import Programs
from waits import PATIENCE, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups and adoption of orphans are Linux's")

WORLD = """
    import json, os, sys
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR",
             "MASTER_PORT", "TORCHELASTIC_RUN_ID", "HOROVOD_RANK", "JAX_PROCESS_ID", "TF_CONFIG", "COLOR"]
    print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), **{name: os.environ.get(name) for name in names}}))
"""

COUNTING = """
    import json, os, time
    import ortflow.program

    run = ortflow.program.context()
    run.total = 40
    latest = run.latest()
    first = 0 if latest is None else json.loads((latest / f"rank-{run.rank}.json").read_text())["step"]
    print("begins after", first, flush=True)
    for step in range(first + 1, 41):
        time.sleep(0.05 if run.attempt else float(os.environ.get("PAUSE", "0.05")))
        run.log(step=step, loss=1 / step)
        run.step(step)
        stop = run.should_stop
        if stop or step % 10 == 0:
            with run.commit(step) as folder:
                (folder / f"rank-{run.rank}.json").write_text(json.dumps({"step": step}))
        if stop:
            print("stopped at", step, flush=True)
            break
"""


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def worlds(programs: Programs, ranks: int) -> list[dict[str, str]]:
    return [
        json.loads(next(line for line in programs.log(rank).splitlines() if line.startswith("{")))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_knows_its_place(programs: Programs, ranks: int) -> None:
    path = programs.write(WORLD)
    code, output = programs.run("train.py", "--ranks", str(ranks), "program.env.COLOR=red", "--", "--lr", "1e-3", "a b")
    assert code == 0, output
    assert '"RANK": "0"' in output
    for rank, world in enumerate(worlds(programs, ranks)):
        assert world["argv"] == [str(path), "--lr", "1e-3", "a b"]
        assert (world["cwd"], world["COLOR"]) == (str(programs.folder), "red")
        assert (world["RANK"], world["LOCAL_RANK"], world["HOROVOD_RANK"], world["JAX_PROCESS_ID"]) == (str(rank),) * 4
        assert (world["WORLD_SIZE"], world["LOCAL_WORLD_SIZE"]) == (str(ranks), str(ranks))
        assert (world["NODE_RANK"], world["GROUP_RANK"], world["MASTER_ADDR"]) == ("0", "0", "127.0.0.1")
        assert int(world["MASTER_PORT"]) > 0
        assert (world["TF_CONFIG"] is None) == (ranks == 1)
    assert len({world["MASTER_PORT"] for world in worlds(programs, ranks)}) == 1
    assert programs.left() == []


def test_a_stop_is_agreed_and_the_run_resumes(programs: Programs) -> None:
    programs.write(COUNTING)
    process = programs.start("run", "train.py", "--ranks", "2", PAUSE="0.5")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("begins after"):
            break
    wait_until(lambda: programs.events("step"))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    stopped = [line for rank in (0, 1) for line in programs.log(rank).splitlines() if line.startswith("stopped at")]
    assert len(stopped) == 2
    assert len(set(stopped)) == 1
    step = int(stopped[0].split()[-1])
    assert 0 < step < 40
    assert (programs.folder / f"runs/train/checkpoints/step-{step:08d}/COMMITTED").exists()

    code, output = programs.run("train.py", "--ranks", "2")
    assert code == 0, output
    assert f"begins after {step}" in programs.log(1, attempt=1)
    assert [record["step"] for record in programs.events("step")] == [*range(1, 41)]
    for rank in (0, 1):
        assert all(0 < usage["resident"] <= usage["peak"] for usage in programs.events("usage", rank))
        assert programs.events("usage", rank), "measured from the first second on"
    assert programs.left() == []


def test_a_program_that_saves_nothing_through_ortflow_is_not_called_saved(programs: Programs) -> None:
    programs.write("""
        import time
        print("begins", flush=True)
        time.sleep(60)
    """)
    process = programs.start("run", "train.py")
    assert process.stdout is not None
    opening = "".join(iter(process.stdout.readline, "begins\n"))
    assert mentions(opening, "if the program uses ortflow.program.start, a checkpoint is saved")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    assert mentions(output, "stopped; ortflow has saved nothing")
    attempts = (programs.folder / "runs/train/attempts.jsonl").read_text().splitlines()
    assert json.loads(attempts[-1])["cause"].startswith("stopped")


def test_a_damaged_checkpoint_is_passed_over(programs: Programs) -> None:
    programs.write(COUNTING)
    code, output = programs.run("train.py")
    assert code == 0, output
    newest = programs.folder / "runs/train/checkpoints/step-00000040/rank-0.json"
    newest.write_text(newest.read_text().replace("40", "41"))
    verified = programs.start("checkpoint", "verify", "train")
    output, _ = verified.communicate(timeout=PATIENCE)
    assert verified.returncode == 1
    assert mentions(output, "step-00000040/rank-0.json", "corrupt")
    code, output = programs.run("train.py", "program.args=[again]")
    assert code == 0, output
    assert mentions(output, "checkpoint rejected", "step-00000040/rank-0.json", "corrupt")
    assert "begins after 30" in programs.log(attempt=1)
    listed = programs.start("checkpoint", "list", "train", "--json")
    output, _ = listed.communicate(timeout=PATIENCE)
    assert [(row["step"], row["committed"]) for row in json.loads(output)] == [(30, True), (40, True)]
    pruned = programs.start("checkpoint", "prune", "train", "--newest", "1")
    output, _ = pruned.communicate(timeout=PATIENCE)
    assert pruned.returncode == 0, output
    names = sorted(path.name for path in (programs.folder / "runs/train/checkpoints").iterdir())
    assert names == ["rejected-step-00000040-01", "step-00000040"]


def test_ranks_that_differ_about_the_step_commit_nothing(programs: Programs) -> None:
    programs.write(
        """
        import ortflow.program
        run = ortflow.program.context()
        with run.commit(5 + run.rank) as folder:
            (folder / "x").write_text("x")
        """
    )
    code, output = programs.run("train.py", "--ranks", "2", "restart.failures=0")
    assert code == 1
    assert mentions(output, "different steps, 5 and 6") or mentions(output, "different steps, 6 and 5")
    assert list((programs.folder / "runs/train/checkpoints").glob("step-*")) == []


def test_a_failed_save_of_one_rank_commits_nothing(programs: Programs) -> None:
    programs.write(
        """
        import ortflow.program
        run = ortflow.program.context()
        try:
            with run.commit(5) as folder:
                (folder / f"x{run.rank}").write_text("x")
                if run.rank == 1:
                    raise OSError("no paper")
        except Exception as error:
            print("failed:", error, flush=True)
        """
    )
    code, output = programs.run("train.py", "--ranks", "2")
    assert code == 0, output
    assert mentions(output, "no checkpoint of step 5", "rank 1", "no paper")
    assert all("failed:" in programs.log(rank) for rank in (0, 1))
    assert list((programs.folder / "runs/train/checkpoints").iterdir()) == []


def test_a_sweep_of_parameters_reaches_the_arguments(programs: Programs) -> None:
    programs.write(WORLD)
    (programs.folder / "run.yaml").write_text(
        "name: s\nprogram: {script: train.py, args: [--lr, '{lr}'], parameters: {lr: 1}}\n"
    )
    code, output = programs.run("run.yaml", "program.parameters.lr=1e-4")
    assert code == 0, output
    assert '"--lr", "0.0001"' in output


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torchrun_starts_the_processes_of_a_node(programs: Programs) -> None:
    programs.write(
        """
        import os
        import torch, torch.distributed as dist
        import ortflow.program
        dist.init_process_group("gloo")
        run = ortflow.program.context()
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        with run.commit(1) as folder:
            (folder / f"{dist.get_rank()}.txt").write_text(str(total.item()))
        # One write: torchrun's processes share a pipe, and an unbuffered print writes each argument by itself.
        os.write(1, f"sum {total.item()} {run.rank} {os.environ['LOCAL_RANK']}\\n".encode())
        dist.destroy_process_group()
        """
    )
    code, output = programs.run("train.py", "--ranks", "2", "--start", "torchrun", seconds=150)
    assert code == 0, output
    assert sorted(line for line in programs.log().splitlines() if line.startswith("sum")) == [
        "sum 3.0 0 0",
        "sum 3.0 1 1",
    ]
    folder = programs.folder / "runs/train/checkpoints/step-00000001"
    assert {path.name for path in folder.iterdir()} == {"0.txt", "1.txt", "manifest.json", "COMMITTED"}
    assert programs.left() == []
