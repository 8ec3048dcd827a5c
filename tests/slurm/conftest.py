"""A testbed for the tests of this folder: a real Slurm on this machine (tests/testbeds/slurm).

ORTFLOW_SLURM=1     starts one, installing what is missing; an error where that is impossible
ORTFLOW_SLURM=0     skips
not set             starts one if run as root with the packages installed, skips otherwise
ORTFLOW_SLURM_TESTBED   folder of the testbed: one that is up already is used (its nodes must see the tests' folders)

Under pytest-xdist, each worker has a testbed of its own; the worker's name is appended to the folder's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import Cluster, Run
from project import Project
from rotation import rotate
from testbed import SCRIPTS, Testbed

# Started in the background or by nohup, a test run ignores these signals, and its child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

HERE = Path(__file__).parent
QUICK = ["--set", "SlurmdTimeout=6", "--set", "MessageTimeout=5"]
"""A dead node is noticed within 20 s, not after 5 minutes."""
if Path("/sys/fs/cgroup/memory").is_dir():
    QUICK.append("--cgroup")
IDLE = pytest.StashKey[bool]()
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: on a real Slurm cluster on this machine; see tests/slurm/conftest.py")


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
    rotate(config, items)


def missing() -> str | None:
    """Why no testbed can be started without installing anything; None if it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of one's own needs root"
    lacking = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"no Slurm here: {', '.join(lacking)} (ORTFLOW_SLURM=1 installs it)" if lacking else None


def start(folder: Path, port: int, shared: list[Path], *options: str) -> Testbed:
    """A testbed whose nodes see all folders that tests need."""
    seen = [SCRIPTS.parents[2], Path(sys.prefix), Path(sys.base_prefix), *shared]
    command = [
        str(SCRIPTS / "up"), "--testbed", str(folder), "--base-port", str(port), "--names", f"n{port}x",
        "--shared", " ".join(sorted({str(path) for path in seen})), *options,
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return Testbed(folder)


def stop(testbed: Testbed) -> None:
    """Remove the testbed."""
    subprocess.run([str(SCRIPTS / "down"), "--testbed", str(testbed.folder)], check=True, timeout=120)


@pytest.fixture(scope="session")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of 48 MB, visible to nodes that boot later."""
    folder = tmp_path_factory.mktemp("disk")
    if os.geteuid() != 0:
        pytest.skip("a disk of one's own needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Testbed]:
    """The testbed of all tests."""
    wanted = os.environ.get("ORTFLOW_SLURM", "")
    if wanted == "0":
        pytest.skip("ORTFLOW_SLURM=0")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    # Workers are children of one process: their ports differ.
    number = os.getppid() + int(worker.removeprefix("gw")) if worker else os.getpid()
    port = 20000 + number % 100 * 100
    given = os.environ.get("ORTFLOW_SLURM_TESTBED", f"/var/tmp/ortflow-slurm-{port}")
    folder = Path(f"{given}-{worker}" if worker else given)
    if (folder / "env").exists():
        yield Testbed(folder)
        return
    why = missing()
    if why is not None and wanted != "1":
        pytest.skip(why)
    disk: Path = request.getfixturevalue("small_disk")
    testbed = start(folder, port, [tmp_path_factory.getbasetemp(), disk], *QUICK)
    try:
        yield testbed
    finally:
        stop(testbed)


@pytest.fixture
def testbed(cluster: Testbed, request: pytest.FixtureRequest) -> Iterator[Testbed]:
    """The testbed, all nodes idle; checked again only if it may have changed since the last check."""
    if not request.session.stash.get(IDLE, False):
        cluster.restore()
    request.session.stash[IDLE] = False
    yield cluster
    cluster.restore()
    request.session.stash[IDLE] = True


@pytest.fixture(scope="session")
def project(cluster: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A model and data, where all nodes see them."""
    return Project.make(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def undisturbed(cluster: Testbed, project: Project) -> Run:
    """An undisturbed run."""
    return Cluster(cluster, project).run("undisturbed")


@pytest.fixture
def cluster_of(testbed: Testbed, project: Project) -> Cluster:
    """The testbed, idle, and what to train on it."""
    return Cluster(testbed, project)


@pytest.fixture
def on_small_disk(cluster_of: Cluster, small_disk: Path) -> Iterator[Cluster]:
    """The project on a disk of its own, which can be filled."""
    folder = small_disk / "project"
    folder.mkdir()
    shutil.copy(cluster_of.project.folder / "model.onnx", folder)
    shutil.copytree(cluster_of.project.folder / "set", folder / "set")
    try:
        yield replace(cluster_of, project=Project(folder))
    finally:
        cluster_of.testbed.restore()
        shutil.rmtree(folder)
