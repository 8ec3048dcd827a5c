"""The code that is copied to the host: complete, the same bytes for the same files, and its requirements."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ortflow.launchers.remote.arrival import as_typed, location_text, login_environment, submit_record
from ortflow.launchers.remote.code import Code, own_code, read_requirements, requirements
from ortflow.workflow.kernels import library

if sys.version_info >= (3, 11):
    import tomllib

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_all_packages_are_in_it() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("no tomllib")
    packages = tomllib.loads(PROJECT.read_text())["tool"]["setuptools"]["packages"]
    files = own_code().files
    assert {f"{name.replace('.', '/')}/__init__.py" for name in packages} <= set(files)
    assert {name.split("/")[0] for name in files} == {"ortflow", "ortflow-0.1.0.dist-info"}
    kernels = {path.name for path in Path(library.__file__).parent.glob("*.[ch]")}
    assert {f"ortflow/workflow/kernels/{name}" for name in kernels} <= set(files)
    assert {"gemm.c", "ort.h"} <= kernels
    assert not [name for name in files if "__pycache__" in name or "tests/" in name]


def test_the_archive_is_the_same_for_the_same_files() -> None:
    one, other = Code({"b": b"2", "a/c": b"1"}), Code({"a/c": b"1", "b": b"2"})
    assert one.archive() == other.archive()
    assert one.hash == other.hash
    assert len({one.hash, Code({"b": b"2", "a/c": b"3"}).hash, Code({"b": b"2", "a/d": b"1"}).hash}) == 3
    with tarfile.open(fileobj=io.BytesIO(one.archive())) as archive:
        assert [(member.name, member.mtime, member.uid) for member in archive] == [("a/c", 0, 0), ("b", 0, 0)]


def test_it_runs_by_itself_and_finds_its_launchers(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(own_code().archive())) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # none before CPython 3.11.4
        archive.extractall(tmp_path / "code")
    say = (
        "import ortflow.launchers.base as b; print(b.__file__); "
        "print(type(b.find_launcher('slurm')).__module__, b.find_launcher('local').__class__.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", say], env={**os.environ, "PYTHONPATH": str(tmp_path / "code")}, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    base = tmp_path / "code/ortflow/launchers/base.py"
    assert done.stdout.splitlines() == [str(base), "ortflow.launchers.slurm.launcher LocalLauncher"], done.stderr


def test_requirements() -> None:
    listed = [
        "pydantic<3,>=2.9", "rich>=13.7", "Odd_Name[x]>=1,<2", "submitit==1.5.4; extra == \"slurm\"",
        "onnx>=1.19; extra == 'train'", "tomli>=2; python_version < '3.11'", "bare",
    ]  # fmt: skip
    found = {one.name: (one.low, one.high, one.text) for one in read_requirements(listed, "slurm")}
    assert found == {
        "pydantic": ((2, 9), (3,), "pydantic<3,>=2.9"), "rich": ((13, 7), (), "rich>=13.7"),
        "Odd_Name": ((1,), (2,), "Odd_Name[x]>=1,<2"), "submitit": ((1, 5, 4), (), "submitit==1.5.4"),
        "bare": ((), (), "bare"),
    }  # fmt: skip
    assert {"pydantic", "typer", "submitit"} <= {one.name for one in requirements("slurm")}


def test_how_it_is_recorded_and_printed() -> None:
    assert submit_record({}) == {}
    assert submit_record({"ORTFLOW_CODE": "/home/u/ortflow/code/abc"}) == {"code": "abc"}
    assert (as_typed({}), location_text({})) == ("", "here")
    there = {"ORTFLOW_SEEN_AS": "u@login"}
    assert (as_typed(there), location_text(there)) == ("--host u@login ", "on u@login")
    assert as_typed({"ORTFLOW_SEEN_AS": "a;b"}) == "--host 'a;b' "


def test_the_environment_of_a_login(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\necho Welcome!\nexport FROM_PROFILE="a\nb"\n[ "$1" = -l ] && exec /bin/sh -c "$3"\n')
    shell.chmod(0o755)
    found = login_environment({"SHELL": str(shell)})
    assert found["FROM_PROFILE"] == "a\nb"
    assert "PWD" not in found
    assert login_environment({"SHELL": "/no/such/shell"}) == {}
    assert login_environment({"SHELL": "/bin/false"}) == {}
