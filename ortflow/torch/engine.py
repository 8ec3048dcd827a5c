"""The calls of one module: which graph each of them needs. Called by `module`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from ortflow.torch.fallback import Parts, parts_of
from ortflow.torch.refusals import FunctionCalled, check_call, check_constants, check_module
from ortflow.torch.runtime import place_of
from ortflow.torch.settings import Settings
from ortflow.torch.structure import Flat, constants_key, described, flat
from ortflow.torch.structures import Structure, structure_of
from ortflow.torch.watch import Watch
from ortflow.workflow.errors import UserError

MANY = 8
"""Graphs of a module after which a warning says why there are so many."""


class Engine:
    """Runs a module's calls as graphs."""

    def __init__(self, module: torch.nn.Module, settings: Settings, *, is_part: bool = False) -> None:
        self.module, self.settings, self._is_part = module, settings, is_part
        self._watch = Watch(module)
        self._structures: dict[Hashable, list[Structure]] = {}
        self._parts: Parts | None = None
        self.count = 0
        """Number of structures."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns. Raises UserError if the call cannot be run as a graph."""
        if self._parts is not None:
            return self._parts(args, kwargs)
        try:
            call = flat((args, kwargs), f"a call of {type(self.module).__name__}")
            watched = self._watch.key()
            tensors = self._watch.tensors()
            structure = self._structure(call, watched, tensors)
        except UserError as error:
            parts = parts_of(self.module)
            calls_function = isinstance(error, FunctionCalled) and (self._is_part or parts)
            if self.settings.fallback != "submodule" and not calls_function:
                raise
            self._parts = Parts(self.module, parts, lambda part: Engine(part, self.settings, is_part=True), error)
            return self._parts(args, kwargs)
        return structure.run(call.tensors, tensors)

    def _structure(self, call: Flat, watched: Hashable, tensors: Mapping[str, torch.Tensor]) -> Structure:
        trains = torch.is_grad_enabled() and any(
            t.requires_grad for t in (*call.tensors, *tensors.values(), *self._watch.constants)
        )
        place = place_of((*tensors.values(), *call.tensors))
        key = (
            call.spec,
            constants_key(call),
            tuple([described(tensor) for tensor in call.tensors]),
            trains,
            place,
            torch.get_default_dtype(),
        )
        shapes = tuple([tuple(tensor.shape) for tensor in call.tensors])
        for structure in self._structures.get((watched, key), ()):
            if structure.sizes.fit(shapes):
                return structure
        check_module(self.module)
        if trains:
            check_constants(self._watch.unregistered())
        check_call(self.module, call.tensors, tensors)
        before, after = self._watch.attributes(), list[Any]()
        with _plain():
            new_structure = structure_of(
                self.module, call, tensors, self.settings, lambda _: after.append(self._watch.attributes()),
                place=place, trains=trains,
            )  # fmt: skip
        changed = [name for name, value in after[0].items() if before.get(name) != value] if after else []
        if changed:
            warnings.warn(
                f"forward changes the attribute {changed[0]!r}, and graphs do not: it stays as it was; make it a buffer"
                " (register_buffer) if forward reads it",
                stacklevel=6,
            )
        self._structures.setdefault((self._watch.key(), key), []).append(new_structure)
        self.count += 1
        if self.count == MANY:
            warnings.warn(
                f"{type(self.module).__name__} has been exported {MANY} times: each new mode, Python number, type or"
                " fixed size of its arguments needs a graph of its own; give numbers that vary as tensors",
                stacklevel=6,
            )
        return new_structure


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """The modes in which graphs are made, whatever those of the call.

    Activation checkpointing counts the tensors that autograd saves, and must not see those of the comparison with
    PyTorch, which is not repeated when it computes a module again.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False), hooks:
        yield
