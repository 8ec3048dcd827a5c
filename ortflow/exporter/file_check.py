"""Compare an exported file with its module: outputs, and the gradient of every parameter.

Called by `ortflow.export` before the file is written. The exporter omits what ONNX cannot express (the backward of
a custom function, a term of a loss), which only the numbers show. Both run in training mode on the example inputs, with
the same fixed sequence for dropout. If the file cannot be differentiated, only outputs are compared, with running
statistics.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ortflow.exporter.difference import GRADIENT, NOT_FINITE
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    import onnx
    import torch

    from ortflow.exporter.comparison import Comparison

_NEEDED = ("onnx", "onnxruntime")
_NOISE = (0.0, 1e-2, 3e-2, 5e-2)
"""Relative noise on parameters and inputs. At a kink of a function, two correct gradients differ. A deep network has so
many kinks that some gradient differs at each point, but a correct gradient does not differ at all points."""


def compare(
    model: onnx.ModelProto,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    larger_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> str:
    """Raise UserError if the file computes other results than the module; otherwise return what was not compared.

    `model`: the training form of the file. `module`: in the modes that it was traced in. `larger_inputs`:
    arguments of another size, at which the outputs are compared, as in a second call. Before PyTorch 2.8, the
    gradient of an Embedding's padding row is not compared: it is known to differ. Returns one sentence, empty if
    nothing was left out.
    """
    missing_packages = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing_packages:
        return f"not compared with PyTorch: {' and '.join(missing_packages)} is not installed"
    from ortflow.exporter.comparison import Comparison
    from ortflow.exporter.reference import NotCompared, NotFinite, borrowed, call_of

    faults: dict[str, str] | None = None
    try:
        comparison = Comparison(model, module)
        for noise in _NOISE:
            with borrowed(module):
                try:
                    first_faults = comparison.faults(call_of(module, args, kwargs, noise))
                except NotFinite:
                    if noise == _NOISE[-1] and faults is None:
                        raise
                    continue  # zeros as example inputs may be a point without a gradient
            faults = {name: fault for name, fault in (faults or first_faults).items() if name in first_faults}
            if not faults or NOT_FINITE in faults.values():
                break
        if not faults:
            with borrowed(module):
                faults = comparison.later_faults(call_of(module, args, kwargs, 0.0))
            with borrowed(module):
                faults |= comparison.faults_of_size(call_of(module, *larger_inputs, 1e-2)) if larger_inputs else {}
        if not faults:
            faults = _faults_at_points(comparison, args, kwargs)
        if not faults:
            return comparison.file.left_out
    except NotCompared as missing:
        if not faults:
            return f"not compared with PyTorch: {missing}"
    raise UserError(
        f"the ONNX model would not compute what {type(module).__name__} computes: {_reported(faults or {})}",
        fix="change the operation in forward that ONNX cannot express; the backward of a torch.autograd.Function is"
        " lost: write y with the gradient of x as x + (y - x).detach()",
    )


def _faults_at_points(comparison: Comparison, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """What differs in each draw of a point: of the first such point."""
    from ortflow.exporter.points import DRAWS, POINTS, call_at
    from ortflow.exporter.reference import borrowed

    for point in POINTS:
        faults: dict[str, str] | None = None
        for draw in range(DRAWS):
            with borrowed(comparison.file.module):
                call = call_at(point, draw, comparison.file.module, args, kwargs)
                new_faults = {} if call is None else comparison.faults_where_finite(call)
            faults = {
                name: fault for name, fault in (new_faults if faults is None else faults).items() if name in new_faults
            }
            if not faults:
                break
        if faults:
            return {name: f"{fault} {point}" for name, fault in faults.items()}
    return {}


def _reported(faults: dict[str, str]) -> str:
    """The outputs that differ, and the first gradients."""
    outputs = [f"{name} is {fault}" for name, fault in faults.items() if not name.startswith(GRADIENT)]
    wrong = [f"{name.removeprefix(GRADIENT)} is {fault}" for name, fault in faults.items() if name.startswith(GRADIENT)]
    rest = f" (and of {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    return "; ".join([*outputs, *([f"{GRADIENT}{', of '.join(wrong[:3])}{rest}"] if wrong else [])])
