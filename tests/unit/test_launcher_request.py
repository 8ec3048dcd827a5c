"""The request: command lines, environments, and which MPI and interpreter are found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from messages import mentions

from ortflow.launchers.base import Submission, find_launcher
from ortflow.launchers.interpreter import Interpreter, check, examine, locate
from ortflow.launchers.local import LocalLauncher
from ortflow.launchers.mpi import find_mpi
from ortflow.manifests.local import Mpi, command, environment, settings
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.run import TrainerRunSpec

RUN = Path("/data/my runs/gpt")


def spec(ranks: int = 2, **sections: Any) -> TrainerRunSpec:
    return TrainerRunSpec.model_validate(
        {
            "name": "gpt",
            "model": {"path": "/m.onnx", "loss": {"kind": "mse"}},
            "data": {"train": {"path": "/d.arrow"}, "micro_batch": 1},
            "train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 0.1}},
            "resources": {"ranks_per_node": ranks},
            **sections,
        }
    )


def test_command_lines() -> None:
    rank = ["/venv/bin/python", "-m", "ortflow.workflow.rank", "/data/my runs/gpt"]
    assert command(spec(1), RUN, "/venv/bin/python", None) == rank
    assert command(spec(), RUN, "/venv/bin/python", Mpi("mpich", "/b/mpirun")) == [
        "/b/mpirun", "-localhost", "127.0.0.1", "-print-all-exitcodes", "-n", "2", *rank,
    ]  # fmt: skip
    more = spec(3, backends={"local": {"arguments": ["--report-bindings"]}})
    assert command(more, RUN, "/venv/bin/python", Mpi("openmpi", "/b/mpirun")) == [
        "/b/mpirun", "--oversubscribe", "--bind-to", "none", "--report-bindings", "-n", "3", *rank,
    ]  # fmt: skip


def test_request_prints_one_shell_line(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    request = LocalLauncher().request(Submission(spec(1), RunDir(run)))
    expected = f"env 'ORTFLOW_RUN_DIR={run}' ORTFLOW_ATTEMPT=0 ORTFLOW_LAUNCHER=local PYTHONUNBUFFERED=1 "
    assert str(request) == f"(cd / && exec {expected}{sys.executable} -m ortflow.workflow.rank '{run}')"
    assert not run.exists()


def test_environment_takes_no_foreign_place_and_keeps_what_the_user_set() -> None:
    own = settings(spec(), RUN, 3, Mpi("openmpi", "mpirun"))
    outer = {
        "PATH": "/bin", "SLURM_PROCID": "4", "PMI_RANK": "1", "OMPI_COMM_WORLD_RANK": "2", "ORTFLOW_ATTEMPT": "9",
        "OMPI_MCA_pml": "cm", "PYTHONPATH": "src::/lib:",
    }  # fmt: skip
    found = environment(own, outer, "/here")
    assert not {"SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"} & set(found)
    assert found["ORTFLOW_ATTEMPT"] == "3"
    assert found["OMPI_MCA_pml"] == "cm"
    assert found["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert found["OMPI_MCA_plm"] == "isolated", "ranks start on a machine without ssh"
    assert found["PYTHONPATH"] == "/here/src:/lib", "an empty entry is the current folder"


def fake_mpirun(folder: Path, name: str, words: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{words}'\n")
    path.chmod(0o755)
    return path


def test_mpi_beside_the_interpreter_wins_and_the_wanted_kind_is_found(tmp_path: Path) -> None:
    beside = fake_mpirun(tmp_path / "venv", "mpirun", "HYDRA build details:")
    system = fake_mpirun(tmp_path / "usr", "mpirun", "mpirun (Open MPI) 4.1.4")
    fake_mpirun(tmp_path / "odd", "mpirun", "something else")
    python, search = str(tmp_path / "venv" / "python"), str(tmp_path / "usr")
    assert find_mpi(python, "auto", search) == Mpi("mpich", str(beside))
    assert find_mpi(python, "openmpi", search) == Mpi("openmpi", str(system))
    assert find_mpi(str(tmp_path / "odd" / "python"), "auto", search) == Mpi("openmpi", str(system))
    assert find_mpi(str(tmp_path / "python"), "auto", str(tmp_path)) is None


def test_several_machines_are_refused() -> None:
    with pytest.raises(UserError, match=r"resources\.nodes.*2.*one machine"):
        LocalLauncher().request(Submission(spec(resources={"nodes": 2}), RunDir(RUN)))


GOOD = {"ortflow": "0.1.0", "onnxruntime-training-cpu": "1.19.2"} | dict.fromkeys(
    ("onnx", "numpy", "pyarrow", "safetensors", "mpi4py"), "1"
)


def interpreter(version: tuple[int, int] = (3, 11), platform: str = "linux", **changes: str | None) -> Interpreter:
    packages = {**GOOD, **{name.replace("_", "-"): version for name, version in changes.items()}}
    return Interpreter("/p", version, platform, {name: version for name, version in packages.items() if version})


def test_a_complete_interpreter_passes() -> None:
    check(interpreter())
    check(interpreter((3, 10)))
    check(interpreter((3, 14), onnxruntime_training_cpu=None, onnxruntime="1.31.1"))
    check(interpreter((3, 12), onnxruntime_training_cpu=None, onnxruntime_gpu="2.0.0rc1"))
    check(examine(sys.executable))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (interpreter(platform="darwin"), "Linux … darwin"),
        (interpreter(onnxruntime="1.20.0"), "onnxruntime and onnxruntime-training-cpu are installed together in /p"),
        (interpreter(onnxruntime_gpu="1.31.1"), "`/p -m pip uninstall -y onnxruntime-training-cpu onnxruntime-gpu`"),
        (interpreter(onnxruntime_training="1.19.2"), "each overwrites files of the other"),
        (interpreter(pyarrow=None, onnxruntime_training_cpu=None), "/p lacks onnxruntime, pyarrow; `/p -m pip"),
        (
            interpreter(onnxruntime_training_cpu=None, onnxruntime="1.9.0"),
            "/p … onnxruntime 1.9.0 … 1.20 or newer … `/p -m pip install --upgrade onnxruntime`",
        ),
        (interpreter(ortflow="0.0.1"), "has ortflow 0.0.1, and this is"),
    ],
)
def test_what_an_interpreter_lacks_is_one_sentence(found: Interpreter, words: str) -> None:
    with pytest.raises(UserError) as raised:
        check(found)
    assert mentions(str(raised.value), words)
    assert "\n" not in str(raised.value)


def test_another_interpreter_is_asked(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert locate(str(link)) == str(link), "a link names a virtual environment"
    found = examine(str(link))
    assert (found.version, found.platform) == (sys.version_info[:2], sys.platform)
    with pytest.raises(UserError, match="there is no interpreter /nowhere"):
        locate("/nowhere")
    with pytest.raises(UserError, match="does not run as a Python interpreter"):
        examine("/bin/true")


def test_launchers_are_found_by_entry_point() -> None:
    assert isinstance(find_launcher("local"), LocalLauncher)
    with pytest.raises(UserError, match="unknown launcher 'lokal'; did you mean local"):
        find_launcher("lokal")
