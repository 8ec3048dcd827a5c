"""A training program on two pods: each rank knows its place, and reaches rank 0 of the other pod."""

from __future__ import annotations

import json
import textwrap

from kubernetes_cluster import Cluster, Run

WORLD = """
    import json, os
    import ortflow.program

    run = ortflow.program.context()
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
             "TORCHELASTIC_RUN_ID", "JAX_COORDINATOR_ADDRESS"]
    print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
    with run.commit(1) as folder:
        (folder / f"rank-{run.rank}.txt").write_text(str(run.rank))
"""


def test_a_program_prints_its_world(cluster: Cluster) -> None:
    (cluster.folder / "world.py").write_text(textwrap.dedent(WORLD))
    settings = [
        "image=localhost/ortflow:testbed", f"namespace={cluster.space.name}", "volume.mount=/ortflow",
        "volume.claim=data", "grace_seconds=20",
    ]  # fmt: skip
    done = cluster.ortflow(
        "submit", "-b", "kubernetes", "world.py", "--nodes", "2", "--ranks", "4",
        *(f"backends.kubernetes.{setting}" for setting in settings),
        "resources.cpus_per_rank=1", "resources.memory=1Gi",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(cluster, "world")
    run.finish()
    logs = [(run.run_dir / f"logs/attempt-00/rank-{rank:04d}.log").read_text() for rank in range(4)]
    worlds = [json.loads(next(line for line in log.splitlines() if line.startswith("{"))) for log in logs]
    assert [world["RANK"] for world in worlds] == ["0", "1", "2", "3"]
    assert [world["NODE_RANK"] for world in worlds] == ["0", "0", "1", "1"]
    assert [world["LOCAL_RANK"] for world in worlds] == ["0", "1", "0", "1"]
    assert {(world["WORLD_SIZE"], world["LOCAL_WORLD_SIZE"], world["TORCHELASTIC_RUN_ID"]) for world in worlds} == {
        ("4", "2", "world")
    }
    assert len({(world["MASTER_ADDR"], world["MASTER_PORT"]) for world in worlds}) == 1
    assert worlds[0]["MASTER_ADDR"] != "127.0.0.1"
    folder = run.run_dir / "checkpoints/step-00000001"
    assert {path.name for path in folder.glob("rank-*.txt")} == {f"rank-{rank}.txt" for rank in range(4)}


WAITS = """
    import time
    import ortflow.program

    run = ortflow.program.context()
    for step in range(10_000):
        time.sleep(0.1)
        run.step(step + 1)
        run.log(step=step + 1, loss=1.0)
        if run.should_stop:
            print("left", run.seconds_left, flush=True)
            with run.commit(step + 1) as folder:
                (folder / "state").write_text(str(step))
            break
"""


def test_a_program_knows_the_grace_of_its_pod(cluster: Cluster) -> None:
    (cluster.folder / "waits.py").write_text(textwrap.dedent(WAITS))
    settings = [
        "image=localhost/ortflow:testbed", f"namespace={cluster.space.name}", "volume.mount=/ortflow",
        "volume.claim=data", "grace_seconds=40",
    ]  # fmt: skip
    done = cluster.ortflow(
        "submit", "-b", "kubernetes", "waits.py", *(f"backends.kubernetes.{setting}" for setting in settings),
        "resources.cpus_per_rank=1", "resources.memory=1Gi",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(cluster, "waits")
    run.until_step(3)
    done = cluster.ortflow("cancel", "waits", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (run.run_dir / "logs/attempt-00/rank-0000.log").read_text()
    left = float(next(line for line in log.splitlines() if line.startswith("left")).split()[1])
    assert 0.75 * 40 - 3 < left <= 0.75 * 40
    assert list((run.run_dir / "checkpoints").glob("step-*/COMMITTED"))
