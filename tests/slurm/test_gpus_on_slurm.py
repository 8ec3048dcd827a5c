"""GPUs on a real Slurm cluster, as copies of /dev/null: which rank sees which, and requests for too many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Run
from messages import mentions
from testbed import FINAL, wait_until

TWO_GPUS: dict[str, Any] = {
    "resources": {"nodes": 2, "ranks_per_node": 2, "cpus_per_rank": 1, "memory": "1Gi", "gpus_per_rank": 1},
    "restart": {"failures": 0},
}
OWN, ALL = ["0", "1", "0", "1"], ["0,1"] * 4
RECORDER = """#!/bin/bash
case "$*" in *ortflow.workflow.rank*)
  echo "${{CUDA_VISIBLE_DEVICES-unset}}" >"{folder}/$SLURMD_NODENAME.${{MPI_LOCALRANKID:-$SLURM_LOCALID}}"
  sleep 1
  exit 2 ;;
esac
exec {python} "$@"
"""


def recorder(folder: Path) -> Path:
    """An interpreter that, in place of a rank, records what the rank sees."""
    folder.mkdir()
    program = folder / "python"
    program.write_text(RECORDER.format(folder=folder, python=sys.executable))
    program.chmod(0o755)
    # ortflow looks for its MPI beside it.
    for path in Path(sys.executable).parent.glob("*"):
        if path.name.startswith(("mpi", "hydra")):
            (folder / path.name).symlink_to(path)
    return program


def ended(run: Run) -> dict[str, Any]:
    wait_until(lambda: run.testbed.state(run.job) in FINAL, 120, run.transcript)
    return run.status()


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("name", "slurm", "seen"),
    [
        ("by-task", {}, OWN),
        ("of-a-kind", {"resources__gpu_type": "fake"}, OWN),
        ("by-node", {"backends__slurm__gpus_as": "gpus-per-node"}, ALL),
        ("by-gres", {"backends__slurm__gpus_as": "gres", "resources__gpu_type": "fake"}, ALL),
        ("bound", {"backends__slurm__gpus_as": "gres", "backends__slurm__gpu_bind": "single:1"}, OWN),
        ("by-mpirun", {"backends__slurm__mpi": "mpirun"}, ALL),
    ],
)
def test_what_ranks_see(cluster_of: Cluster, tmp_path: Path, name: str, slurm: dict[str, Any], seen: list[str]) -> None:
    folder = tmp_path / "seen"
    run = cluster_of.submit(name, **{**TWO_GPUS, "resources__python": str(recorder(folder)), **slurm})
    assert ended(run)["state"] == "failed"
    files = sorted(folder.glob("*.[01]"))
    assert [path.name.rpartition(".")[2] for path in files] == ["0", "1"] * 2
    assert [path.read_text().strip() for path in files] == seen, run.transcript()


def test_ranks_without_cuda_report_it(cluster_of: Cluster) -> None:
    reported = ended(cluster_of.submit("no-cuda", **TWO_GPUS))
    assert reported["state"] == "failed"
    assert "resources.gpus_per_rank: asks for GPUs, and onnxruntime" in reported["cause"]


@pytest.mark.parametrize(
    ("name", "wishes", "words"),
    [
        (
            "too-many",
            {"resources__ranks_per_node": 3},
            "2 GPUs … asks for 3 on each",
        ),
        (
            "of-another-kind",
            {"resources__gpu_type": "h100"},
            "GPUs of type h100 … asks for 2 on each … fake",
        ),
    ],
)
def test_more_gpus_than_there_are(cluster_of: Cluster, name: str, wishes: dict[str, Any], words: str) -> None:
    file = cluster_of.write(name, **{**TWO_GPUS, **wishes})
    done = cluster_of.ortflow("submit", "--backend", "slurm", file.name)
    assert done.returncode == 2, done.stderr
    assert mentions(done.stderr, f"resources: … partition main … {words}")
    assert "Traceback" not in done.stderr
    reported = cluster_of.ortflow("doctor", "--backend", "slurm", file.name)
    assert reported.returncode == 1
    assert mentions(reported.stdout, words), reported.stdout
    assert cluster_of.testbed.reported("squeue", "-h") == ""


def test_what_fits_is_said_by_kind(cluster_of: Cluster) -> None:
    file = cluster_of.write("fits", **{**TWO_GPUS, "resources__gpu_type": "fake"})
    reported = cluster_of.ortflow("doctor", "--backend", "slurm", file.name)
    assert mentions(reported.stdout, "2 nodes", "2 GPUs of type fake"), reported.stdout
    assert "fits in main" in reported.stdout
