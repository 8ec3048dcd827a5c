"""A testbed for the tests of this folder: a real Kubernetes on this machine (tests/testbeds/kubernetes).

ORTFLOW_KUBERNETES=1     starts one, installing and building what is missing; an error where that is impossible
ORTFLOW_KUBERNETES=0     skips
not set                  starts one if run as root and everything was built, skips otherwise
ORTFLOW_KUBERNETES_TESTBED   folder of the testbed: one that is already up is used
ORTFLOW_CACHE            folder of built pieces (~/.cache/ortflow)
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
from kubernetes_cluster import CLAIM, SHAPE, Cluster, make_project
from kubernetes_disk import SmallDisk
from kubernetes_testbed import SCRIPTS, Space, Testbed
from project import FEW_CORES, Project
from rotation import rotate

# Started in the background or by nohup, a test run ignores these signals, and its child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

HERE = Path(__file__).parent
PROGRAMS = ("etcd", "containerd", "runc", "debootstrap", "busybox")
NUMBERS = count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "kubernetes: on a real Kubernetes cluster on this machine; see tests/kubernetes/conftest.py"
    )


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kubernetes)
    rotate(config, items)


def missing() -> str | None:
    """Why no testbed can be started without installing or building anything; None if it can."""
    if os.geteuid() != 0:
        return "a Kubernetes cluster of one's own needs root"
    install = "ORTFLOW_KUBERNETES=1 installs and builds it"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if lacking:
        return f"no Kubernetes here: {', '.join(lacking)} ({install})"
    cache = Path(os.environ.get("ORTFLOW_CACHE", Path.home() / ".cache/ortflow")) / "kubernetes"
    return None if (cache / "store.have").is_dir() else f"nothing was built in {cache} ({install})"


def start(folder: Path, *options: str) -> Testbed:
    """A testbed."""
    command = [str(SCRIPTS / "up"), "--testbed", str(folder), *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    return Testbed(folder)


def stop(testbed: Testbed) -> None:
    """Remove the testbed."""
    subprocess.run([str(SCRIPTS / "down"), "--testbed", str(testbed.folder)], check=True, timeout=120)


@pytest.fixture(scope="session")
def cluster_testbed() -> Iterator[Testbed]:
    """The testbed of all tests."""
    wanted = os.environ.get("ORTFLOW_KUBERNETES", "")
    if wanted == "0":
        pytest.skip("ORTFLOW_KUBERNETES=0")
    folder = Path(os.environ.get("ORTFLOW_KUBERNETES_TESTBED", f"/var/tmp/ortflow-kubernetes-{os.getpid()}"))
    if (folder / "env").exists():
        yield Testbed(folder)
        return
    why = missing()
    if why is not None and wanted != "1":
        pytest.skip(why)
    testbed = start(folder)
    try:
        yield testbed
    finally:
        stop(testbed)


@pytest.fixture
def kubernetes_testbed(cluster_testbed: Testbed) -> Iterator[Testbed]:
    """The testbed for a test that damages it: intact before and after."""
    cluster_testbed.restore()
    yield cluster_testbed
    cluster_testbed.restore()


@pytest.fixture
def space(cluster_testbed: Testbed) -> Iterator[Space]:
    """A namespace for one test."""
    made = Space.make(cluster_testbed, f"test-{os.getpid()}-{next(NUMBERS)}")
    yield made
    made.remove()


@pytest.fixture(scope="session")
def kubernetes_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A model and data."""
    return make_project(tmp_path_factory.mktemp("kubernetes-project"))


@pytest.fixture(scope="session")
def trained_here(kubernetes_project: Project) -> Path:
    """The run directory of the same training on this machine; sums over ranks of one node may round differently."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW_CORES.items():
            patch.setenv(name, value)
        return kubernetes_project.run("trained-here", **{**SHAPE, "resources": {"ranks_per_node": 4}})


@pytest.fixture(scope="session")
def left_alone(
    cluster_testbed: Testbed, kubernetes_project: Project, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The run directory of an undisturbed run on the cluster."""
    space = Space.make(cluster_testbed, f"left-alone-{os.getpid()}")
    cluster = Cluster.make(space, kubernetes_project, tmp_path_factory.mktemp("left-alone"))
    yield cluster.run("left-alone").run_dir
    space.remove()


@pytest.fixture
def cluster(space: Space, kubernetes_project: Project, tmp_path: Path) -> Cluster:
    """A namespace with a volume that holds model and data, and a folder to submit from."""
    return Cluster.make(space, kubernetes_project, tmp_path)


@pytest.fixture
def small_disk(cluster: Cluster, tmp_path: Path) -> Iterator[SmallDisk]:
    """The cluster's volume is a small file system of its own."""
    with _on_a_disk(cluster, tmp_path, quota=False) as made:
        yield made


@pytest.fixture
def small_quota(cluster: Cluster, tmp_path: Path) -> Iterator[SmallDisk]:
    """The cluster's volume is a folder with a quota on a large file system of its own."""
    if shutil.which("mkfs.btrfs") is None or "btrfs" not in Path("/proc/filesystems").read_text():
        pytest.skip("a file system with a quota needs btrfs")
    with _on_a_disk(cluster, tmp_path, quota=True) as made:
        yield made


@contextmanager
def _on_a_disk(cluster: Cluster, folder: Path, *, quota: bool) -> Iterator[SmallDisk]:
    files = [(path.relative_to(cluster.volume), path) for path in cluster.volume.rglob("*") if path.is_file()]
    kept = {name: path.read_bytes() for name, path in files}
    made = SmallDisk.make(cluster.space, CLAIM, folder, quota=quota)
    for name, data in kept.items():
        (cluster.volume / name).parent.mkdir(parents=True, exist_ok=True)
        (cluster.volume / name).write_bytes(data)
    yield made
    with suppress(OSError):
        made.free()
    made.remove()
