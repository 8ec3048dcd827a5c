"""Whether an interpreter can run ranks. Checked before anything is started, so that the error is one sentence.

Reads only names and versions of installed packages: no heavy package is imported in either interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import ortflow
from ortflow.workflow.errors import UserError, check_signal
from ortflow.workflow.system.runtimes import OLDEST, RUNTIMES, TRAINING, installed_version

NEEDED = ("onnx", "numpy", "pyarrow", "safetensors", "mpi4py")
INSTALL = "pip install 'ortflow[train,mpich]'"

_ASK = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try: found[name] = metadata.version(name)
    except metadata.PackageNotFoundError: pass
try:
    import ortflow
    found["ortflow"] = ortflow.__version__
except ImportError: pass
print(json.dumps({"version": sys.version_info[:2], "platform": sys.platform, "packages": found}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter, and its installed packages among those that ranks need or must not have."""

    path: str
    version: tuple[int, int]
    platform: str
    packages: dict[str, str]


def locate(python: str | None) -> str:
    """The ranks' interpreter as an absolute path (links kept: they identify a virtual environment)."""
    if python is None:
        return sys.executable
    expanded = os.path.expanduser(python)
    path = shutil.which(expanded)
    if path is None:
        raise UserError(f"there is no interpreter {python}", where="resources.python", fix="give the path of a python")
    return os.path.abspath(path)


def examine(path: str) -> Interpreter:
    """Return what is installed for the interpreter. Raises UserError if it does not run."""
    names = (*RUNTIMES, *NEEDED)
    if path == sys.executable:
        packages = {name: version for name in names if (version := installed_version(name)) is not None}
        return Interpreter(path, sys.version_info[:2], sys.platform, {**packages, "ortflow": ortflow.__version__})
    try:
        # In /, because `-c` searches the current folder before Python's library (`start_folder`).
        result = subprocess.run([path, "-c", _ASK, *names], capture_output=True, text=True, timeout=60, cwd="/")
        check_signal(result.returncode, path)
        answer = json.loads(result.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} does not run as a Python interpreter", where="resources.python", fix="give the path of a python"
        ) from error
    major, minor = answer["version"]
    return Interpreter(path, (major, minor), answer["platform"], answer["packages"])


def check(python: Interpreter, *, program: bool = False) -> None:
    """Raise UserError if the interpreter cannot run ranks; those of a `program` need ortflow alone. Pure."""
    if program:
        _check_version(python)
        return
    if python.platform != "linux":
        raise UserError(
            f"ranks run on Linux only, and this is {python.platform}",
            fix="run on a Linux machine or in a Linux container",
        )
    runtimes = [name for name in RUNTIMES if name in python.packages]
    if len(runtimes) > 1:
        remedy = f"{python.path} -m pip uninstall -y {' '.join(runtimes)}"
        raise UserError(
            f"{' and '.join(runtimes)} are installed together in {python.path}, and each overwrites files of the other",
            fix=f"`{remedy}`, then `{python.path} -m {INSTALL}`",
        )
    missing = [name for name in ("ortflow", *NEEDED) if name not in python.packages]
    if not runtimes:
        missing.insert(0, RUNTIMES[0])
    if missing:
        raise UserError(f"{python.path} lacks {', '.join(missing)}", fix=f"`{python.path} -m {INSTALL}`")
    (runtime,) = runtimes
    if runtime not in TRAINING and _release(python.packages[runtime]) < OLDEST:
        raise UserError(
            f"{python.path} has {runtime} {python.packages[runtime]}, and ranks need {'.'.join(map(str, OLDEST))} "
            "or newer",
            fix=f"`{python.path} -m pip install --upgrade {runtime}`",
        )
    _check_version(python)


def _check_version(python: Interpreter) -> None:
    if "ortflow" not in python.packages:
        raise UserError(f"{python.path} lacks ortflow", fix=f"`{python.path} -m pip install ortflow`")
    if python.packages["ortflow"] != ortflow.__version__:
        raise UserError(
            f"{python.path} has ortflow {python.packages['ortflow']}, and this is {ortflow.__version__}",
            fix="install the same version in both",
        )


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: (1, 20) of "1.20.0rc1"."""
    return tuple(int(number) for number in version.split(".")[:2] if number.isdigit())


def interpreter_line(python: Interpreter) -> str:
    """Describe an interpreter that can run ranks, in one line."""
    names = [name for name in (*RUNTIMES, *NEEDED) if name in python.packages]
    versions = ", ".join(f"{name} {python.packages[name]}" for name in names)
    return f"{python.path}: CPython {'.'.join(map(str, python.version))}, ortflow {ortflow.__version__}, {versions}"
