"""A process that starts in `/` returns to the folder from which it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortflow.launchers.start_folder import ROOT, leaving

PROGRAM = "import os\nfrom ortflow.launchers.start_folder import go_back\ngo_back()\nprint(os.getcwd())"


@pytest.mark.parametrize("by_shell", [False, True])
def test_back_to_the_folder(tmp_path: Path, by_shell: bool) -> None:
    python = [sys.executable, "-c", PROGRAM]
    if by_shell:  # as a batch script does
        command, folder, variables = ["bash", "-c", 'cd /; exec "$@"', "bash", *python], tmp_path, dict(os.environ)
    else:
        command, folder, variables = python, Path(ROOT), leaving(str(tmp_path), os.environ)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}\n"


def test_a_process_that_started_elsewhere_stays(tmp_path: Path) -> None:
    """Its OLDPWD is that of a shell."""
    variables = {**os.environ, "OLDPWD": "/usr"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{tmp_path}\n"


def test_python_path_is_made_absolute() -> None:
    assert leaving("/here", {"PYTHONPATH": "src::/lib"}) == {"PYTHONPATH": "/here/src:/lib", "OLDPWD": "/here"}
