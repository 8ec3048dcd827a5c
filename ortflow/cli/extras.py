"""Messages for commands that need a package which the plain installation does not include. Pure."""

from __future__ import annotations

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
    "optuna": "tune",
}
"""Import name -> the extra that includes it."""


def needs_extra(module: str) -> UserError | None:
    """The message for a module that cannot be imported; None if no extra of ortflow includes it."""
    name = module.partition(".")[0]
    extra = EXTRAS.get(name)
    if extra is None:
        return None
    return UserError(
        f"this needs {name}, which is not installed", fix=f"install it with `pip install 'ortflow[{extra}]'`"
    )
