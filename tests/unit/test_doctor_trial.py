"""The trial job of `ortflow doctor --job`: its script, its program on the nodes, and the findings from its reports."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from messages import mentions, says
from run_files import spec_of

from ortflow.launchers.findings import Finding, Level
from ortflow.launchers.slurm import node_report
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.probe import Start
from ortflow.launchers.slurm.trial import Results
from ortflow.launchers.slurm.trial_findings import findings, named
from ortflow.manifests.slurm import Placement
from ortflow.manifests.slurm.trial import UNSEEN, script, trial_spec

TRIAL = Placement(Path("/data/it's mine/.ortflow-doctor-x"), "/k/python", "/r/python", "pmi2", "abc", kind="mpich")


def test_the_script_of_a_trial() -> None:
    spec = spec_of(
        resources={"nodes": 8, "ranks_per_node": 2, "time_limit": "2-00:00:00", "memory": "3Gi"},
        backends={
            "slurm": {
                "partition": "gpu", "dependency": "afterok:1", "begin": "now+1hour", "job_name": "mine",
                "mail": {"types": ["ALL"]}, "prologue": ["module load x"], "epilogue": ["rm -r /data"],
            }
        },
    )  # fmt: skip
    text = script(trial_spec(spec, 2), TRIAL)
    directives = {line for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"#SBATCH --nodes=2", "#SBATCH --time=00:02:00", "#SBATCH --partition=gpu", "#SBATCH --mem=3G",
            "#SBATCH --output=/dev/null", "#SBATCH --job-name=ortflow-doctor",
            '#SBATCH --comment="ortflow abc"'} <= directives  # fmt: skip
    unwanted = ("mail", "dependency=", "begin", "signal", "open-mode")
    assert not [line for line in directives if line.startswith(tuple(f"#SBATCH --{name}" for name in unwanted))]
    assert "module load x" in text
    assert "rm -r" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize("kind", ["apptainer", "pyxis"])
def test_a_trial_in_a_container(kind: str) -> None:
    spec = spec_of(
        resources={"ranks_per_node": 2}, backends={"slurm": {"container": {"kind": kind, "image": "/i.sif"}}}
    )
    text = script(trial_spec(spec, None), replace(TRIAL, run_dir=Path("/data/x")))
    assert "/i.sif" in text
    assert "python /data/x/node_report.py" in text.replace("\\\n", "").replace("  ", "")
    assert "/r/python" not in text


def test_a_node_without_the_folder_is_reported_by_the_exit_code(tmp_path: Path) -> None:
    """The script itself, with an srun that starts nothing."""
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    environment = {"PATH": f"{srun.parent}:{os.environ['PATH']}"}
    for folder, code in ((tmp_path / "there", 0), (tmp_path / "not there", UNSEEN)):
        if code == 0:
            folder.mkdir()
        text = script(trial_spec(spec_of(resources={"ranks_per_node": 2}), None), replace(TRIAL, run_dir=folder))
        done = subprocess.run(["bash"], input=text, text=True, env=environment, stderr=subprocess.DEVNULL)
        assert done.returncode == code
    assert {file.name for file in (tmp_path / "there").iterdir()} == {
        "job.log", "run_supervisor.code", "run_supervisor.log", "ranks.code", "ranks.log",
        "scontrol.code", "scontrol.log", "sbatch.code", "sbatch.log",
    }  # fmt: skip
    assert (tmp_path / "there/run_supervisor.code").read_text() == "127\n"


def test_a_node_reports(tmp_path: Path) -> None:
    """The program as a node runs it: from a copy, by itself."""
    program = tmp_path / "node_report.py"
    shutil.copyfile(str(node_report.__file__), program)
    gone = str(tmp_path / "gone")
    (tmp_path / "request.json").write_text(json.dumps({"packages": ["numpy", "nope"], "paths": [str(program), gone]}))
    (tmp_path / "n2.seen").write_text("12.5\n")
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        environment = {**os.environ, "SLURMD_NODENAME": "n2", "SLURM_JOB_NUM_NODES": "1"}
        command = [sys.executable, str(program), "node", str(tmp_path)]
        # A job starts in the folder that it was submitted from.
        (tmp_path / "user").mkdir()
        (tmp_path / "user/onnx.py").write_text("raise SystemExit('a module of a stranger')\n")
        subprocess.run(command, check=True, env=environment, cwd=tmp_path / "user")
    report = json.loads((tmp_path / "n2.node.json").read_text())
    assert report["lock"] == "held"
    assert report["missing"] == [gone]
    assert set(report["packages"]) == {"numpy", "ortflow"}
    assert report["others"]["seen"] == ["n2"]
    assert report["imports"] == ""
    assert report["bytes_per_second"] > 1e5
    assert report["free"] > 0
    assert not list(tmp_path.glob("*.data"))
    assert node_report.lock(str(tmp_path / "lock")) == "free"
    assert "No such file" in node_report.lock(gone)


GOOD: dict[str, Any] = {
    "path": "/py", "version": [3, 11], "platform": "linux", "imports": "", "lock": "held", "bytes_per_second": 2e8,
    "free": 10**12, "missing": [], "others": {"seen": ["n1", "n2"], "seconds": 0.1},
}  # fmt: skip


def results(**changes: Any) -> Results:
    """Two good nodes with two good ranks each."""
    import ortflow
    from ortflow.launchers.interpreter import NEEDED
    from ortflow.workflow.system.runtimes import RUNTIMES

    packages = dict.fromkeys((RUNTIMES[0], *NEEDED), "2.0") | {"ortflow": ortflow.__version__}
    good = Results(
        job=Job("7", None, "COMPLETED", nodes="n[1-2]"), nodes=["n1", "n2"], waited=1.0, submitted=100.0,
        collected=110.0, locked=True, seen={"n1": 102.0, "n2": 102.1},
        codes={"n1": 0, "n2": 0, "run_supervisor": 0, "ranks": 0, "scontrol": 0, "sbatch": 0},
        reports={name: {**GOOD, "packages": packages} for name in ("n1", "n2")},
        ranks=[{"size": 4, "cores": 2, "seconds": 0.4, "library": "MPICH 5"} for _ in range(4)],
    )  # fmt: skip
    return replace(good, **changes)


def without(node: str) -> dict[str, Any]:
    good = results()
    return {
        "seen": {name: value for name, value in good.seen.items() if name != node},
        "codes": {name: value for name, value in good.codes.items() if name != node},
        "reports": {name: value for name, value in good.reports.items() if name != node},
        "ranks": [],
    }


def node_with(**changes: Any) -> dict[str, Any]:
    good = results()
    return {"reports": {**good.reports, "n2": {**good.reports["n2"], **changes}}}


def reported(found: Results, world: int = 4, start: Start | None = None, size: int | None = None) -> list[Finding]:
    return list(findings(found, world, start or Start("pmi2", kind="mpich"), "/data", size))


def test_a_good_trial() -> None:
    found = reported(results())
    assert [one for one in found if one.level is not Level.OK and one.about != "NCCL"] == []
    assert (found[-1].level, found[-1].about) == (Level.UNTESTED, "NCCL")
    assert "resources.gpus_per_rank" in found[-1].what
    assert mentions(str(found), "4 ranks … 2 nodes … --mpi=pmi2 … 0.4 s … MPICH 5")


@pytest.mark.parametrize("gate", [False, True])
def test_a_slow_node(gate: bool) -> None:
    """It is a fault only for a run that would refuse it: another job may share the node for a moment."""
    figures = {"nodes": {"n1": {"compute": 30.0}, "n2": {"compute": 9.0}}}
    ranks = [{**rank, "preflight": figures if number == 0 else {}} for number, rank in enumerate(results().ranks)]
    found = findings(results(ranks=ranks), 4, Start("pmi2", kind="mpich"), "/data", None, gate)
    (slow,) = (one for one in found if one.about == "preflight")
    assert slow.level is (Level.FAULT if gate else Level.WARNING)
    assert mentions(slow.what, "n2 computes at 30%")


ALONE = [{"size": 1, "cores": 2, "seconds": 0.1, "library": "MPICH 5"} for _ in range(4)]
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "unseen": (without("n2"), "shared folder", "fault     shared folder: n2 does not see /data"),
    "not a node sees it": ({**without("n1"), "seen": {}, "reports": {}, "job": Job("7", None, "FAILED", code=UNSEEN)},
                           "shared folder", "n1, n2 do not see /data"),
    "no python": ({**without("n2"), "seen": results().seen, "codes": {"n1": 0, "n2": 127},
                   "logs": {"n2": "sh: 1: /py: not found\n"}},
                  "interpreter on the nodes", "n2 cannot run it: /py: not found"),
    "silent": ({**without("n2"), "seen": results().seen}, "interpreter on the nodes", "n2 did not report within"),
    "apart": (node_with(others={"seen": ["n2"], "seconds": 15.0}), "shared folder",
              "n2 does not see what n1 wrote to /data"),
    "slow sight": (node_with(others={"seen": ["n1", "n2"], "seconds": 9.0}), "shared folder", "only after 9.0 s"),
    "no locks": (node_with(lock="Function not implemented"), "locks", "Function not implemented"),
    "local locks": (node_with(lock="free"), "locks", "is not seen on n2"),
    "packages": (node_with(packages={"ortflow": "0"}), "interpreter on the nodes", "n2: /py lacks"),
    "imports": (node_with(imports="ImportError: GLIBC_2.34"), "interpreter on the nodes", "GLIBC_2.34"),
    "input": (node_with(missing=["/in/a.arrow"]), "input", "n2 does not see /in/a.arrow"),
    "clocks": ({"seen": {"n1": 102.0, "n2": 302.0}}, "clocks", "n2 by +192 s or more"),
    "clock of a single node": ({"nodes": ["n1"], "seen": {"n1": 40.0}}, "clocks", "n1 by -60 s or more"),
    "slow disk": (node_with(bytes_per_second=1e6), "disk", "1.0 MB/s to 200 MB/s a node, in parallel; 1.0 TB free"),
    "full disk": (node_with(free=10**9), "disk", "checkpoints may need 2.0 GB"),
    "supervisor": ({"codes": {**results().codes, "run_supervisor": 1}, "logs": {"run_supervisor": "No module x\n"}},
                   "supervisor process", "exit code 1 on n1: No module x"),
    "no scontrol": ({"codes": {**results().codes, "scontrol": 127}, "logs": {"scontrol": "scontrol: not found\n"}},
                    "Slurm on the nodes", "warning   Slurm on the nodes: scontrol does not work on n1"),
    "no Slurm": ({"codes": {**results().codes, "scontrol": 127, "sbatch": 1}}, "Slurm on the nodes",
                 "fault     Slurm on the nodes: neither scontrol nor sbatch"),
    "alone": ({"ranks": ALONE}, "MPI", "each of 4 ranks is alone in a world of 1 with --mpi=pmi2"),
    "hangs": ({"ranks": [], "codes": {**results().codes, "ranks": 124}}, "MPI", "did not connect with --mpi=pmi2"),
    "mpi4py": ({"ranks": [{"error": "RuntimeError: cannot load MPI library"}] * 4}, "MPI", "cannot load MPI library"),
    "some": ({"ranks": [], "codes": {**results().codes, "ranks": 1},
              "logs": {"ranks": "srun: error: n1: task 0: Killed\nsrun: error: Invalid MPI type 'pmix', --mpi=list\n"}},
             "MPI", "this Slurm has no working --mpi=pmix"),
    "prologue": ({"job": Job("7", None, "FAILED", code=3), "seen": {}, "reports": {},
                  "logs": {"job": "module: command not found\n"}}, "job",
                 "exit code 3 (failed): module: command not found; see backends.slurm.prologue"),
    "time limit": ({"job": Job("7", None, "TIMEOUT", nodes="n[1-2]")}, "job", "it ended as TIMEOUT"),
    "no step": ({"seen": {}, "reports": {}, "logs": {"job": "srun: error: Unable to create step for job 7: x\n"}},
                "job", "srun could not start anything on its nodes: srun: error: Unable to create step"),
    "gpus": ({"ranks": [{**rank, "gpus": {"error": "no CUDA driver"}} for rank in results().ranks]}, "NCCL",
             "fault     NCCL: no CUDA driver"),
    "gpus apart": ({"ranks": [{**rank, "gpus": {"sum": 1.0, "nccl": 22803}} for rank in results().ranks]}, "NCCL",
                   "GPUs of 4 ranks"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_trial_with(case: str) -> None:
    changes, about, words = CASES[case]
    bad = [one for one in reported(results(**changes)) if one.level in (Level.WARNING, Level.FAULT)]
    assert [one.about for one in bad] == [about], "one cause is reported once"
    assert words in str(bad[0])


def test_many_nodes_are_not_all_named() -> None:
    assert named(["a", "b"]) == "a, b"
    assert named([f"n{number}" for number in range(9)]) == "n0, n1, n2, n3, n4, n5 and 3 more"


def test_more_of_a_trial() -> None:
    gpus = [{**rank, "gpus": {"sum": 4.0, "nccl": 22803, "count": 1}} for rank in results().ranks]
    assert mentions(str(reported(results(ranks=gpus))[-1]), "4 ranks … GPUs … NCCL 2.28.3")
    (alone,) = [one for one in reported(results(ranks=ALONE), start=Start("pmix", kind="mpich")) if one.about == "MPI"]
    assert says(alone.fix, "… MPICH … backends.slurm.mpi to auto, pmi2 or mpirun")
    (disk,) = [one for one in reported(results(**node_with(free=10**10)), size=10**9) if one.about == "disk"]
    assert "may need 11 GB" in disk.what
    assert disk.data["bytes_per_second"] == {"n1": 2e8, "n2": 2e8}
    assert [one.about for one in reported(results(**without("n2"))) if one.level is Level.UNTESTED] == ["MPI"]
