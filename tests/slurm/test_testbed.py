"""The testbed itself, on which the launcher's tests depend."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest
from testbed import SCRIPTS, Testbed, wait_until


def test_up_works_and_down_leaves_nothing(cluster: Testbed) -> None:
    """A second testbed beside the first, with everything a testbed can have."""
    folder = Path(f"/var/tmp/ortflow-slurm-second-{os.getpid()}")
    before = {process.pid for process in psutil.process_iter()}
    up = [
        str(SCRIPTS / "up"), "--testbed", str(folder), "--base-port", "31000", "--nodes", "2", "--names", "second",
        "--grace", "15", "--preempt-signal", "--cgroup", "--shared", "/usr",
    ]  # fmt: skip
    if not Path("/sys/fs/cgroup/memory").is_dir():
        up.remove("--cgroup")
    done = subprocess.run(up, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}/env\n"
    second = Testbed(folder)
    assert second.nodes == ["second1", "second2"]
    assert "GraceTime=15" in second.reported("scontrol", "show", "partition", "main")
    assert sorted(second.reported("srun", "--nodes=2", "hostname").split()) == ["second1", "second2"]
    job = second.sbatch("--nodes=2", "--output=/dev/null", "--wrap=srun sleep 60")
    wait_until(lambda: second.state(job) == "RUNNING", 120)
    subprocess.run([str(SCRIPTS / "down"), "--testbed", str(folder)], check=True, timeout=120)
    assert not folder.exists()
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert not list(Path("/sys/fs/cgroup").glob("*/slurm_second*"))
    left = [p for p in psutil.process_iter() if p.pid not in before and _of(p, folder)]
    assert left == []
    assert cluster.reported("sinfo", "-h"), "the other testbed still runs"


def _of(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in " ".join([*process.cmdline(), *process.environ().values()])
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes"], "--nodes needs a value"),
        (["--frobnicate", "1"], "no such option: --frobnicate"),
        (["--shared", "/tmp /tmp/not-there"], "--shared: there is no folder /tmp/not-there"),
    ],
)
def test_up_reports_what_is_wrong(tmp_path: Path, options: list[str], words: str) -> None:
    up = [str(SCRIPTS / "up"), "--testbed", str(tmp_path / "none"), *options]
    done = subprocess.run(up, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert words in done.stderr
    assert not (tmp_path / "none").exists()


def test_up_refuses_ports_in_use(cluster: Testbed, tmp_path: Path) -> None:
    port = cluster.reported("scontrol", "show", "config").split("SlurmctldPort")[1].split()[1]
    up = [str(SCRIPTS / "up"), "--testbed", str(tmp_path / "none"), "--base-port", port]
    done = subprocess.run(up, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"port {port} is in use: give --base-port" in done.stderr
    assert not (tmp_path / "none").exists()


def test_nodes_are_apart(testbed: Testbed) -> None:
    first, second = testbed.nodes[:2]
    testbed.node("exec", first, "touch", "/tmp/mine", "/dev/shm/mine")
    there = testbed.node("exec", second, "sh", "-c", "ls /tmp/mine /dev/shm/mine 2>&1 || true")
    assert there.count("No such file") == 2
    assert testbed.node("exec", second, "hostname") == second
    assert not Path("/tmp/mine").exists()


def test_gpus_are_handed_out(testbed: Testbed) -> None:
    seen = testbed.reported("srun", "--ntasks=2", "--gpus-per-task=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert sorted(seen.split()) in (["0", "0"], ["0", "1"])


@pytest.mark.chaos
def test_a_node_off_is_noticed_and_comes_back(testbed: Testbed) -> None:
    name = testbed.nodes[-1]
    testbed.node("off", name)
    wait_until(lambda: "down" in testbed.reported("sinfo", "-h", "-N", "-n", name, "-o", "%T"), 120)
    testbed.node("start", name)
    wait_until(lambda: testbed.reported("sinfo", "-h", "-N", "-n", name, "-p", "main", "-o", "%T") == "idle", 120)


def test_an_urgent_job_preempts_and_the_other_is_requeued(testbed: Testbed, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    job = testbed.sbatch(
        "--requeue", "--output=/dev/null", f"--wrap=echo ${{SLURM_RESTART_COUNT:-0}} >>{seen}; sleep 20"
    )
    wait_until(seen.exists, 120)
    testbed.preempt(job, seconds=2)
    wait_until(lambda: seen.read_text() == "0\n1\n", 120, lambda: str(testbed.job(job)))


@pytest.mark.skipif(not os.path.isdir("/sys/fs/cgroup/memory"), reason="needs cgroup version 1")
def test_memory_is_held_by_cgroup(testbed: Testbed) -> None:
    hog = "x = bytearray(b'x' * (300 << 20))"
    done = testbed.ask("srun", "--mem=100", "python3", "-c", hog)
    assert done.returncode != 0
    assert "Out Of Memory" in done.stderr


@pytest.mark.chaos
def test_the_controller_dies_freezes_and_comes_back(testbed: Testbed) -> None:
    testbed.controller("kill")
    assert "Unable to contact slurm controller" in testbed.ask("squeue").stderr
    testbed.controller("start")
    assert testbed.reported("scontrol", "ping")
