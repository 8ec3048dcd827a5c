"""A real Grid Engine on this machine (tests/testbeds/gridengine), and the launcher of tests/launchers/gridengine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rotation import rotate
from site_of_gridengine import Site, grid_engine

TESTS = Path(__file__).parent.parent

pytest_collection_modifyitems = rotate


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables that select the cluster."""
    if os.geteuid() != 0:
        pytest.skip("a Grid Engine of one's own needs root")
    if any(shutil.which(name) is None for name in ("sge_qmaster", "sge_execd", "qsub")):
        pytest.skip("no Grid Engine here: apt-get install gridengine-master gridengine-exec gridengine-client")
    with grid_engine(tmp_path_factory.mktemp("gridengine") / "cell", 0) as variables:
        yield variables


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the launcher's package is installed."""
    folder = tmp_path_factory.mktemp("packages")
    shutil.copytree(TESTS / "launchers" / "gridengine", folder / "source")
    install = [
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(folder / "installed"),
    ]
    subprocess.run([sys.executable, "-m", "pip", *install, str(folder / "source")], check=True)
    return folder / "installed"


@pytest.fixture
def site(tmp_path: Path, cluster: dict[str, str], packages: Path) -> Iterator[Site]:
    """A folder to submit runs from; the queue is empty before and after."""
    site = Site(tmp_path, cluster, packages)
    yield site
    site.ask("qdel", "-u", "root", "-f", check=False)
    site.until(lambda: not site.ask("qstat"))
