"""The class weights of a loss: from the run file, or from a file that it names. Called by `by_class`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ortflow.workflow.errors import UserError


def weights_of(setting: Sequence[float] | str | None, classes: int | None, location: str) -> npt.NDArray[np.float32]:
    """The weights, fp32 [classes]. Raises UserError if they do not fit the classes, or are negative or not finite."""
    source = f"{setting}: " if isinstance(setting, str) else ""
    values = _read(Path(setting), location) if isinstance(setting, str) else np.asarray(setting, np.float64)
    if classes is None:
        raise UserError(
            "needs the number of classes, and the output's axis of the classes has no fixed length",
            where=location,
            fix="export the model with the number of classes as a number",
        )
    if values.shape != (classes,):
        raise UserError(
            f"{source}has {values.size} weights, and the output has {classes} classes",
            where=location,
            fix="give one for each class",
        )
    if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
        raise UserError(
            f"{source}the weights must be finite numbers from 0 on, and one of them above 0",
            where=location,
            fix="correct them",
        )
    return values.astype(np.float32)


def _read(path: Path, location: str) -> npt.NDArray[np.float64]:
    try:
        values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except (OSError, ValueError) as error:
        fix = "give a .npy file, or text with one number a line"
        raise UserError(f"{path} has no weights ({error})", where=location, fix=fix) from error
    return np.asarray(values, np.float64)
