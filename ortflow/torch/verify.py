"""Compares the first step of a structure with the module's own: outputs, gradients, and buffers that forward changes.

Called by `comparison`. PyTorch runs the module on the same tensors, with copies of its buffers; in both, a fixed
sequence is in place of random numbers. A difference is judged by the rounding of PyTorch's own single precision, and
is one only if it is there at other points, too: at a kink two correct gradients differ.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch

from ortflow.exporter import difference as export_difference
from ortflow.exporter.random import NotFixed, fix_in_onnx, fixed_in_pytorch
from ortflow.exporter.reference import by_default
from ortflow.exporter.trace import same_attributes, without_caches
from ortflow.torch.structure import DTYPES, Flat, flat
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.origin import STACK

RELATIVE = 1e-3
"""Allowed error relative to the norm, besides PyTorch's own rounding."""
FLOOR = 1e-4
"""Fraction of the largest gradient that counts as rounding: the gradient of a bias before a normalisation is zero."""
NOISE = (1e-2, 3e-2, 5e-2)
"""Relative noise on parameters and inputs at the other points."""
MULTIPLIED, FEW = 0.1, 4.0
"""Of rounding that a module multiplies: two right gradients of densenet121 are 0.3% and 1.1% off at one parameter."""
_DOUBLE_ELEMENTS = 50_000_000
"""Values of parameters beyond which double precision would take too long."""
_SEED = 7


@dataclass(frozen=True)
class Point:
    """Where a module is compared: tensors of the call and of the module."""

    given: Sequence[torch.Tensor]
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """A step's results as arrays."""

    outputs: list[np.ndarray]
    gradients: dict[str, np.ndarray | None]
    """By the graph's name of the parameter or input; None if there is none."""
    buffers: dict[str, np.ndarray]
    weights: list[torch.Tensor | None]
    """Factors of the outputs in the sum that is differentiated."""
    differentiable: list[bool]
    shape: Any = None
    """Constants and container of the result."""


