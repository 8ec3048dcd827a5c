"""`ortflow doctor` as a whole: this machine, a fake cluster, the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forks import run_command
from messages import mentions, says
from run_files import SMALL, spec_of
from slurm_site import CONFIG, NODE, PARTITIONS, PLUGINS

from ortflow.cli.doctor import split
from ortflow.launchers.base import Submission
from ortflow.launchers.doctor.machine import examine_machine, runtime_finding
from ortflow.launchers.file_system import filesystem
from ortflow.launchers.findings import Level, fault, ok, summary, untested, warning
from ortflow.launchers.interpreter import Interpreter
from ortflow.launchers.slurm.doctor import examine_cluster
from ortflow.launchers.slurm.runner import Answer
from ortflow.launchers.slurm.survey import Survey
from ortflow.workflow.run.rundir import RunDir


def test_findings() -> None:
    found = [ok("a", "fine"), warning("b", "so so", "do this"), fault("c", "broken"), fault("d", "broken")]
    assert str(found[1]) == "warning   b: so so; do this"
    assert summary(found) == "2 faults, 1 warning"
    assert summary([*found[:2], untested("x", "y")]) == "no fault, 1 warning, 1 untested"
    assert ok("a", "b", free=3).to_json() == {
        "level": "ok",
        "about": "a",
        "what": "b",
        "fix": None,
        "data": {"free": 3},
    }


def test_a_file_or_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.yaml").touch()
    assert split(["run.yaml", "seed=1"]) == (Path("run.yaml"), ["seed=1"])
    assert split(["seed=1"]) == (None, ["seed=1"])
    assert split(["a=b.yaml"]) == (Path("a=b.yaml"), [])
    assert split([]) == (None, [])


def submission(tmp_path: Path, **sections: Any) -> Submission:
    return Submission(spec_of(**sections), RunDir(tmp_path / "runs/small"), tmp_path)


def test_this_machine(tmp_path: Path) -> None:
    found = {one.about: one for one in examine_machine(submission(tmp_path, resources={"ranks_per_node": 2}))}
    assert found["interpreter"].level is Level.OK
    assert found["MPI"].what.startswith("2 ranks connect with")
    assert found["run directory"].what.startswith(f"{tmp_path} (")
    assert {"cores", "memory"} <= found.keys()
    assert list(tmp_path.iterdir()) == []
    resources = {"nodes": 2, "ranks_per_node": 4096, "memory": "900T", "python": sys.executable}
    asked_too_much = {one.about: one.level for one in examine_machine(submission(tmp_path, resources=resources))}
    assert asked_too_much["resources.nodes"] is Level.FAULT
    assert asked_too_much["cores"] is asked_too_much["memory"] is Level.WARNING


def test_the_runtime_of_the_ranks(tmp_path: Path) -> None:
    found = {one.about: one for one in examine_machine(submission(tmp_path))}
    assert found["ONNX Runtime"].level is Level.OK
    assert "computes what graphs need, checked in" in found["ONNX Runtime"].what


@pytest.mark.parametrize(
    ("expected_text", "code", "level", "what"),
    [
        ('{"fault": "x does not compute", "fix": "take y"}', 0, Level.FAULT, "x does not compute"),
        (
            '{"package": "x", "version": "1", "seconds": 1.0, "settings": "Z", "faults": {"Conv": "an error of 1"}}',
            *(0, Level.WARNING, "x 1 … wrong … Conv (an error of 1)"),
        ),
        ("", 3, Level.FAULT, "3 … broken"),
    ],
)
def test_a_runtime_that_computes_wrongly(
    expected_text: str, code: int, level: Level, what: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{expected_text}'\necho broken >&2\nexit {code}\n")
    python.chmod(0o755)
    found = runtime_finding(Interpreter(str(python), (3, 11), "linux", {}))
    assert found.level is level
    assert mentions(found.what, what)


def test_an_interpreter_that_cannot_run_ranks(tmp_path: Path) -> None:
    python = shutil.which("true")
    resources = {"python": python, "ranks_per_node": 2}
    agreed = replace(submission(tmp_path, resources=resources), overrides=(f"resources.python={python}",))
    found = {one.about: one for one in examine_machine(agreed)}
    assert "does not run as a Python interpreter" in found["interpreter"].what
    assert found["MPI"].level is Level.UNTESTED


PROGRAM = '#!/bin/sh\ntouch {mark}\nexec {python} "$@"\n'
NAMING = {
    "interpreter": "resources: {{ranks_per_node: 2, cpus_per_rank: 1, python: {program}}}",
    "arguments of mpirun": "resources: {{ranks_per_node: 2, cpus_per_rank: 1}}\n"
    "backends: {{local: {{arguments: [-n, '1', {program}, ':']}}}}",
}


@pytest.mark.parametrize("backend", ["local", "slurm"])
@pytest.mark.parametrize("lines", NAMING.values(), ids=NAMING)
def test_no_program_that_only_the_file_names_is_started(tmp_path: Path, lines: str, backend: str) -> None:
    program, mark = tmp_path / "bin" / "python", tmp_path / "mark"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(mark=mark, python=sys.executable))
    (program.parent / "mpirun").write_text(PROGRAM.format(mark=mark, python="true"))
    for one in program.parent.iterdir():
        one.chmod(0o755)
    (tmp_path / "run.yaml").write_text(SMALL + lines.format(program=program) + "\n")
    done = ortflow("-b", backend, "run.yaml", folder=tmp_path)
    assert not mark.exists(), done.stdout
    if backend == "local":
        assert says(done.stdout, "untested … interpreter and MPI … only if you agree"), done.stdout
        if "python" in lines:
            done = ortflow("run.yaml", f"resources.python={program}", folder=tmp_path)
            assert mark.exists(), done.stdout


def test_the_file_system_of_a_folder(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"server:/x {tmp_path} nfs4 rw 0 0\ntmpfs {tmp_path}/a\\040b tmpfs rw 0 0\n/dev/a / ext4 rw 0 0\n"
    )
    assert filesystem(tmp_path / "data", mounts) == "nfs4"
    assert filesystem(tmp_path / "a b" / "c", mounts) == "tmpfs"
    assert filesystem(Path("/"), mounts) == "ext4"
    assert filesystem(Path("/"), tmp_path / "none") == ""


Said = dict[tuple[str, ...], Answer]
FINE = Answer(0, "", "")


def fake(messages: Said, *, without: Sequence[str] = ()) -> Survey:
    """A cluster with these answers, chosen by the longest prefix of the command."""

    def runner(command: Sequence[str], settings: Mapping[str, str | None], seconds: float) -> Answer:
        if command[0] in without:
            raise FileNotFoundError(command[0])
        fitting = [words for words in messages if tuple(command[: len(words)]) == words]
        return messages[max(fitting, key=len)] if fitting else FINE

    return Survey(runner)


CLUSTER: Said = {
    ("sbatch", "--version"): Answer(0, "slurm-wlm 22.05.8\n", ""),
    ("scontrol", "ping"): Answer(0, "Slurmctld(primary) at vm is UP\n", ""),
    ("scontrol", "show", "config"): Answer(0, CONFIG, ""),
    ("scontrol", "show", "partition"): Answer(0, PARTITIONS, ""),
    ("scontrol", "show", "node"): Answer(0, NODE.format(gres="gpu:2", state="IDLE"), ""),
    ("sacctmgr",): Answer(0, "lab||normal\n", ""),
    ("srun", "--mpi=list"): Answer(0, PLUGINS, ""),
    ("srun", "--mpi=pmix"): Answer(1, "", "srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types\n"),
    ("sbatch", "--test-only"): Answer(0, "", "sbatch: Job 5 to start at 2026-11-21T14:29:31 using 2 processors\n"),
}


def test_a_cluster(tmp_path: Path) -> None:
    run = submission(tmp_path, backends={"slurm": {"account": "lab"}}, resources={"ranks_per_node": 2})
    found = list(examine_cluster(run, None, fake(CLUSTER)))
    by_name = {one.about: one for one in found}
    assert [one.about for one in found if one.level is Level.FAULT] == []
    assert by_name["Slurm"].what.startswith("22.05, with sbatch")
    assert says(by_name["srun --mpi"].what, "none, cray_shasta, pmi2, pmix_v4, pmix_v5 load … pmix … cannot be loaded")
    assert says(by_name["sbatch"].what, "… 2026-11-21T14:29:31 … 2 processors")
    assert says(by_name["request"].what, "1 node … 2 cores … fits in main")
    assert found[-1].level is Level.UNTESTED
    assert "--job" in found[-1].fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "without", "about", "words"),
    [
        ({}, ["sbatch", "srun"], "Slurm", "no sbatch, srun on the PATH"),
        ({("scontrol", "ping"): Answer(0, "Slurmctld(primary) at vm is DOWN\n***\n", "")}, [], "controller",
         "does not answer … Slurmctld(primary) at vm is DOWN"),
        ({("squeue",): Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")},
         [], "controller", "does not answer"),
        ({("sbatch", "--version"): Answer(1, "", "sbatch: fatal: Could not establish a configuration source\n")}, [],
         "Slurm", "find no cluster here"),
        ({("sbatch", "--test-only"): Answer(1, "", "sbatch: error: Invalid qos specification\n")}, [], "sbatch",
         "`sacctmgr show assoc"),
    ],
)  # fmt: skip
def test_a_cluster_at_fault(tmp_path: Path, changes: Said, without: list[str], about: str, words: str) -> None:
    found = list(examine_cluster(submission(tmp_path), None, fake({**CLUSTER, **changes}, without=without)))
    (bad,) = [one for one in found if one.level is Level.FAULT]
    assert bad.about == about
    assert mentions(str(bad), words)
    assert found[-1].level is Level.UNTESTED
    assert any(one.about == "interpreter" and one.level is Level.OK for one in found)


def test_a_site_without_accounting_commands(tmp_path: Path) -> None:
    bare = {**CLUSTER, ("scontrol", "show", "config"): Answer(0, CONFIG.replace("/slurmdbd", "/none"), "")}
    found = {one.about: one for one in examine_cluster(submission(tmp_path), None, fake(bare, without=["sacct"]))}
    assert found["Slurm"].what.endswith("; without sacct")
    assert found["accounting"].what.startswith("none: Slurm forgets a job")


def ortflow(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command("doctor", *arguments, folder=folder, environment={**os.environ, **environment}, timeout=120)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SMALL)
    done = ortflow("run.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("no fault")
    done = ortflow("run.yaml", "resources.nodes=2", "--json", folder=tmp_path)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["fault"] is True
    assert [one["about"] for one in report["findings"] if one["level"] == "fault"] == ["resources.nodes"]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "run.yaml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--job"], "error: --job and --nodes … local … -b slurm"),
        (["-b", "slurm", "--nodes", "2"], "error: --nodes … --job … add --job"),
        (["-b", "nope"], "error: … launcher 'nope' … kubernetes, local, slurm"),
        (["gone.yaml"], "gone.yaml"),
        (["run.yaml", "train.lr=nope"], "train.lr"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "run.yaml").write_text(SMALL)
    done = ortflow(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert mentions(done.stderr, words)
    assert "Traceback" not in done.stderr


def test_without_slurm(tmp_path: Path) -> None:
    done = ortflow("-b", "slurm", "--job", folder=tmp_path, PATH="/nowhere")
    assert done.returncode == 1
    assert mentions(done.stdout, "fault     Slurm: … no sbatch, squeue, scontrol, scancel, srun on the PATH")
    assert done.stderr == ""


def test_gpus_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SMALL)
    done = ortflow("run.yaml", "resources.gpus_per_rank=1", "train.steps=no", folder=tmp_path)
    assert (done.returncode, "gpus_per_rank" in done.stderr) == (2, False)
    done = ortflow("run.yaml", "resources.gpus_per_rank=1", folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    (line,) = (line for line in done.stdout.splitlines() if "GPU" in line)
    assert line.startswith("fault     GPU: resources.gpus_per_rank: ")
    assert done.returncode == 1
