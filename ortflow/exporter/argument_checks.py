"""Checks of what `export_for_training` is called with, before PyTorch traces the module.

PyTorch is imported when a check needs it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    import torch


def require_torch() -> None:
    """Raise UserError if a package is missing."""
    for name in ("torch.onnx", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"exporting a PyTorch module needs torch and onnxscript ({error})",
                fix="pip install torch onnxscript",
            ) from error


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments of `forward`."""
    import torch

    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return tuple(example_inputs), {}


def bind(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names of `forward`. Raises UserError if they do not fit."""
    try:
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        name = type(module).__name__
        raise UserError(
            f"the example inputs do not fit {name}.forward: {error}",
            fix="give a tensor, a tuple of positional arguments or a dict of keyword arguments",
        ) from error


def batch_axis(inputs: dict[str, Any]) -> dict[str, Any]:
    """Dynamic shapes that name the first axis of every tensor `batch`."""
    import torch
    from torch.utils import _pytree as pytree

    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    sizes = sorted({int(tensor.shape[0]) for tensor in tensors})
    if len(sizes) > 1:
        raise UserError(
            f"the first axes of the example inputs are {', '.join(map(str, sizes))}, not one batch",
            fix='name the axes that vary, such as dynamic_shapes={"tokens": {0: "batch"}, "table": None}',
        )
    return {
        name: pytree.tree_map(
            lambda leaf: {0: "batch"} if isinstance(leaf, torch.Tensor) and leaf.ndim else None, value
        )
        for name, value in inputs.items()
    }


def with_rows(
    inputs: Mapping[str, Any], dynamic_shapes: Any, args: tuple[Any, ...], kwargs: dict[str, Any], more: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with `more` repetitions of the last element along each axis that varies, and at least 2 elements.

    torch.export takes a size of 1 for fixed in some operators, although the axis is declared to vary. `inputs`: the
    arguments by name. Axes of tensors inside other arguments stay, unless all first axes vary.
    """
    import torch
    from torch.utils import _pytree as pytree

    longer: dict[int, Any] = {}
    for name, value in inputs.items():
        axes = dynamic_shapes.get(name) if isinstance(dynamic_shapes, Mapping) else None
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        every = pytree.tree_leaves(axes) == ["batch"] * len(leaves) and not isinstance(value, torch.Tensor)
        for leaf in leaves:
            extended = leaf
            for axis in [0] if every else axes if isinstance(axes, Mapping) and leaf is value else []:
                count = max(more, 2 - extended.shape[axis])
                last = extended.narrow(axis, extended.shape[axis] - 1, 1) if extended.shape[axis] else None
                if last is not None and count > 0:
                    extended = torch.cat([extended, *[last] * count], axis)
            longer[id(leaf)] = extended
    changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda leaf: longer.get(id(leaf), leaf), (args, kwargs)
    )
    return changed


def check_parameters(module: torch.nn.Module) -> None:
    """Raise UserError if a parameter cannot be exported."""
    import torch

    places: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.device.type == "meta":
            raise UserError(f"parameter {name!r} has no values (meta device)", fix="load the weights first")
        if parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UserError(f"parameter {name!r} is {kind}, not float32", fix="call module.float() first")
        other = places.setdefault(parameter.data_ptr(), name) if parameter.numel() else name
        if other != name:
            raise UserError(
                f"parameters {other!r} and {name!r} are two objects that share memory, which ONNX cannot express",
                fix="tie them as one torch.nn.Parameter",
            )


def not_in_onnx(module: torch.nn.Module) -> Iterator[str]:
    """What PyTorch does with the module in training, but the ONNX model does not."""
    import torch

    from ortflow.exporter.stops import keeps_stops

    if keeps_stops():
        return
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None and part.weight.requires_grad:
            yield (
                f"{name!r} has padding_idx={part.padding_idx}, which PyTorch {torch.__version__} cannot export: it "
                f"does not train that row, the ONNX model does; with PyTorch 2.8 or newer neither does"
            )
