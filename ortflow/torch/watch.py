"""What a graph of a module takes for fixed: modes, plain attributes, submodules, which parameters are trained.

Called by `engine` before each call; a change leads to another graph. Attributes of other types (a configuration, a
list) are read once, when the module is traced.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

_SIMPLE = (bool, int, float, str, type(None))


class Watch:
    """The state of a module and its parts, and where its tensors are."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._ignored: set[tuple[int, str]] = set()
        self._read()

    def _read(self) -> None:
        parts = list(self._module.modules())
        self._children = [(p._modules, name, child) for p in parts for name, child in p._modules.items()]
        self._counts = [(d, len(d)) for p in parts for d in (p._modules, p._parameters, p._buffers)]
        attributes = [(part, name, value) for part in parts for name, value in vars(part).items()]
        self._simple = [
            (vars(part), name) for part, name, value in attributes
            if (id(part), name) not in self._ignored and (type(value) in _SIMPLE or _is_simple_tuple(value))
        ]  # fmt: skip
        self._constants = [(vars(part), name) for part, name, value in attributes if isinstance(value, torch.Tensor)]
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        seen = set()
        for kind in ("_parameters", "_buffers"):
            for prefix, part in self._module.named_modules():
                for name, tensor in getattr(part, kind).items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        self._places[f"{prefix}.{name}" if prefix else name] = getattr(part, kind), name
        self._token = object()

    def key(self) -> Hashable:
        """Equal keys: the same graph. Reads submodules again if they have changed."""
        if any(d.get(name) is not child for d, name, child in self._children) or any(
            len(d) != count for d, count in self._counts
        ):
            self._read()
        return (
            self._token,
            tuple([d.get(name) for d, name in self._simple]),
            tuple(
                [(id(tensor), tensor._version) for d, name in self._constants if (tensor := d.get(name)) is not None]
            ),
            tuple(
                [(t.requires_grad, t.shape, t.dtype, t.device) for d, name in self._places.values() for t in (d[name],)]
            ),
        )

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers by their first names, as they are now."""
        return {name: d[key] for name, (d, key) in self._places.items()}

    def ignore(self, before: Mapping[tuple[int, str], Any], after: Mapping[tuple[int, str], Any]) -> list[str]:
        """Leave out the attributes that differ: forward has changed them. Returns their names."""
        names = {id(part): name for name, part in self._module.named_modules()}
        changed = [key for key, value in before.items() if key in after and after[key] != value]
        self._ignored |= set(changed)
        if changed:
            self._read()
        return [f"{names[part]}.{name}" if names[part] else name for part, name in changed]

    def attributes(self) -> dict[tuple[int, str], Any]:
        """Plain attributes by part and name."""
        return {
            (id(part), name): value
            for part in self._module.modules()
            for name, value in vars(part).items()
            if type(value) in _SIMPLE
        }


def _is_simple_tuple(value: Any) -> bool:
    return type(value) is tuple and all(type(each) in _SIMPLE for each in value)
