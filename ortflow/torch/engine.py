"""The calls of one module: which graph each of them needs. Called by `module` and `fallback`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ortflow.torch.refusals import check_call, check_module
from ortflow.torch.settings import Settings
from ortflow.torch.structure import constants_key, described, flat
from ortflow.torch.structures import Structure, structure_of
from ortflow.torch.watch import Watch

MANY = 8
"""Graphs of a module after which a warning says why there are so many."""


class Engine:
    """Runs a module's calls as graphs."""

    def __init__(self, module: torch.nn.Module, settings: Settings) -> None:
        self.module, self.settings = module, settings
        self._watch = Watch(module)
        self._structures: dict[Any, list[Structure]] = {}
        self.count = 0
        """Number of graphs."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns. Raises UserError if the call cannot be run as a graph."""
        call = flat((args, kwargs), f"a call of {type(self.module).__name__}")
        watched = self._watch.key()
        tensors = self._watch.tensors()
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (*call.tensors, *tensors.values()))
        key = (
            watched,
            call.spec,
            constants_key(call),
            tuple([described(tensor) for tensor in call.tensors]),
            trains,
            _autocast(call.tensors, tensors),
            torch.get_default_dtype(),
        )
        shapes = tuple([tuple(tensor.shape) for tensor in call.tensors])
        known = self._structures.setdefault(key, [])
        structure = next((each for each in known if each.sizes.fit(shapes)), None)
        if structure is None:
            check_module(self.module)
            check_call(self.module, call.tensors, tensors)
            before, after = self._watch.attributes(), []
            with _plain():
                structure = structure_of(
                    self.module, call, tensors, self.settings, lambda: after.append(self._watch.attributes()),
                    trains=trains,
                )  # fmt: skip
            changed = self._watch.ignore(before, after[0]) if after else []
            if changed:
                warnings.warn(
                    f"forward changes the attribute {changed[0]!r}, and graphs do not: it stays as it was; make it a"
                    " buffer (register_buffer) if forward reads it",
                    stacklevel=4,
                )
                key = (self._watch.key(), *key[1:])
                known = self._structures.setdefault(key, [])
            known.append(structure)
            self.count += 1
            if self.count == MANY:
                warnings.warn(
                    f"{type(self.module).__name__} has been exported {MANY} times: each new mode, Python number, type"
                    " or fixed size of its arguments needs a graph of its own; give numbers that vary as tensors",
                    stacklevel=4,
                )
        return structure.run(call.tensors, tensors)


def _autocast(given: tuple[torch.Tensor, ...], tensors: Any) -> tuple[bool, torch.dtype | None]:
    kind = next((tensor.device.type for tensor in (*given, *tensors.values())), "cpu")
    enabled = torch.is_autocast_enabled(kind)
    return enabled, torch.get_autocast_dtype(kind) if enabled else None


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """The modes in which graphs are made, whatever those of the call."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
