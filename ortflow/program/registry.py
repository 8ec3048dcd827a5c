"""The objects whose state a run saves: what their state is, and how it is set."""

from __future__ import annotations

import gc
import sys
from typing import Any

from ortflow.program import engines
from ortflow.program.errors import ProgramError
from ortflow.program.random_states import Generator, is_generator
from ortflow.program.trees import TensorPlace, leaves

SCALER = "gradient scaler"
"""Name of one that the program has not registered."""
LEVEL_ONE = "save it with run.commit and its own function instead (level 1 in docs/programs.md)"


def checked(objects: dict[str, Any]) -> dict[str, Any]:
    """Return the objects, with generators adapted. Raises ProgramError for one whose state cannot be saved here."""
    engines.check(objects, LEVEL_ONE)
    return {name: _checked(name, value) for name, value in objects.items()}


def _checked(name: str, value: Any) -> Any:
    kind = "FullyShardedDataParallel"
    if is_module(value) and any(type(part).__name__ == kind for part in value.modules()):
        raise ProgramError(
            f"start({name}=…): the state of {kind} (FSDP1) is not one that start() can save; wrap the model with "
            f"fully_shard (FSDP2), or {LEVEL_ONE}"
        )
    if is_generator(value):
        return Generator(value)
    if not callable(getattr(value, "state_dict", None)) or not callable(getattr(value, "load_state_dict", None)):
        raise ProgramError(
            f"start({name}=…): {type(value).__name__} has no state_dict and load_state_dict, and is not a generator"
        )
    return value


def is_module(value: Any) -> bool:
    """Whether a value is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """Whether a value is a torch optimizer."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def parameters(optimizer: Any) -> list[Any]:
    """An optimizer's parameters, in the order of the numbers in its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state(value: Any) -> Any:
    """Return an object's state; a module's without the prefixes of DDP and torch.compile."""
    if is_module(value):
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(value))
    return value.state_dict()


def set_state(name: str, value: Any, tree: Any) -> None:
    """Set an object's state. Raises ProgramError if it does not fit."""
    try:
        if is_module(value):
            from torch.distributed.checkpoint.state_dict import set_model_state_dict

            set_model_state_dict(value, tree)
        else:
            value.load_state_dict(tree)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProgramError(
            f"start({name}=…): the checkpoint's state does not fit {type(value).__name__}: {error}"
        ) from error


def check_module(name: str, value: Any, tree: dict[str, Any]) -> None:
    """Raise ProgramError if the tensors of a checkpoint are not those of a module."""
    now = {key: tuple(leaf.shape) for key, leaf in state(value).items() if hasattr(leaf, "shape")}
    then = {key: leaf.shape for key, leaf in tree.items() if isinstance(leaf, TensorPlace)}
    for wrong, says in (
        (sorted(set(now) - set(then)), "has no {}"),
        (sorted(set(then) - set(now)), "has {}, which the module has not"),
        (sorted(key for key in set(now) & set(then) if now[key] != then[key]), "has another shape of {}"),
    ):
        if wrong:
            names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            raise ProgramError(f"start({name}=…): the checkpoint is of another model: it {says.format(names)}")


def check_optimizer(name: str, value: Any, tree: dict[str, Any]) -> None:
    """Raise ProgramError if the parameters of an optimizer are others than those of a checkpoint."""
    now, then = len(parameters(value)), sum(len(group["params"]) for group in tree["param_groups"])
    if now != then:
        raise ProgramError(
            f"start({name}=…): the checkpoint is of another optimizer: it has {then} parameters, this one has {now}"
        )


def tensors_of(value: Any) -> dict[str, Any]:
    """The tensors that an object has now, by path, after which those of a checkpoint are made."""
    return {path: leaf for path, leaf in leaves(state(value)) if hasattr(leaf, "device") and hasattr(leaf, "shape")}


def living_scalers() -> list[Any]:
    """Return the torch gradient scalers of the process that are in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    kind = torch.amp.GradScaler
    # By type(): isinstance() asks proxies for their class, and some raise an error.
    return [value for value in gc.get_objects() if issubclass(type(value), kind) and value.is_enabled()]
