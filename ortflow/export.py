"""Export a PyTorch module to an ONNX file that can be trained: `ortflow.export_for_training`.

Called by users, in the program that has their module. PyTorch is imported in the call only. No other module of
ortflow may import this one: ranks do not need PyTorch.

Why not `torch.onnx.export` alone: with its defaults it merges initializers of equal value (all LayerNorm weights of a
fresh model become one tensor, which then trains tied) and folds weights into constants, which then do not train. Both
happen in its optimizer. So parameters and buffers are graph inputs while it runs, which it cannot merge or fold.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.export_optimize import optimize
from ortflow.export_stops import mark_stops
from ortflow.export_trace import trace
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.head import check_model_to_train
from ortflow.workflow.graph.ir.origin import STACK, user_line
from ortflow.workflow.own_files import exchange_all
from ortflow.workflow.rundir import sync_directory, write_atomically

if TYPE_CHECKING:
    import torch

EXTERNAL_DATA_BYTES = 1_500_000_000
"""A protobuf message ends at 2 GiB: larger weights are written to a separate file beside the model."""


def export_for_training(
    module: torch.nn.Module,
    example_inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
) -> Path:
    """Write `module` as an ONNX model that keeps its parameters, running statistics and dropout.

    The module is traced in training mode, because dropout would be removed otherwise. Its mode, parameters and running
    statistics are restored. A BatchNormalization in evaluation mode in a module in training mode stays in that mode.

    Parameters
    ----------
    module
        The PyTorch module, with float32 parameters.
    example_inputs
        A tensor, a tuple of positional arguments of `forward`, or a mapping of keyword arguments.
    path
        File to write. More than 1.5 GB of weights are written beside it to `<name>.data`.
    input_names, output_names
        Names of the graph's inputs and outputs. By default the names of `forward`'s arguments, and the keys or fields
        of its result (otherwise `output`, or `output_0`, `output_1`, …).
    dynamic_shapes
        Axes that vary, as for `torch.export`, by name: `{"tokens": {0: "batch", 1: "time"}}`. By default the first axis
        of every input, `batch`; `{}` fixes all.

    Returns
    -------
    Path
        The path of the file.

    Raises
    ------
    UserError
        If PyTorch is missing or cannot export the module, if the file does not compute the module's outputs and
        gradients on the example inputs, or if `path` is a file that this function did not write. Nothing is written
        then.

    Warns
    -----
    UserWarning
        About properties of the module that ONNX cannot express or that could not be compared with it.

    Notes
    -----
    The file's metadata lists `ortflow.parameters` (trained), `ortflow.frozen` (parameters that do not require
    gradients, and running statistics of BatchNormalization in evaluation mode) and `ortflow.constants` (all other
    initializers except running statistics). A tied parameter has the first of its names. Parameters that no output
    depends on are omitted.
    """
    _require_torch()
    path = Path(path)
    check_model_to_train(path)
    args, kwargs = _arguments(example_inputs)
    inputs = _bind(module, args, kwargs)
    _check_parameters(module)
    if dynamic_shapes is None:
        dynamic_shapes = _batch_axis(inputs)
    with _in_training_mode(module):
        for message in _not_in_onnx(module):
            warnings.warn(message, stacklevel=2)
        program = trace(module, args, kwargs, input_names, output_names, dynamic_shapes or None)
    changed = set(program.exported_program.graph_signature.buffers_to_mutate.values()) - _statistics(module)
    for name in sorted(changed - _counters(module)):
        warnings.warn(f"buffer {name!r} changes in forward: in the ONNX model it keeps its value", stacklevel=2)
    _rename_tied(program.model.graph, module)
    if output_names is None:
        _rename_outputs(program)
    tensors = (*module.named_parameters(), *module.named_buffers())
    optimize(program, {name for name, _ in tensors})
    mark_stops(program.model)
    _write_metadata(program.model, module)
    with _in_training_mode(module):
        left_out = _compare(program, module, args, kwargs)
    if left_out:
        warnings.warn(left_out, stacklevel=2)
    try:
        _save(program, path)
    except OSError as error:
        raise UserError(f"the model cannot be written ({error.strerror})", where=str(path)) from error
    return path


def _require_torch() -> None:
    for name in ("torch.onnx", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"exporting a PyTorch module needs torch and onnxscript ({error})",
                fix="pip install torch onnxscript",
            ) from error


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return tuple(example_inputs), {}


def _bind(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        name = type(module).__name__
        raise UserError(
            f"the example inputs do not fit {name}.forward: {error}",
            fix="give a tensor, a tuple of positional arguments or a dict of keyword arguments",
        ) from error


def _batch_axis(inputs: dict[str, Any]) -> dict[str, Any]:
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


def _check_parameters(module: torch.nn.Module) -> None:
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


@contextlib.contextmanager
def _in_training_mode(module: torch.nn.Module) -> Iterator[None]:
    """Switch a module in evaluation mode to training mode; the parts of one in training mode keep their modes."""
    modes = {part: part.training for part in module.modules()}
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _not_in_onnx(module: torch.nn.Module) -> Iterator[str]:
    """What PyTorch does with the module in training, but the ONNX model does not."""
    import torch

    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None and part.weight.requires_grad:
            yield (
                f"{name!r} has padding_idx={part.padding_idx}, which ONNX cannot express: PyTorch does not "
                f"train that row, the ONNX model does"
            )


def _statistics(module: torch.nn.Module, *, fixed: bool = False) -> set[str]:
    """Names of the running means and variances: the forward pass updates them, ortflow keeps them.

    `fixed`: only of those parts of a module in training mode that are themselves in evaluation mode.
    """
    import torch

    return {
        f"{prefix}.{buffer}" if prefix else buffer
        for prefix, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
        if not fixed or (module.training and not part.training)
        for buffer in ("running_mean", "running_var")
    }


def _counters(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_buffers() if name.endswith("num_batches_tracked")}


def _rename_tied(graph: Any, module: torch.nn.Module) -> None:
    """Give tied tensors their first name, as `named_parameters` does; the exporter keeps the last."""
    for tensors in (module.named_parameters, module.named_buffers):
        first = {id(tensor): name for name, tensor in tensors()}
        for alias, tensor in tensors(remove_duplicate=False):
            name = first[id(tensor)]
            if alias != name and alias in graph.initializers and name not in graph.initializers:
                value = graph.initializers.pop(alias)
                value.name = name
                graph.initializers[name] = value


def _rename_outputs(program: Any) -> None:
    """Name outputs after the keys or fields of what `forward` returns."""
    graph = program.model.graph
    names = _leaf_names(program.exported_program.call_spec.out_spec, "")
    specs = [s for s in program.exported_program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
    returned = [n for n, s in zip(names, specs, strict=True) if type(s.arg).__name__ != "ConstantArgument"]
    fixed = {value.name for value in graph.inputs} | set(graph.initializers)
    inner = {value.name: value for node in graph.all_nodes() for value in node.outputs}
    for value, name in zip(graph.outputs, returned, strict=True):
        if value.producer() is None:
            continue
        while name in fixed:
            name += "_"
        fixed.add(name)
        inner.pop(value.name, None)
        other = inner.pop(name, None)
        if other is not None:
            # The exporter's own name for an inner value is replaced.
            other.name = next(new for i in count() if (new := f"{name}_{i}") not in inner and new not in fixed)
            inner[other.name] = other
        value.name = name


def _leaf_names(spec: Any, prefix: str) -> list[str]:
    if spec.type is None:
        return [prefix or "output"]
    children = spec.children()
    context = spec.context
    keys: Sequence[Any] = getattr(context, "_fields", None) or (
        context if isinstance(context, list) and len(context) == len(children) else range(len(children))
    )
    names = []
    for key, child in zip(keys, children, strict=True):
        head = prefix or ("" if isinstance(key, str) else "output")
        names += _leaf_names(child, f"{head}_{key}" if head else str(key))
    return names


def _write_metadata(model: Any, module: torch.nn.Module) -> None:
    present = model.graph.initializers
    parameters = {name: parameter for name, parameter in module.named_parameters() if name in present}
    statistics = _statistics(module)
    lists = {
        "parameters": [name for name, parameter in parameters.items() if parameter.requires_grad],
        "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad]
        + sorted(name for name in _statistics(module, fixed=True) if name in present),
        "constants": [name for name in present if name not in parameters and name not in statistics],
    }
    for key, names in lists.items():
        model.metadata_props[f"ortflow.{key}"] = json.dumps(names)
    for node in model.graph.all_nodes():
        # The whole stack is large and contains paths of this machine: the user's own line is enough.
        line = user_line(node.metadata_props.pop(STACK, ""))
        if line is not None:
            node.metadata_props[STACK] = 'File "{}", line {}'.format(*line)


def _compare(program: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if _size(program) > EXTERNAL_DATA_BYTES:
        return f"not compared with PyTorch: the weights take more than {EXTERNAL_DATA_BYTES / 1e9:g} GB"
    # Needs numpy, a dependency of the packages that `_require_torch` checks.
    from ortflow.export_compare import compare

    return compare(program.model_proto, module, args, kwargs)


def _size(program: Any) -> int:
    """Bytes of weights."""
    return sum(int(value.const_value.nbytes) for value in program.model.graph.initializers.values())


def _save(program: Any, path: Path) -> None:
    """Write the whole model or nothing, so that an old model is never beside new weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if _size(program) <= EXTERNAL_DATA_BYTES:
        write_atomically(path, program.model_proto.SerializeToString())
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        new = Path(folder) / path.name
        data = path.with_name(f"{path.name}.data")
        program.save(new, external_data=True)
        aside = Path(folder) / "before"
        aside.mkdir()
        exchange_all({data: new.with_name(data.name), path: new}, aside)
    sync_directory(path.parent)
