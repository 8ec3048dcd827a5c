"""Compare an exported file with its module: outputs, and the gradient of every parameter.

Called by `ortflow.export` before the file is written. The exporter omits what ONNX cannot express (the backward of
a custom function, a term of a loss), which only the numbers show. Both run in training mode on the example inputs, with
the same fixed sequence for dropout. The module also runs in double precision, which shows the error due to rounding.
If the file cannot be differentiated, only outputs are compared, with running statistics.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.recorded_forms import UPDATED
from ortflow.workflow.graph.ir.recorded_roles import STATE, recorded

if TYPE_CHECKING:
    import onnx
    import torch

    from ortflow.export_reference import Call, Result

_ROUNDING = 30.0
"""Allowed error of the file relative to double precision, as a multiple of the error of PyTorch's single precision."""
_RELATIVE, _RELATIVE_ALONE = 1e-3, 2e-2
"""Additional allowed error relative to the norm; the second applies if the module does not run in double precision."""
_FLOOR = 1e-4
"""Fraction of the largest gradient that counts as rounding: the gradient of a bias before a normalisation is zero."""
_ROUNDINGS = 3
"""Other roundings of the module that a difference at a point of zeros or equal elements is compared with."""
_DOUBLE_ELEMENTS = 50_000_000
"""Values of parameters beyond which double precision would take too long."""
_NEEDED = ("onnx", "onnxruntime")
_NOT_FINITE = "not finite"
_GRADIENT = "the gradient of "
_NOISE = (0.0, 1e-2, 3e-2, 5e-2)
"""Relative noise on parameters and inputs. At a kink of a function, two correct gradients differ. A deep network has so
many kinks that some gradient differs at each point, but a correct gradient does not differ at all points."""


