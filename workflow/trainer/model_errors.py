"""Errors about the model, as the user wrote it in the run file."""

from __future__ import annotations

from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.run import TrainerRunSpec


def about_model(error: UserError, spec: TrainerRunSpec) -> UserError:
    """Add to an error about the model both the key of the run file and the file. Pure."""
    if isinstance(error, Faults):
        return Faults([about_model(fault, spec) for fault in error.faults])
    model = spec.onnx_model
    files = {"model.path": model.path}
    files |= {f"model.graphs.{key}": path for key, path in model.graphs.model_dump().items() if path}
    keys = {path: key for key, path in reversed(files.items())}
    if error.where in ("model.start_from.path", "model.start_from.step"):
        return error
    if str(error.where).startswith("model.start_from"):
        start = model.start_from.path if model.start_from is not None else ""
        return UserError(f"{start}: {error.what}", where=error.where, fix=error.fix)
    key = keys.get(error.where or "", "model.path" if error.where in (None, "model") else error.where)
    if key == "run_dir":
        return error
    return UserError(f"{files.get(str(key), model.path)}: {error.what}", where=key, fix=error.fix)