def fixed(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy with the fixed sequence for random numbers; None if a random operator has no such form."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    try:
        fix_in_onnx(copy.graph)
    except NotFixed:
        return None
    return copy


def eager(
    module: torch.nn.Module,
    call: Flat,
    point: Point,
    variables: Sequence[str],
    weights: Sequence[torch.Tensor | None] | None,
    roots: Sequence[bool] | None,
    *,
    double: bool = False,
    autocast: torch.dtype | None = None,
) -> Step:
    """A step of PyTorch's. Raises what the module raises.

    `roots`: for each output whether it is differentiated; all if None. Weights are drawn if not given.
    """

    def raised(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if double and tensor.dtype == torch.float32 else tensor

    names = {name for name, _ in module.named_buffers()}
    state = {
        name: raised(t.detach().clone() if name in names else t.detach()).requires_grad_(t.requires_grad)
        for name, t in point.tensors.items()
    }
    inputs = [raised(t.detach().clone()).requires_grad_(t.requires_grad) for t in point.given]
    kind = torch.float64 if double else torch.get_default_dtype()
    cuda = sorted({t.device.index for t in (*inputs, *state.values()) if t.device.type == "cuda"})
    with (
        torch.random.fork_rng(devices=cuda),
        warnings.catch_warnings(),
        _repeatable(),
        fixed_in_pytorch(),
        same_attributes(module),
        without_caches(module),
        by_default(kind),
        torch.autocast("cuda", autocast, enabled=autocast is not None, cache_enabled=False),
    ):
        warnings.simplefilter("ignore")
        args, kwargs = call.rebuilt(inputs)
        returned = torch.func.functional_call(module, state, args, kwargs)
        dtypes = (*DTYPES, torch.float64) if double else DTYPES
        result = flat(returned, f"what {type(module).__name__}.forward returns", dtypes)
        outputs = result.tensors
        if roots is None:
            roots = [True] * len(outputs)
        if weights is None:
            weights = _drawn(outputs, roots)
        sources = {name: state[name] if name in state else inputs[int(name.split("/")[1])] for name in variables}
        pairs = [
            (output, weight.to(output.dtype))
            for output, weight, root in zip(outputs, weights, roots, strict=True)
            if weight is not None and root
        ]
        derivatives: Sequence[Any] = [None] * len(sources)
        if pairs and sources:
            derivatives = torch.autograd.grad(
                [output for output, _ in pairs], [*sources.values()], [weight for _, weight in pairs], allow_unused=True
            )
    gradients = {
        name: None if gradient is None else array(gradient.to_dense())
        for name, gradient in zip(sources, derivatives, strict=True)
    }
    buffers = {name: array(state[name]) for name in state if name in names}
    return Step(
        [array(output) for output in outputs], gradients, buffers, list(weights),
        [output.requires_grad for output in outputs], (result.constants, result.spec),
    )  # fmt: skip


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    """Without fused attention and cuDNN's recurrent networks, whose dropout has generators of their own."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        if not torch.cuda.is_available():
            yield
            return
        with torch.backends.cudnn.flags(enabled=False):
            yield


def _drawn(outputs: Sequence[torch.Tensor], roots: Sequence[bool]) -> list[torch.Tensor | None]:
    generator = np.random.default_rng(_SEED)
    return [
        torch.from_numpy(
            np.asarray(generator.standard_normal(tuple(o.shape)) / max(o.numel(), 1) ** 0.5, np.float32)
        ).to(o.device)
        if root and o.requires_grad and o.is_floating_point()
        else None
        for o, root in zip(outputs, roots, strict=True)
    ]


def moved(point: Point, noise: float) -> Point:
    """A point nearby: Gaussian noise on what is floating, relative to each tensor's spread."""
    generator = torch.Generator().manual_seed(_SEED)

    def near(tensor: torch.Tensor, *, changes: bool = True) -> torch.Tensor:
        value = tensor.detach()
        if not changes or not value.is_floating_point() or not value.numel():
            return tensor
        spread = value.std() if value.numel() > 1 else value.abs().mean()
        drawn = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
        return (value + drawn * noise * (spread if spread > 0 else 1.0)).requires_grad_(tensor.requires_grad)

    tensors = {name: near(t, changes=isinstance(t, torch.nn.Parameter)) for name, t in point.tensors.items()}
    return Point([near(tensor) for tensor in point.given], tensors)


@dataclass(frozen=True)
class Tolerance:
    """What counts as rounding."""

    relative: float = RELATIVE
    floor: float = FLOOR
    rounding: float = 30.0
    """A multiple of PyTorch's own error, up to MULTIPLIED of the norm; FEW times its own error beyond that."""

    takes_single_for_exact: bool = False
    """Where there is no double precision: at a first look, after which what differs is compared again."""

    def multiple(self, single: np.ndarray, exact: np.ndarray) -> float:
        """Of PyTorch's own error, at this result: 30 times an error of 4% would allow a gradient of zero."""
        own, whole = (export_difference.norm(value) for value in (single.astype(np.float64) - exact, exact))
        return min(self.rounding, max(FEW, MULTIPLIED * whole / own)) if own else self.rounding


HALF = Tolerance(2e-2, 2e-2, 4.0)
"""In half precision, compared with PyTorch's autocast and fp32."""


def differences(
    actual: Step, single: Step, double: Step, *, names: Sequence[str], allowed: Tolerance
) -> dict[str, str]:
    """What differs by more than rounding, and how. `names`: of the outputs."""
    faults: dict[str, str] = {}

    def difference(arrays: Sequence[np.ndarray], floor: float) -> str:
        actual_values, other, exact = export_difference.where_finite(*arrays)
        if single is double:
            exact = other.copy() if allowed.takes_single_for_exact else other
        rounding = allowed.rounding
        if single is not double and actual_values.shape == other.shape and np.issubdtype(other.dtype, np.floating):
            rounding = allowed.multiple(other, exact)
        return export_difference.difference([actual_values, other, exact], allowed.relative, floor, rounding)

    if len(actual.outputs) != len(single.outputs) or actual.shape != single.shape:
        return {"the result": "of another structure"}
    for name, *values in zip(names, actual.outputs, single.outputs, double.outputs, strict=True):
        faults[name] = difference(values, 0.0)
    for name, has_gradient, other in zip(names, actual.differentiable, single.differentiable, strict=True):
        if has_gradient != other:
            faults[name] = f"{'with' if has_gradient else 'without'} a gradient"
    floor = allowed.floor * max(_largest(single), _largest(double))
    for name, gradient in actual.gradients.items():
        reference_gradients = [step.gradients[name] for step in (single, double)]
        shapes = [
            gradient_or_none.shape
            for gradient_or_none in (gradient, *reference_gradients)
            if gradient_or_none is not None
        ]
        if shapes:
            arrays = [
                np.zeros(shapes[0], np.float32) if gradient_or_none is None else gradient_or_none
                for gradient_or_none in (gradient, *reference_gradients)
            ]
            faults[f"the gradient of {name!r}"] = difference(arrays, floor)
    for name, value in actual.buffers.items():
        faults[f"buffer {name!r}"] = difference([value, single.buffers[name], double.buffers[name]], 0.0)
    return {name: fault for name, fault in faults.items() if fault}


def _largest(step: Step) -> float:
    return export_difference.largest(gradient for gradient in step.gradients.values() if gradient is not None)


def is_small(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a step in double precision does not take too long."""
    return bool(sum(tensor.numel() for tensor in tensors.values()) <= _DOUBLE_ELEMENTS)


def refusal(name: str, faults: Mapping[str, str], model: onnx.ModelProto) -> UserError:
    """The error that names what differs, and the line that reads the first parameter."""
    shown = [f"{name} is {fault}" for name, fault in list(faults.items())[:3]]
    rest = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
    place = ""
    for node in model.graph.node:
        if any(f"the gradient of {source!r}" in faults for source in node.input):
            line = next((prop.value for prop in node.metadata_props if prop.key == STACK), "")
            place = f"; it is read by node {node.name!r} ({node.op_type}){f' of {line}' if line else ''}"
            break
    return UserError(
        f"the graphs do not compute what {name} computes: {'; '.join(shown)}{rest}{place}",
        fix='pass fallback="submodule" for the module that contains it, or report it with DebugOptions(save_onnx=True)',
    )


def array(tensor: torch.Tensor) -> np.ndarray:
    """A copy as an array; half precision as float32."""
    value = tensor.detach().cpu()
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    copied: np.ndarray = value.numpy().copy()
    return copied
