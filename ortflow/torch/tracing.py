"""A module's call as an ONNX model in memory, with parameters and buffers as inputs. Called by `engine`.

The module's forward is replaced, while PyTorch's exporter traces it, by a function of the call's tensors, one after the
other; in it the module is called as the user calls it, with its hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ortflow.exporter.graph_names import rename_tied, shorten_lines
from ortflow.exporter.optimize import optimize
from ortflow.exporter.state import changed_buffers, name_updates, refuse_changed_parameters
from ortflow.exporter.stops import mark_stops
from ortflow.exporter.trace import trace
from ortflow.torch.ranges import Range, ranges_of
from ortflow.torch.refusals import functions_refused, generators_refused
from ortflow.torch.sizes import Sizes
from ortflow.torch.structure import Flat, flat, rebuilt
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    import onnx
    from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Output:
    """Where a tensor of the result comes from."""

    kind: str
    """graph, or input, or tensor: the call's tensor, parameter or buffer itself."""
    name: str
    """Of the graph's output, of the parameter or buffer; the number of the call's tensor."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Traced:
    """A module's call as a graph."""

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    """The graph's name of each tensor of the call."""
    tensors: tuple[str, ...]
    """Parameters and buffers that the graph reads."""
    changed: tuple[str, ...]
    """Buffers whose new values are outputs `updated/<name>`."""
    outputs: tuple[Output, ...]
    constants: tuple[tuple[int, Any], ...]
    spec: pytree.TreeSpec
    sizes: Sizes
    """The sizes that it is right for."""
    constants_with_gradient: tuple[str, ...] = ()
    """Shapes of tensors with a gradient that are neither parameters nor arguments."""
    ranges: tuple[Range, ...] = ()
    """The numbers that its arguments may have."""

    def result(self, tensors: Sequence[Any]) -> Any:
        """What forward returns, with these tensors."""
        return rebuilt(tensors, self.constants, self.spec)


Varying = Literal["all", "samples", "none"]
"""The sizes of arguments that may vary: all, those of first axes, or none."""


def traced(
    module: torch.nn.Module,
    call: Flat,
    called: Callable[[Any], object],
    *,
    varying: Varying = "all",
    half: torch.dtype | None = None,
) -> Traced:
    """Trace a call `(args, kwargs)`. Raises UserError if it cannot be exported.

    `called`: see `changed_buffers`. `varying`: for other sizes, too, where the module allows it. `half`: the type of
    autocast, if it is on: what PyTorch returns in half precision is an output of that type.
    """
    args, kwargs = call.rebuilt([tensor.detach() for tensor in call.tensors])
    in_eager: list[torch.dtype] = []

    def noted(result: Any) -> None:
        in_eager.extend([tensor.dtype for tensor in flat(result, "").tensors])
        called(result)

    with generators_refused(), torch.autocast("cuda", half, enabled=half is not None, cache_enabled=False):
        changed = changed_buffers(module, args, kwargs, noted)
    returned: list[Flat] = []
    # Each tensor is an object of its own, also if the call has it twice.
    inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in call.tensors)
    names = [f"input/{place}" for place in range(len(inputs))]
    auto = torch.export.Dim.AUTO
    axes = None
    if inputs and varying != "none":
        axes = {"tensors": tuple(dict.fromkeys(_axes(tensor, varying), auto) for tensor in inputs)}
    with _flattened(module, call, changed, returned), functions_refused():
        program = trace(module, inputs, {}, names, None, axes)
    refuse_changed_parameters(program)
    _refuse_changed_inputs(program)
    lost = tuple(
        [
            str(tuple(value.shape))
            for value in program.exported_program.constants.values()
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
    )
    graph = program.model.graph
    result = returned[-1]
    sizes, ranges = Sizes.of(program.exported_program), ranges_of(program.exported_program)
    rename_tied(graph, module)
    stored = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    kinds = [tensor.dtype for tensor in result.tensors]
    if half is not None and len(in_eager) == len(kinds):
        kinds = [half if eager is half else kind for kind, eager in zip(kinds, in_eager, strict=True)]
    outputs = _name_outputs(graph, kinds, names, stored)
    name_updates(program, module, changed)
    optimize(program, stored)
    mark_stops(program.model)
    shorten_lines(program.model)
    read = _without_values(program.model.graph, stored)
    return Traced(
        program.model_proto,
        tuple(names),
        read,
        tuple(changed),
        outputs,
        result.constants,
        result.spec,
        sizes,
        lost,
        ranges,
    )


def _axes(tensor: torch.Tensor, varying: Varying) -> range:
    return range(tensor.ndim if varying == "all" else min(tensor.ndim, 1))


@contextlib.contextmanager
def _flattened(module: torch.nn.Module, call: Flat, changed: Sequence[str], returned: list[Flat]) -> Iterator[None]:
    """Let the module take and return flat tensors inside the block, and also the buffers that it changes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    state = vars(module)
    instance_state = {name: state[name] for name in (*hooks, "forward") if name in state}

    def forward(*tensors: Any) -> Any:
        replaced = {name: state[name] for name in (*hooks, "forward")}
        try:
            state.pop("forward")
            state.update(instance_state)
            args, kwargs = call.rebuilt(tensors)
            result = flat(module(*args, **kwargs), f"what {type(module).__name__}.forward returns")
        finally:
            state.update(replaced)
        returned.append(result)
        return (*result.tensors, *(module.get_buffer(name).detach().clone() for name in changed))

    try:
        state.update({name: type(state[name])() for name in hooks}, forward=forward)
        yield
    finally:
        state.pop("forward", None)
        state.update(instance_state)


def _refuse_changed_inputs(program: Any) -> None:
    specs = program.exported_program.graph_signature.output_specs
    if any(spec.kind.name == "USER_INPUT_MUTATION" for spec in specs):
        raise UserError(
            "forward changes a tensor that it was called with, in place",
            fix="let forward change a clone() of it",
        )


def _name_outputs(
    graph: Any, dtypes: Sequence[torch.dtype], inputs: Sequence[str], stored: set[str]
) -> tuple[Output, ...]:
    """Give the outputs of these types names, and take those out that the graph does not compute; later ones stay."""
    import onnx_ir as ir

    values = list(graph.outputs)
    later = values[len(dtypes) :]
    names: dict[int, str] = {}
    outputs = []
    del graph.outputs[:]
    for place, (value, dtype) in enumerate(zip(values, dtypes, strict=False)):
        if value.producer() is None and value.name in inputs:
            outputs.append(Output("input", str(inputs.index(value.name)), dtype))
            continue
        if value.producer() is None and value.name in stored:
            outputs.append(Output("tensor", value.name, dtype))
            continue
        if id(value) not in names:
            name = names[id(value)] = f"output/{place}"
            if value.producer() is None:
                node = ir.Node("", "Identity", [value])
                node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
                graph.append(node)
                value = node.outputs[0]
            value.name = name
            graph.outputs.append(value)
        outputs.append(Output("graph", names[id(values[place])], dtype))
    graph.outputs.extend(later)
    return tuple(outputs)


def _without_values(graph: Any, stored: set[str]) -> tuple[str, ...]:
    """Make parameters and buffers inputs; returns those that the graph reads."""
    read = []
    for name in [name for name in graph.initializers if name in stored]:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
        read.append(name)
    return tuple(read)