def compare(
    model: onnx.ModelProto,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    more: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> str:
    """Raise UserError if the file computes other results than the module; otherwise return what was not compared.

    `model`: the training form of the file. `module`: in the modes that it was traced in. `more`: arguments of another
    size, at which the outputs are compared, as in a second call. Before PyTorch 2.8, the
    gradient of an Embedding's padding row is not compared: it is known to differ. Returns one sentence, empty if
    nothing was left out.
    """
    missing_packages = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing_packages:
        return f"not compared with PyTorch: {' and '.join(missing_packages)} is not installed"
    from ortflow.export_reference import NotCompared, NotFinite, borrowed, call_of

    faults: dict[str, str] | None = None
    try:
        file = ExportedFile(model, module)
        for noise in _NOISE:
            with borrowed(module):
                try:
                    found = file.faults(call_of(module, args, kwargs, noise))
                except NotFinite:
                    if noise == _NOISE[-1] and faults is None:
                        raise
                    continue  # zeros as example inputs may be a point without a gradient
            faults = {what: fault for what, fault in (faults or found).items() if what in found}
            if not faults or _NOT_FINITE in faults.values():
                break
        if not faults:
            with borrowed(module):
                faults = file.later_faults(call_of(module, args, kwargs, 0.0))
            with borrowed(module):
                faults |= file.faults_of_size(call_of(module, *more, 1e-2)) if more else {}
        if not faults:
            faults = _faults_at_points(file, args, kwargs)
        if not faults:
            return file.left_out
    except NotCompared as missing:
        if not faults:
            return f"not compared with PyTorch: {missing}"
    raise UserError(
        f"the ONNX model would not compute what {type(module).__name__} computes: {_reported(faults or {})}",
        fix="change the operation in forward that ONNX cannot express; the backward of a torch.autograd.Function is"
        " lost: write y with the gradient of x as x + (y - x).detach()",
    )


def _faults_at_points(file: ExportedFile, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """What differs in each draw of a point: of the first such point."""
    from ortflow.export_points import DRAWS, POINTS, call_at
    from ortflow.export_reference import borrowed

    for point in POINTS:
        faults: dict[str, str] | None = None
        for draw in range(DRAWS):
            with borrowed(file.module):
                call = call_at(point, draw, file.module, args, kwargs)
                found = {} if call is None else file.faults_where_finite(call)
            faults = {what: fault for what, fault in (found if faults is None else faults).items() if what in found}
            if not faults:
                break
        if faults:
            return {what: f"{fault} {point}" for what, fault in faults.items()}
    return {}


def _reported(faults: dict[str, str]) -> str:
    """The outputs that differ, and the first gradients."""
    outputs = [f"{what} is {fault}" for what, fault in faults.items() if not what.startswith(_GRADIENT)]
    wrong = [
        f"{what.removeprefix(_GRADIENT)} is {fault}" for what, fault in faults.items() if what.startswith(_GRADIENT)
    ]
    more = f" (and of {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    return "; ".join([*outputs, *([f"{_GRADIENT}{', of '.join(wrong[:3])}{more}"] if wrong else [])])


class ExportedFile:
    """An exported file that is about to be compared with its module."""

    def __init__(self, model: onnx.ModelProto, module: torch.nn.Module) -> None:
        import torch

        from ortflow.export_gradients import without_values
        from ortflow.export_random import NotFixed, fix_in_onnx
        from ortflow.export_reference import NotCompared
        from ortflow.export_stops import keeps_stops

        stored = {tensor.name for tensor in model.graph.initializer}
        self.module = module
        self.parameters = {name: p for name, p in module.named_parameters() if name in stored}
        self.states = recorded(model).get(STATE, [])
        self.model = without_values(model, [*self.parameters, *self.states])
        self._random = without_values(model, [*self.parameters, *self.states])
        try:
            fix_in_onnx(self.model.graph)
        except NotFixed as error:
            raise NotCompared(f"{error} is random") from None
        fed = {*self.parameters, *self.states}
        self.inputs = [value.name for value in self.model.graph.input if value.name not in fed]
        self.outputs = [v.name for v in self.model.graph.output if not v.name.startswith(UPDATED)]
        self.padding = {
            id(part.weight): part.padding_idx
            for part in module.modules()
            if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None and not keeps_stops()
        }
        self.left_out = ""
        self._graph: Any = None

    def faults(self, call: Call) -> dict[str, str]:
        """Outputs and gradients that differ, and how. Raises NotCompared if the module or the file does not run."""
        from ortflow.export_reference import compute, with_running_statistics

        single, weights = compute(call, None)
        actual = self._computed(call, weights)
        with contextlib.ExitStack() as modes:
            if actual is None:
                modes.enter_context(with_running_statistics(call.module))
                single, weights = compute(call, [None] * len(weights))
                actual = self._evaluated(call)
            return self._differences(call, weights, actual, single)

    def later_faults(self, call: Call) -> dict[str, str]:
        """How state, and the outputs of a second call, differ: what `forward` keeps for its next call."""
        from ortflow.export_reference import compute

        first, weights = compute(call, None)
        once = self._computed(call, weights)
        if once is None:
            return {}
        second, _ = compute(call, weights, times=2)
        twice = self._computed(call, weights, once.buffers)
        if twice is None or not second.is_finite:
            return {}
        found = {}
        for name, actual in once.buffers.items():
            found[f"buffer {name!r}"] = difference([actual, first.buffers[name], first.buffers[name]], _RELATIVE, 0.0)
        for name, actual, expected, earlier in zip(
            self.outputs, twice.outputs, second.outputs, first.outputs, strict=True
        ):
            # The first call's error shows the rounding.
            floor = _norm(once.outputs[self.outputs.index(name)].astype(np.float64) - earlier)
            fault = difference([actual, expected, expected], _RELATIVE, 2 * floor)
            found[f"output {name!r} of a second step"] = fault
        return {what: fault for what, fault in found.items() if fault}

    def faults_of_size(self, call: Call) -> dict[str, str]:
        """Outputs that differ for another number of samples; none if the module does not take it."""
        from ortflow.export_reference import NotCompared, compute

        try:
            single, weights = compute(call, None)
        except NotCompared:
            return {}
        left_out = self.left_out
        actual = self._computed(call, weights)
        if actual is None and not left_out and self.left_out:
            return {"the file": "not able to run with another size"}
        if actual is None or not single.is_finite:
            return {}
        found = {}
        for name, value, expected in zip(self.outputs, actual.outputs, single.outputs, strict=True):
            found[f"output {name!r} for another size"] = difference([value, expected, expected], _RELATIVE_ALONE, 0.0)
        return {what: fault for what, fault in found.items() if fault}

    def faults_where_finite(self, call: Call) -> dict[str, str]:
        """Outputs and gradients that differ where the module's are finite; none if it does not take the inputs."""
        from ortflow.export_reference import NotCompared, compute, doubled, with_running_statistics

        try:
            single, weights = compute(call, None)
        except NotCompared:
            return {}
        actual = self._computed(call, weights)
        with contextlib.ExitStack() as modes:
            if actual is None:
                if self._graph is not None:
                    return {"the file": "not able to run"}
                modes.enter_context(with_running_statistics(call.module))
                single, weights = compute(call, [None] * len(weights))
                actual = self._evaluated(call)
            found = self._differences_of(actual, single, single, _RELATIVE)
            exact = single
            if found and self._is_doubled:
                with contextlib.suppress(NotCompared), doubled(call) as raised:
                    exact = compute(raised, weights)[0]
                found = self._differences_of(actual, single, exact, _RELATIVE)
            for seed in range(_ROUNDINGS) if found else ():
                with contextlib.suppress(NotCompared):
                    other = compute(call, weights, rounding=seed)[0]
                    still = self._differences_of(actual, other, exact, _RELATIVE)
                    found = {what: fault for what, fault in found.items() if what in still}
        return found

    def evaluation_faults(self, call: Call) -> dict[str, str]:
        """Outputs of the module in evaluation mode that differ from the file's. Raises NotCompared."""
        from ortflow.export_reference import Result, compute

        single, weights = compute(call, None)
        if len(single.outputs) != len(self.outputs):
            return {"the number of outputs": f"{len(single.outputs)}, not {len(self.outputs)}"}
        found = self._evaluated(call, dropout=False)
        return self._differences(call, [None] * len(weights), found, Result(single.outputs, {}))

    def _differences(
        self, call: Call, weights: list[np.ndarray | None], actual: Result, single: Result
    ) -> dict[str, str]:
        from ortflow.export_reference import NotCompared, NotFinite, compute, doubled

        if len(single.outputs) != len(actual.outputs):
            raise NotCompared("the file has other outputs than the module")
        if not single.is_finite:
            raise NotFinite("the module's own results on the example inputs are not finite")
        double, relative = single, _RELATIVE_ALONE
        if self._is_doubled:
            with contextlib.suppress(NotCompared), doubled(call) as raised:
                found_in_double = compute(raised, weights)[0]
                # A mask's lowest number may be one of fp32 in the code, and overflow elsewhere.
                if found_in_double.is_finite:
                    double, relative = found_in_double, _RELATIVE
        return self._differences_of(actual, single, double, relative)

    def _differences_of(self, actual: Result, single: Result, double: Result, relative: float) -> dict[str, str]:
        """How the file's result differs where the module's are finite."""
        found = {}
        for name, *values in zip(self.outputs, actual.outputs, single.outputs, double.outputs, strict=True):
            found[f"output {name!r}"] = difference(_where_finite(*values), relative, 0.0)
        gradients = (np.nan_to_num(gradient, posinf=0.0, neginf=0.0) for gradient in double.gradients.values())
        floor = _FLOOR * max((_norm(gradient) for gradient in gradients), default=0.0)
        for name, gradient in actual.gradients.items():
            others = [result.gradients.get(name, np.zeros_like(gradient)) for result in (single, double)]
            arrays = [self._without_padding(name, each) for each in (gradient, *others)]
            found[f"{_GRADIENT}{name!r}"] = difference(_where_finite(*arrays), relative, floor)
        return {what: fault for what, fault in found.items() if fault}

    @property
    def _is_doubled(self) -> bool:
        """Whether the module also runs in double precision, as far as it can."""
        return bool(sum(p.numel() for p in self.module.parameters()) <= _DOUBLE_ELEMENTS)

    def _without_padding(self, name: str, gradient: np.ndarray) -> np.ndarray:
        row = self.padding.get(id(self.parameters[name]))
        return gradient if row is None else np.delete(gradient, row, axis=0)

    def _feed(self, call: Call, states: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        from ortflow.export_reference import NotCompared, tensors_of

        given = tensors_of(call, self.module.forward)
        if len(given) != len(self.inputs):
            raise NotCompared("the file has other inputs than forward")
        values = {name: parameter.detach().numpy() for name, parameter in self.parameters.items()}
        buffers = dict(call.module.named_buffers())
        values |= {name: buffers[name].detach().numpy() for name in self.states}
        return {**values, **(states or {}), **dict(zip(self.inputs, given, strict=True))}

    def _computed(
        self, call: Call, weights: list[np.ndarray | None], states: Mapping[str, np.ndarray] | None = None
    ) -> Result | None:
        """Outputs and gradients in training mode; None if they cannot be computed, which is then reported."""
        from ortflow.export_gradients import run, training_graph
        from ortflow.export_reference import Result

        trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        named = {name: weight for name, weight in zip(self.outputs, weights, strict=False) if weight is not None}
        if not trained or not named or len(weights) != len(self.outputs):
            return None
        by = {name: f"ortflow.weights.{place}" for place, name in enumerate(named)}
        try:
            if self._graph is None:
                self._graph = training_graph(self.model, trained, self._frozen(), by)
            graph, reached = self._graph
            values = run(graph, {**self._feed(call, states), **{by[name]: weight for name, weight in named.items()}})
        except (UserError, RuntimeError) as error:
            self.left_out = f"gradients were not compared with PyTorch's: {error}"
            return None
        gradients = {name: np.zeros(tuple(self.parameters[name].shape), np.float32) for name in trained}
        gradients |= {name: values[f"{name}_grad"] for name in reached}
        updates = {name: values[UPDATED + name] for name in self.states}
        return Result([values[name] for name in self.outputs], gradients, updates)

    def _evaluated(self, call: Call, *, dropout: bool = True) -> Result:
        """Outputs, with running statistics."""
        from ortflow.export_gradients import evaluation_graph, run
        from ortflow.export_random import NotFixed, fix_in_onnx
        from ortflow.export_reference import NotCompared, Result

        try:
            model = evaluation_graph(self.model if dropout else self._random)
            fix_in_onnx(model.graph)
            values = run(model, self._feed(call))
        except NotFixed as error:
            raise NotCompared(f"{error} is random") from None
        except (UserError, RuntimeError) as error:
            raise NotCompared(str(error)) from None
        return Result([values[name] for name in self.outputs], {})

    def _frozen(self) -> set[str]:
        """Running statistics of normalisations that stay in evaluation mode."""
        import torch

        return {
            f"{name}.{buffer}" if name else buffer
            for name, part in self.module.named_modules(remove_duplicate=False)
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and not part.training
            for buffer in ("running_mean", "running_var")
        }


def difference(values: list[np.ndarray], relative: float, floor: float, rounding: float = _ROUNDING) -> str:
    """How a result differs by more than rounding; empty if it does not.

    `values`: of the file, and of the module in single and in double precision. `rounding`: the allowed error as a
    multiple of that between the two.
    """
    actual, single, double = values
    if actual.shape != double.shape:
        return f"of shape {list(actual.shape)}, not {list(double.shape)}"
    if not np.issubdtype(actual.dtype, np.floating):
        return ""  # rounding determines which of equal values is the largest
    if not np.isfinite(actual).all():
        return _NOT_FINITE
    norm, off = _norm(double), _norm(actual.astype(np.float64) - double)
    if off <= rounding * _norm(single.astype(np.float64) - double) + relative * norm + floor + 1e-7:
        return ""
    return f"{off / norm:.1%} off" if norm > floor else f"of norm {_norm(actual):.2g}, not 0"


def _where_finite(actual: np.ndarray, single: np.ndarray, double: np.ndarray) -> list[np.ndarray]:
    """The arrays with 0 where the module's are infinite or NaN."""
    if not (actual.shape == single.shape == double.shape) or not np.issubdtype(single.dtype, np.floating):
        return [actual, single, double]
    finite = np.isfinite(single) & np.isfinite(double)
    return [np.where(finite, array, 0) for array in (actual, single, double)]


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64).ravel()))
