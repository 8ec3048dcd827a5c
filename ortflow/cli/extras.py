"""What is missing where a verb needs a part that the plain install leaves out. Pure."""

from __future__ import annotations

import sys

from ortflow.workflow.errors import UserError

EXTRAS = {
    "numpy": "train",
    "onnx": "train",
    "onnxruntime": "train",
    "mpi4py": "train",
    "pyarrow": "train",
    "safetensors": "train",
    "tensorboardX": "train",
    "submitit": "slurm",
    "kubernetes": "kubernetes",
}
"""Import name -> the extra that brings it."""
PYTHONS = ((3, 10), (3, 11))
"""CPythons that onnxruntime-training exists for, on Linux."""


def needs_extra(
    module: str, version: tuple[int, int] = sys.version_info[:2], platform: str = sys.platform
) -> UserError | None:
    """The sentence for a module that cannot be imported; None if no extra of ortflow brings it."""
    name = module.partition(".")[0]
    extra = EXTRAS.get(name)
    if extra is None:
        return None
    command = f"`pip install 'ortflow[{extra}]'`"
    if name != "onnxruntime" or (version in PYTHONS and platform == "linux"):
        return UserError(f"this needs {name}, which is not installed", fix=f"install it with {command}")
    return UserError(
        f"this needs onnxruntime-training, which exists for CPython 3.10 and 3.11 on Linux only, and this is "
        f"{version[0]}.{version[1]} on {platform}",
        fix=f"run it with one of those, after {command} there",
    )
