"""A training program on two nodes: each rank knows its place, and a request to stop is agreed on all nodes."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from cluster import Cluster, Run
from project import Project
from testbed import Testbed

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
        if run.should_stop or step % 100 == 0:
            with run.commit(step) as folder:
                (folder / f"rank-{run.rank}.json").write_text(json.dumps({"step": step}))
        if run.should_stop:
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
    (folder,) = (run.run_dir / "checkpoints").glob("step-*")
    saved = {json.loads((folder / f"rank-{rank}.json").read_text())["step"] for rank in (0, 1)}
    assert saved == {int(folder.name.removeprefix("step-"))}
    assert programs.ortflow("resume", "count").returncode == 0
    run.finish()
    assert f"begins after {saved.pop()}" in log(run, 1, attempt=1)
