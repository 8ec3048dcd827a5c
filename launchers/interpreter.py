"""Whether an interpreter can run ranks: looked at before anything is started, so that a gap is one sentence.

Looks at names and versions of installed packages only: nothing heavy is imported, here or there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

import ortflow
from ortflow.workflow.errors import UserError

TRAINING = ("onnxruntime-training", "onnxruntime-training-cpu")
OTHERS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino")
"""Own the same module as the training package: the one installed last has overwritten parts of the other."""
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
    """A Python, and which of the packages that ranks need or must not have are installed for it."""

    path: str
    version: tuple[int, int]
    platform: str
    packages: dict[str, str]


def locate(python: str | None) -> str:
    """The ranks' interpreter as an absolute path (links kept: they name a virtual environment)."""
    if python is None:
        return sys.executable
    expanded = os.path.expanduser(python)
    found = shutil.which(expanded)
    if found is None:
        raise UserError(f"there is no interpreter {python}", where="resources.python", fix="give the path of a python")
    return os.path.abspath(found)


def examine(path: str) -> Interpreter:
    """What is installed for the interpreter; raises UserError where it does not run."""
    names = (*TRAINING, *OTHERS, *NEEDED)
    if path == sys.executable:
        packages = {name: version for name in names if (version := _version(name)) is not None}
        return Interpreter(path, sys.version_info[:2], sys.platform, {**packages, "ortflow": ortflow.__version__})
    try:
        told = subprocess.run([path, "-c", _ASK, *names], capture_output=True, text=True, timeout=60, cwd="/")
        answer = json.loads(told.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise UserError(
            f"{path} does not run as a Python interpreter", where="resources.python", fix="give the path of a python"
        ) from error
    major, minor = answer["version"]
    return Interpreter(path, (major, minor), answer["platform"], answer["packages"])


def check(python: Interpreter) -> None:
    """Raise UserError where the interpreter cannot run ranks. Pure."""
    version = ".".join(map(str, python.version))
    if python.platform != "linux":
        raise UserError(
            f"ranks need onnxruntime-training, which exists for Linux only, and this is {python.platform}",
            fix="run on a Linux machine or in a Linux container",
        )
    training = [name for name in TRAINING if name in python.packages]
    if not training and python.version not in ((3, 10), (3, 11)):
        raise UserError(
            "ranks need onnxruntime-training, which exists for CPython 3.10 and 3.11 only, "
            f"and {python.path} is {version}",
            fix=f"make an environment with one of those, `{INSTALL}` in it, and give its python as resources.python",
        )
    clashing = [name for name in OTHERS if name in python.packages]
    if training and (clashing or len(training) > 1):
        several = " and ".join([*clashing, *training])
        remedy = f"{python.path} -m pip uninstall -y {' '.join([*clashing, *training])}"
        raise UserError(
            f"{several} are installed together in {python.path}, and each overwrites the module of the other",
            fix=f"`{remedy}`, then `{python.path} -m {INSTALL}`",
        )
    missing = [name for name in ("ortflow", *NEEDED) if name not in python.packages]
    if not training:
        missing.insert(0, TRAINING[0])
    if missing:
        raise UserError(f"{python.path} lacks {', '.join(missing)}", fix=f"`{python.path} -m {INSTALL}`")
    if python.packages["ortflow"] != ortflow.__version__:
        raise UserError(
            f"{python.path} has ortflow {python.packages['ortflow']}, and this is {ortflow.__version__}",
            fix="install the same version in both",
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
