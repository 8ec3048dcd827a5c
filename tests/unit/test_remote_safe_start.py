"""What runs on a login node imports nothing from the folder of the login, with every CPython that is installed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ortflow.launchers.remote.command_lines import pack, python_line

VERSIONS = sorted(Path.home().glob(".pyenv/versions/3.1[0-9].*/bin/python"))
SOURCE = "import json, runpy, tarfile, os; print(sorted(sys.path)[:1], os.environ.get('PYTHONSAFEPATH'), sys.argv[2])"


@pytest.mark.parametrize("python", [sys.executable, *map(str, VERSIONS)])
def test_a_login_imports_nothing_from_its_folder(python: str, tmp_path: Path) -> None:
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current folder was run')\n")
    done = subprocess.run(
        ["sh", "-c", python_line(python, SOURCE, ["wish"])], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    path, safe, wish = done.stdout.rsplit(maxsplit=2)
    assert "''" not in path
    assert safe == "None", "programs that the command starts must not inherit it"
    assert wish == pack(["wish"])
