"""The packages that bring ONNX Runtime. Plain data: everything may import this module."""

from __future__ import annotations

from importlib import metadata

RUNTIMES = (
    *("onnxruntime", "onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime-gpu"),
    *("onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-rocm", "onnxruntime-qnn"),
)
"""Each owns the module `onnxruntime`: one that is installed later overwrites files of another."""
TRAINING = ("onnxruntime-training-cpu", "onnxruntime-training")
OLDEST = (1, 20)
"""Release from which on packages without training serve. Of those with training, 1.19.2 is the last."""


def installed_version(package: str) -> str | None:
    """Version of a package of this interpreter; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_runtime() -> str:
    """Name of the first installed package of ONNX Runtime; `onnxruntime` where none is known, as with a build of one's
    own."""
    return next((name for name in RUNTIMES if installed_version(name) is not None), RUNTIMES[0])
