"""Parameters that another library has replaced by plain tensors, for the exporter. Called by `tracing`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def as_parameters(module: torch.nn.Module) -> Iterator[None]:
    """Let every parameter be a torch.nn.Parameter inside the block, which torch.export demands.

    Inside a forward pass of FSDP1 (`use_orig_params=True`) the modules' parameters are views of one flat parameter.
    """
    replaced: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and not isinstance(value, torch.nn.Parameter):
                replaced.append((part, name, value))
                made.setdefault(id(value), torch.nn.Parameter(value.detach(), value.requires_grad))
    try:
        for part, name, value in replaced:
            part._parameters[name] = made[id(value)]
        yield
    finally:
        for part, name, value in replaced:
            part._parameters[name] = value  # type: ignore[assignment]
