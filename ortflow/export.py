"""Export a PyTorch module to an ONNX file that can be trained: `ortflow.export_for_training`.

Called by users, in the program that has their module. PyTorch is imported in the call only. No other module of
ortflow may import this one: ranks do not need PyTorch.

Why not `torch.onnx.export` alone: with its defaults it merges initializers of equal value (all LayerNorm weights of a
fresh model become one tensor, which then trains tied) and folds weights into constants, which then do not train. Both
happen in its optimizer. So parameters and buffers are graph inputs while it runs, which it cannot merge or fold.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.exporter.argument_checks import (
    arguments,
    batch_axis,
    bind,
    check_parameters,
    not_in_onnx,
    require_torch,
    with_rows,
)
from ortflow.exporter.evaluation_form import evaluation_form, finish
from ortflow.exporter.graph_names import rename_outputs, rename_tied, shorten_lines, statistics, write_roles
from ortflow.exporter.hooks import check_training, gradient_factors, multiply_gradients
from ortflow.exporter.optimize import optimize
from ortflow.exporter.state import (
    changed_buffers,
    name_updates,
    refuse_changed_parameters,
    refuse_newer_operators,
    returning,
)
from ortflow.exporter.state_dict import write_state_dict
from ortflow.exporter.stops import mark_stops
from ortflow.exporter.trace import OPSET, trace
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.head import check_model_to_train
from ortflow.workflow.run.rundir import sync_directory, write_atomically
from ortflow.workflow.system.own_files import exchange_all

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
    initializers except running statistics); `ortflow.state_dict` is the table of PyTorch's names, by which
    `ortflow export --to state_dict` returns the weights. A tied parameter has the first of its names. Parameters
    that no output depends on are omitted from the graph.
    """
    require_torch()
    path = Path(path)
    check_model_to_train(path)
    args, kwargs = arguments(example_inputs)
    inputs = bind(module, args, kwargs)
    check_parameters(module)
    check_training(module)
    factors = gradient_factors(module)
    if dynamic_shapes is None:
        dynamic_shapes = batch_axis(inputs)

    example, example_kwargs = with_rows(inputs, dynamic_shapes, args, kwargs)

    def traced(output_names: Sequence[str] | None) -> tuple[Any, list[str]]:
        """The optimized program of the module in its present modes, and the buffers that it changes."""
        changed = changed_buffers(module, example, example_kwargs)
        names = None if output_names is None else [*output_names, *changed]
        with returning(module, changed):
            program = trace(module, example, example_kwargs, input_names, names, dynamic_shapes or None)
        refuse_changed_parameters(program)
        refuse_newer_operators(program, OPSET)
        rename_tied(program.model.graph, module)
        if output_names is None:
            rename_outputs(program, changed)
        name_updates(program, module, changed)
        optimize(program, {name for name, _ in (*module.named_parameters(), *module.named_buffers())})
        mark_stops(program.model)
        shorten_lines(program.model)
        return program, changed

    evaluation = None
    with _in_training_mode(module):
        for message in not_in_onnx(module):
            warnings.warn(message, stacklevel=2)
        program, changed = traced(output_names)
        multiply_gradients(program.model, factors)
        write_roles(program.model, module, changed)
        if _size(program) > EXTERNAL_DATA_BYTES:
            left_out = f"not compared with PyTorch: the weights take more than {EXTERNAL_DATA_BYTES / 1e9:g} GB"
        else:
            # Needs numpy, a dependency of the packages that `require_torch` checks.
            from ortflow.exporter.file_check import compare

            larger_inputs = with_rows(inputs, dynamic_shapes, args, kwargs, more=1)
            left_out = compare(program.model_proto, module, args, kwargs, larger_inputs)
            evaluation = evaluation_form(program, module, args, kwargs, lambda: traced(None), changed)
        for message in finish(program.model, module, changed, evaluation):
            warnings.warn(message, stacklevel=2)
        learned = {name for name, _ in module.named_parameters()} | statistics(module) | set(changed)
        if lacking := write_state_dict(program.model, module, learned):
            warnings.warn(lacking, stacklevel=2)
    if left_out:
        warnings.warn(left_out, stacklevel=2)
    try:
        _save(program, path)
    except OSError as error:
        raise UserError(f"the model cannot be written ({error.strerror})", where=str(path)) from error
    return path


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
