"""What is constant in a graph of a module: modes, attributes, hooks, submodules, tied and trained parameters.

Called by `engine` before each call; a change leads to another graph. What is not seen: global variables, values that
are written to a plain tensor through its `data` or NumPy, and objects that are not plain data.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn.modules import module as modules

from ortflow.torch.attributes import Holders, Same, comparable

_STORES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
          "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")  # fmt: skip
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                 "_global_backward_pre_hooks")  # fmt: skip
_OWN = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that PyTorch gives every module."""


class Watch:
    """The state of a module and its parts, and where its tensors are."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._numbers: dict[Hashable, int] = {}
        self._views: list[Any] = []
        self._objects: list[Any] = []
        self._read()

    def _read(self) -> None:
        parts = list(self._module.named_modules())
        holders: Holders = [getattr(modules, name) for name in _GLOBAL_HOOKS]
        constants: list[torch.Tensor] = []
        hooks = [tuple([Same(hook) for hook in hooks_of_part.values()]) for hooks_of_part in holders]
        state: list[Hashable] = [*hooks]
        classes = set()
        for path, part in parts:
            attributes = vars(part)
            holders.append(attributes)
            holders += [attributes[name] for name in (*_STORES, *_HOOKS)]
            state.append((path, Same(part), Same(type(part)), tuple([(n, Same(c)) for n, c in part._modules.items()])))
            state += [tuple([Same(hook) for hook in attributes[name].values()]) for name in _HOOKS if attributes[name]]
            state += [
                (name, comparable(value, holders, constants)) for name, value in attributes.items() if name not in _OWN
            ]  # fmt: skip
            classes |= {kind for kind in type(part).__mro__ if not kind.__module__.startswith("torch.nn.")}
        for kind in sorted(classes - {object}, key=lambda kind: (kind.__module__, kind.__qualname__, id(kind))):
            holders.append(vars(kind))
            state += [(Same(kind), name, comparable(value, holders, constants)) for name, value in vars(kind).items()]
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        first: dict[int, str] = {}
        for store in ("_parameters", "_buffers"):
            for prefix, part in parts:
                for name, tensor in getattr(part, store).items():
                    path = f"{prefix}.{name}" if prefix else name
                    if tensor is not None and id(tensor) not in first:
                        first[id(tensor)] = path
                        self._places[path] = getattr(part, store), name
                    state.append((path, None if tensor is None else first[id(tensor)]))
        # Not a parameter in a list, as an LSTM has them: each step of an optimizer would need another graph.
        self._constants = list({id(tensor): tensor for tensor in constants if id(tensor) not in first}.values())
        self._views = _views(holders)
        self._objects = list(chain.from_iterable(self._views))
        self._number = self._numbers.setdefault(tuple(state), len(self._numbers))

    def key(self) -> Hashable:
        """Equal keys: the same graph. Reads everything again if an object has been replaced."""
        objects = list(chain.from_iterable(self._views))
        if len(objects) != len(self._objects) or not all(map(operator.is_, objects, self._objects)):
            self._read()
        return (
            self._number,
            tuple([(tensor._version, tensor.data_ptr(), tensor.requires_grad) for tensor in self._constants]),
            tuple(
                [(t.requires_grad, t.shape, t.dtype, t.device) for d, name in self._places.values() for t in (d[name],)]
            ),
        )

    @property
    def constants(self) -> list[torch.Tensor]:
        """Tensors in plain attributes, as of the last key."""
        return self._constants

    def unregistered(self) -> list[str]:
        """Shapes of the constants with a gradient that are not parameters or buffers: a trace ignores it."""
        return [str(tuple(t.shape)) for t in self._constants if t.requires_grad]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers by their first names, as of the last key."""
        return {name: d[key] for name, (d, key) in self._places.items()}

    def attributes(self) -> dict[str, Hashable]:
        """Attributes by name, without objects: transformers completes a model's configuration at its first call."""
        return {
            f"{path}.{name}" if path else name: comparable(value, [], [])
            for path, part in self._module.named_modules()
            for name, value in vars(part).items()
            if name not in _OWN and (isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"))
        }


def _views(holders: Holders) -> list[Any]:
    """Live views of what containers hold; the keys of dicts, too."""
    return [
        view
        for container in holders
        for view in ((container, container.values()) if hasattr(container, "values") else (container,))
    ]
