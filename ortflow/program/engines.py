"""DeepSpeed engines (ZeRO) at level 2: their own functions save and load their state, in the checkpoint's folder.

    step-00000040/
      NAME/             written by engine.save_checkpoint, of the engine registered as NAME

An engine has model, optimizer, schedule and loss scale. Each rank has its part of them, for its number of ranks alone.
Nothing here imports DeepSpeed. What is said of it is as in DeepSpeed 0.19.8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ortflow.program.errors import ProgramError


def is_engine(value: Any) -> bool:
    """Whether a value is a DeepSpeed engine, also one of a pipeline."""
    return _is_of_deepspeed(value, "DeepSpeedEngine")


def _is_of_deepspeed(value: Any, name: str) -> bool:
    kinds = type(value).__mro__
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == "deepspeed" for kind in kinds)


def split(objects: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the engines, and the other objects."""
    engines = {name: value for name, value in objects.items() if is_engine(value)}
    return engines, {name: value for name, value in objects.items() if name not in engines}


def check(objects: dict[str, Any], level_one: str) -> None:
    """Raise ProgramError for an engine or a part of one that `start` cannot save; `level_one` says what to do."""
    engines, other_objects = split(objects)
    for name, engine in engines.items():
        if _is_of_deepspeed(engine, "PipelineEngine"):
            raise ProgramError(
                f"start({name}=…): a pipeline of DeepSpeed takes micro-batches by itself, not by run.steps; {level_one}"
            )
    parts = {id(part) for engine in engines.values() for part in _parts(engine)}
    for name, value in other_objects.items():
        if id(value) in parts or _is_divided(value):
            raise ProgramError(
                f"start({name}=…): {type(value).__name__} is a part of a DeepSpeed engine, which saves it: register "
                "the engine alone, which deepspeed.initialize returns"
            )


def _parts(engine: Any) -> list[Any]:
    names = ("module", "optimizer", "basic_optimizer", "client_optimizer")
    return [part for name in names if (part := getattr(engine, name, None)) is not None]


def _is_divided(value: Any) -> bool:
    """Whether a value is ZeRO's optimizer, or a model whose parameters ZeRO's stage 3 has divided."""
    kind = type(value)
    if kind.__module__.partition(".")[0] == "deepspeed" and hasattr(value, "param_groups"):
        return True
    parameters = getattr(value, "parameters", None)
    return callable(parameters) and any(hasattr(parameter, "ds_tensor") for parameter in parameters())


def is_between_updates(engine: Any) -> bool:
    """Whether no gradients are accumulated: a checkpoint has none."""
    return bool(engine.micro_steps % engine.gradient_accumulation_steps() == 0)


def identity(engine: Any) -> dict[str, Any]:
    """What a checkpoint must have in common with the engine that loads it."""
    return {"ZeRO stage": engine.zero_optimization_stage(), "parameters": _count(engine)}


def _count(engine: Any) -> int:
    """Numbers in the whole model; `ds_numel` where this rank has a part of a parameter."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())


def save(folder: Path, name: str, engine: Any) -> None:
    """Write this rank's part. A collective call."""
    engine.save_checkpoint(str(folder), tag=name, save_latest=False)


def load(folder: Path, name: str, engine: Any, saved: dict[str, Any]) -> None:
    """Set the engine's state. A collective call. Raises ProgramError if it does not fit."""
    wrong = [f"{key} {saved[key]}, not {value}" for key, value in identity(engine).items() if saved[key] != value]
    if wrong:
        raise ProgramError(f"start({name}=…): the checkpoint is of another engine: it has {' and '.join(wrong)}")
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=name)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ProgramError(f"start({name}=…): the checkpoint's state does not fit the engine: {error}") from error
    if path is None:
        raise ProgramError(f"start({name}=…): DeepSpeed finds no state of the engine in {folder / name}")
