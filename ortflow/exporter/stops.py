"""Keeps the places where a module stops gradients in its exported file: `detach()`, `.data` and `no_grad()`.

Called by `ortflow.exporter.trace` and `ortflow.export`. PyTorch's exporter drops all of these. While it traces, each
such value passes a custom node, which its optimizer does not change; afterwards that node becomes the Identity that
`ortflow.workflow.graph.ir.stops` marks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ortflow.workflow.graph.ir.stops import KEY, VALUE

if TYPE_CHECKING:
    import torch

_DOMAIN, _OPERATOR = "ortflow", "StopGradient"


def keeps_stops() -> bool:
    """Whether this PyTorch can export a stop: from 2.8 on."""
    import torch

    return hasattr(torch.onnx, "ops")


@contextlib.contextmanager
def stops_noted(module: torch.nn.Module) -> Iterator[None]:
    """Record stops as nodes while the module is traced inside the block.

    The forward of a `torch.autograd.Function` also computes without gradients, but its backward has some: no stops are
    recorded in it.
    """
    import torch

    if not keeps_stops():
        yield
        return
    forward, mode = module.forward, _mode()
    apply = inspect.getattr_static(torch.autograd.Function, "apply")

    @functools.wraps(forward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode.paused += 1
        try:
            return apply.__get__(None, cls)(*args, **kwargs)
        finally:
            mode.paused -= 1

    with shadowed(module, "forward", noted), shadowed(torch.autograd.Function, "apply", classmethod(applied)):
        yield


@contextlib.contextmanager
def shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the block; an inherited one is inherited again afterwards."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the block, if it exists."""
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils import _pytree as pytree

    detached = (torch.Tensor.detach, torch.detach)
    data = torch.Tensor.data.__get__  # type: ignore[attr-defined, unused-ignore]

    class Noting(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
        paused = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            # Each access of `__get__` makes another wrapper: they are equal, but not identical.
            if func == data and not self.paused:
                func = torch.Tensor.detach
            result = func(*args, **kwargs)
            if self.paused or not (func in detached or not torch.is_grad_enabled()):
                return result
            inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if not any(tensor.requires_grad for tensor in inputs):
                return result
            # A tensor that is changed in place stays the same tensor.
            before = {id(tensor) for tensor in inputs}
            return pytree.tree_map(lambda leaf: stopped(leaf) if id(leaf) not in before else leaf, result)

    return Noting()


def stopped(value: Any) -> Any:
    """The value without its gradient, as the file keeps it; integers as they are."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    result = torch.onnx.ops.symbolic(
        f"{_DOMAIN}::{_OPERATOR}", (value,), dtype=value.dtype, shape=value.shape, version=1
    )
    # While PyTorch (2.8 to 2.15) traces, it says that the node's result is on the CPU.
    return result if value.device.type == "cpu" else result.to(value.device)


def mark_stops(model: Any) -> None:
    """Turn the custom nodes into marked Identity nodes, in place, after the exporter's optimizer has run."""
    for node in model.graph.all_nodes():
        if node.domain == _DOMAIN and node.op_type == _OPERATOR:
            node.domain, node.op_type = "", "Identity"
            node.metadata_props[KEY] = VALUE
    model.opset_imports.pop(_DOMAIN, None)
    model.graph.opset_imports.pop(_DOMAIN, None)
