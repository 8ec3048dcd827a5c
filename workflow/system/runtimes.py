"""The packages that provide ONNX Runtime. Plain data: every module may import this one."""

from __future__ import annotations

from importlib import metadata

RUNTIMES = (
    *("onnxruntime", "onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime-gpu"),
    *("onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-rocm", "onnxruntime-qnn"),
)
"""All provide the module `onnxruntime`: installing a second one overwrites files of the first."""
TRAINING = ("onnxruntime-training-cpu", "onnxruntime-training")
OLDEST = (1, 20)
"""Oldest supported release of packages without training. Of those with training, 1.19.2 is the last."""


def installed_version(package: str) -> str | None:
    """Version of a package in this interpreter; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_runtime() -> str:
    """Name of the first installed package of ONNX Runtime; `onnxruntime` if none is known, as for a custom build."""
    return next((name for name in RUNTIMES if installed_version(name) is not None), RUNTIMES[0])
