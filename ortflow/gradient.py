"""`ortflow.grad`: an ONNX model and its gradient as one ONNX model of standard operators.

The differentiator of training runs, without a loss, a run file or a trainer. The module is not named after the
function: importing a submodule `ortflow.grad` would replace the function of that name in the package.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.compose_products import PRODUCTS
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import vector_jacobian_product
from ortflow.workflow.graph.file.marks import forget_marks
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.file.structure import check_structure, check_valid
from ortflow.workflow.graph.file.tensors import FLOATS, check_tensors
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import make_outputs, replace
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms
from ortflow.workflow.graph.normalize.precision import single
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.operators.composed import COMPOSITIONS
from ortflow.workflow.graph.optimize import rewrites

_SUFFIX = "_grad"
_ONE = "ortflow.one"
_OTHER_FLOATS = {*FLOATS} - {TensorProto.FLOAT}
_REPLACE = "replace it in the model, or leave out of `inputs` every name before it"
_REPEATED = "name each once"


def grad(
    model: onnx.ModelProto | str | os.PathLike[str], outputs: str | Sequence[str], inputs: str | Sequence[str]
) -> onnx.ModelProto:
    """A model that computes what `model` computes, and the gradients of `outputs` with respect to `inputs`.

    The result has the inputs and outputs of `model`, under their names, and one more output `<name>_grad`, of the shape
    of the value, for each of `inputs`, in their order. An output of `outputs` that is a scalar (declared or inferred
    shape `()`) has the derivative 1. For each other one the result has one more input `<output>_grad`, of the output's
    shape: the gradient of the final quantity with respect to it (vector-Jacobian product). With several outputs, the
    gradient is that of their sum, weighted by these inputs.

    The result has IR version 10 and opset 18, and no operators besides ONNX's own and those of `model`, so that
    ONNX Runtime from 1.19 on runs it. It computes in single precision. Dynamic axes stay dynamic. Where an operator has
    several valid derivatives, the result has PyTorch's.

    Parameters
    ----------
    model
        The model, or its file. It is not changed. BatchNormalization and Dropout are differentiated in the mode that
        the model's nodes have.
    outputs
        Names of floating-point outputs of the graph.
    inputs
        Names of floating-point inputs or initializers of the graph. An initializer stays one.

    Returns
    -------
    onnx.ModelProto
        A new model.

    Raises
    ------
    UserError
        For a name that the graph does not have, an input that the outputs do not depend on, an operator without a
        gradient (with its node), and a model that is not valid.

    Warns
    -----
    UserWarning
        If values of half or double precision, inputs and outputs included, became single precision.
    """
    heads, variables = _names(outputs, "outputs"), _names(inputs, "inputs")
    copy = _copy(model)
    location = os.fspath(model) if not isinstance(model, onnx.ModelProto) else "model"
    _check_names(copy, heads, variables, location)
    interface = [value.name for value in copy.graph.input]
    stored = _as_inputs(copy.graph, {*variables, *interface})
    prepared, notes = prepare(copy, location, in_place=True)
    for note in notes:
        if "converted to fp32" in note:
            warnings.warn(f"ortflow.grad: {note}", stacklevel=2)
    avoid_wrong_forms(prepared)
    shapes.infer(prepared)
    results = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in prepared.graph.output]
    types = shapes.value_types(prepared)
    scalars = [name for name in heads if shapes.shape(types, name) == []]
    ones = {name: f"{_ONE}.{place}" for place, name in enumerate(scalars)}
    incoming = {name: f"{name}{_SUFFIX}" for name in heads if name not in scalars}
    try:
        prepared, _ = make_differentiable(prepared, variables, *heads)
        make_outputs(prepared.graph, results)
        rewrites.before(prepared.graph)
        derived, reached = vector_jacobian_product(prepared, variables, ones, incoming)
    except UserError as error:
        # The differentiator's advice names a key of the run file.
        raise UserError(error.what, where=location, fix=_REPLACE) from None
    _check_reached(heads, variables, reached, location)
    rewrites.after(derived.graph)
    derived = compose(derived, {**COMPOSITIONS, **PRODUCTS})
    derived.graph.initializer.extend(
        single(tensor) if tensor.data_type in _OTHER_FLOATS else tensor for tensor in stored.values()
    )
    inputs_left = [value for value in derived.graph.input if value.name not in stored or value.name in interface]
    order = {name: place for place, name in enumerate(interface)}
    replace(derived.graph.input, sorted(inputs_left, key=lambda value: order.get(value.name, len(order))))
    derived.producer_name = "ortflow"
    return derived


def _names(names: str | Iterable[str], argument: str) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names)
    if not listed:
        raise UserError(f"`{argument}` is empty", where="ortflow.grad", fix="name at least one value")
    for name in listed:
        if listed.count(name) > 1:
            raise UserError(f"`{argument}` has {name!r} twice", where="ortflow.grad", fix=_REPEATED)
    return listed


def _copy(model: onnx.ModelProto | str | os.PathLike[str]) -> onnx.ModelProto:
    """A checked copy of the model. Raises UserError."""
    if not isinstance(model, onnx.ModelProto):
        return read_model(Path(model))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for owner, tensor in walk.all_tensors(copy):
        if tensor.data_location == TensorProto.EXTERNAL:
            fix = "load the model with its external data, or give its file"
            raise UserError(f"the values of {owner} are in another file", where="model", fix=fix)
    check_structure(copy, "model")
    forget_marks(copy)
    check_tensors(copy, "model")
    check_valid(copy, "model")
    return copy


def _check_names(model: onnx.ModelProto, heads: Sequence[str], variables: Sequence[str], location: str) -> None:
    graph = model.graph
    output_types = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    read = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    weights = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for name in heads:
        _check_known(name, "output", output_types, location)
    for name in variables:
        _check_known(name, "input or initializer", {**read, **weights}, location, list(read))
    used = {name for node in walk.nodes(graph.node) for name in (*node.input, *node.output)} | {
        *output_types,
        *read,
        *weights,
    }
    for name in dict.fromkeys([*heads, *variables]):
        if f"{name}{_SUFFIX}" in used:
            fix = f"rename it in the model: this is the name of the gradient of {walk.quoted(name)}"
            raise UserError(f"the model has a value {walk.quoted(name + _SUFFIX)}", where=location, fix=fix)
    for name in set(heads) & set(variables):
        fix = "name another input or output"
        raise UserError(f"{walk.quoted(name)} is both in `outputs` and in `inputs`", where=location, fix=fix)


def _check_known(
    name: str, kind: str, types: dict[str, int], location: str, listed: Sequence[str] | None = None
) -> None:
    if name not in types:
        names = ", ".join(map(walk.quoted, listed if listed is not None else types))
        fix = f"its {kind.split()[0]}s are {names}"
        raise UserError(f"the model has no {kind} {walk.quoted(name)}", where=location, fix=fix)
    if types[name] not in FLOATS and types[name] != TensorProto.UNDEFINED:
        called = TensorProto.DataType.Name(types[name]).lower()
        raise UserError(f"{walk.quoted(name)} has no gradient: its type is {called}", where=location)


def _as_inputs(graph: onnx.GraphProto, names: Iterable[str]) -> dict[str, onnx.TensorProto]:
    """Make inputs of these initializers, so that no later step folds or merges them. Returns them, by name."""
    input_names, declared = set(names), {value.name for value in graph.input}
    moved = {
        t.name: onnx.TensorProto.FromString(t.SerializeToString()) for t in graph.initializer if t.name in input_names
    }
    replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in moved])
    for name, tensor in moved.items():
        if name not in declared:
            graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    return moved


def _check_reached(heads: Sequence[str], variables: Sequence[str], reached: Sequence[str], location: str) -> None:
    for name in variables:
        if name not in reached:
            text = " and ".join(map(walk.quoted, heads))
            problem = (
                f"no gradient reaches {walk.quoted(name)}: {text} {'do' if len(heads) > 1 else 'does'} not depend on it"
            )
            raise UserError(problem, where=location, fix="leave it out of `inputs`; its gradient is 0")
