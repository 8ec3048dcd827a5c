"""Runs a module that has no graph in PyTorch, and its submodules as graphs. Called by `engine`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ortflow.workflow.errors import UserError

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Parts:
    """A module in PyTorch, some of whose submodules are run by `engine_of`."""

    def __init__(
        self,
        module: torch.nn.Module,
        parts: Mapping[str, torch.nn.Module],
        engine_of: Callable[[torch.nn.Module], Run],
        reason: UserError,
    ) -> None:
        self._module = module
        self._runs = {part: engine_of(part) for part in parts.values()}
        graphs = f"; as graphs run {', '.join(parts)}" if parts else ""
        warnings.warn(f"{type(module).__name__} runs in PyTorch: {reason}{graphs}", stacklevel=5)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module."""
        with contextlib.ExitStack() as stack:
            for part, run in self._runs.items():
                stack.enter_context(_replaced(part, run))
            return self._module(*args, **kwargs)


def parts_of(module: torch.nn.Module, prefix: str = "") -> dict[str, torch.nn.Module]:
    """The outermost submodules with a forward and parameters, by name."""
    parts: dict[str, torch.nn.Module] = {}
    for name, part in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            parts |= parts_of(part, f"{path}.")
        elif any(True for _ in part.parameters()):
            parts[path] = part
    return parts


@contextlib.contextmanager
def _replaced(part: torch.nn.Module, run: Run) -> Iterator[None]:
    """Let `run` compute forward inside the block. While it does, the part is as it was, without its hooks."""
    state = vars(part)
    before = {"forward": state["forward"]} if "forward" in state else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        hooks = {name: state[name] for name in _HOOKS}
        state.pop("forward")
        state.update(before)
        # The call that has led here runs them.
        state.update({name: type(hook)() for name, hook in hooks.items()})
        try:
            return run(args, kwargs)
        finally:
            state.update(hooks)
            state["forward"] = forward

    state["forward"] = forward
    try:
        yield
    finally:
        state.pop("forward")
        state.update(before)
