"""`ORTModule`: a PyTorch module whose forward and backward pass are graphs that ONNX Runtime runs."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch

from ortflow.torch.engine import Engine
from ortflow.torch.settings import DebugOptions, settings
from ortflow.workflow.errors import UserError


class ORTModule(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A module with the parameters, buffers and submodules of `module`, and the same results.

    At the first call, and again for each new structure of the arguments, the module is exported and differentiated, and
    the first step is compared with the module's own (see `verify`). All later calls run the graphs.

    Parameters
    ----------
    module
        The module. It is not copied: its parameters, buffers and submodules are those of the ORTModule.
    debug_options
        Log level, and whether graphs are written to files.
    verify
        Compare outputs and gradients of each new structure with those of `module`; True by default.
    fallback
        What to do with a module that cannot be exported or differentiated: `"error"` (default) raises a UserError;
        `"submodule"` leaves it to PyTorch, and runs its submodules as graphs.
    memory_level
        0 keeps activations; 1 and 2 recompute those of each layer in the backward pass.
    cache
        Folder for graphs that later processes use.
    cuda_graphs
        Whether the passes of a training step are captured as CUDA graphs on a GPU, which then hold their memory.

    Raises
    ------
    UserError
        If `module` cannot be wrapped.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        debug_options: DebugOptions | None = None,
        *,
        verify: bool | None = None,
        fallback: str | None = None,
        memory_level: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        _check(module)
        super().__init__()
        module_settings = settings(
            debug_options,
            verify=verify,
            fallback=fallback,
            memory_level=memory_level,
            cache=cache,
            cuda_graphs=cuda_graphs,
        )
        # Not in `_modules`: names stay as they are.
        object.__setattr__(self, "_wrapped", module)
        object.__setattr__(self, "_settings", module_settings)
        self._share()
        self.training = module.training

    def _share(self) -> None:
        module = self._wrapped
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(module, name))
        engine = Engine(module, self._settings)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return engine(args, kwargs)

        object.__setattr__(self, "_engine", engine)
        if type(self).forward is ORTModule.forward:
            # transformers' Trainer gives a model the columns and keywords that the signature of its forward names.
            forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
            object.__setattr__(self, "forward", forward)

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module; calling it runs PyTorch's own code."""
        wrapped: torch.nn.Module = self._wrapped
        return wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._engine(args, kwargs)

    def train(self, mode: bool = True) -> ORTModule:
        """Set the mode of this and of the wrapped module."""
        super().train(mode)
        self._wrapped.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = vars(self).get("_wrapped")
            if wrapped is None:
                raise
            return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self._wrapped.training = value
        if self._is_of_wrapped(name):
            setattr(self._wrapped, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_of_wrapped(name):
            delattr(self._wrapped, name)
        else:
            super().__delattr__(name)

    def _is_of_wrapped(self, name: str) -> bool:
        """Whether an attribute is one that forward reads."""
        wrapped = vars(self).get("_wrapped")
        if wrapped is None or name in vars(self) or hasattr(type(self), name):
            return False
        return not name.startswith("_") or hasattr(wrapped, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_engine", "forward")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()


def _check(module: Any) -> None:
    if isinstance(module, ORTModule):
        raise UserError("the module is an ORTModule already", fix="wrap it once")
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"ORTModule wraps a torch.nn.Module, and was given a {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError("ORTModule cannot wrap a ScriptModule", fix="wrap the module that it was scripted from")
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    if isinstance(module, parallel):
        name = type(module).__name__
        raise UserError(f"ORTModule cannot wrap {name}", fix=f"wrap the module first: {name}(ORTModule(module))")
