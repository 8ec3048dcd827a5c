"""What differs between an exported file and its module, at one point: outputs, gradients, state of a second call.

Called by `ortflow.exporter.file_check` at several points, and by `ortflow.exporter.evaluation_form`. The module also
runs in double precision, which shows the error due to rounding.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from ortflow.exporter.difference import (
    RELATIVE,
    RELATIVE_ALONE,
    difference,
    gradient_differences,
    norm,
    output_differences,
)
from ortflow.exporter.file_session import ExportedFile

if TYPE_CHECKING:
    import onnx
    import torch

    from ortflow.exporter.reference import Call, Result

_ROUNDINGS = 3
"""Other roundings of the module that a difference at a point of zeros or equal elements is compared with."""
_DOUBLE_ELEMENTS = 50_000_000
"""Values of parameters beyond which double precision would take too long."""


class Comparison:
    """Of an exported file, in its training form, with its module, in the modes that it was traced in."""

    def __init__(self, model: onnx.ModelProto, module: torch.nn.Module) -> None:
        self.file = ExportedFile(model, module)

    def faults(self, call: Call) -> dict[str, str]:
        """Outputs and gradients that differ, and how. Raises NotCompared if the module or the file does not run."""
        from ortflow.exporter.reference import compute, with_running_statistics

        single, weights = compute(call, None)
        actual = self.file.computed(call, weights)
        with contextlib.ExitStack() as modes:
            if actual is None:
                modes.enter_context(with_running_statistics(call.module))
                single, weights = compute(call, [None] * len(weights))
                actual = self.file.evaluated(call)
            return self._differences(call, weights, actual, single)

    def later_faults(self, call: Call) -> dict[str, str]:
        """How state, and the outputs of a second call, differ: what `forward` keeps for its next call."""
        from ortflow.exporter.reference import compute

        first, weights = compute(call, None)
        once = self.file.computed(call, weights)
        if once is None:
            return {}
        second, _ = compute(call, weights, times=2)
        twice = self.file.computed(call, weights, once.buffers)
        if twice is None or not second.is_finite:
            return {}
        faults = {}
        for name, actual in once.buffers.items():
            faults[f"buffer {name!r}"] = difference([actual, first.buffers[name], first.buffers[name]], RELATIVE, 0.0)
        for name, actual, expected, earlier in zip(
            self.file.outputs, twice.outputs, second.outputs, first.outputs, strict=True
        ):
            # The first call's error shows the rounding.
            floor = norm(once.outputs[self.file.outputs.index(name)].astype(np.float64) - earlier)
            fault = difference([actual, expected, expected], RELATIVE, 2 * floor)
            faults[f"output {name!r} of a second step"] = fault
        return {name: fault for name, fault in faults.items() if fault}

    def faults_of_size(self, call: Call) -> dict[str, str]:
        """Outputs that differ for another number of samples; none if the module does not take it."""
        from ortflow.exporter.reference import NotCompared, compute

        try:
            single, weights = compute(call, None)
        except NotCompared:
            return {}
        left_out = self.file.left_out
        actual = self.file.computed(call, weights)
        if actual is None and not left_out and self.file.left_out:
            return {"the file": "not able to run with another size"}
        if actual is None or not single.is_finite:
            return {}
        faults = {}
        for name, value, expected in zip(self.file.outputs, actual.outputs, single.outputs, strict=True):
            faults[f"output {name!r} for another size"] = difference([value, expected, expected], RELATIVE_ALONE, 0.0)
        return {name: fault for name, fault in faults.items() if fault}

    def faults_where_finite(self, call: Call) -> dict[str, str]:
        """Outputs and gradients that differ where the module's are finite; none if it does not take the inputs."""
        from ortflow.exporter.reference import NotCompared, compute, doubled, with_running_statistics

        try:
            single, weights = compute(call, None)
        except NotCompared:
            return {}
        actual = self.file.computed(call, weights)
        with contextlib.ExitStack() as modes:
            if actual is None:
                if self.file.is_differentiated:
                    return {"the file": "not able to run"}
                modes.enter_context(with_running_statistics(call.module))
                single, weights = compute(call, [None] * len(weights))
                actual = self.file.evaluated(call)
            faults = self._differences_of(actual, single, single, RELATIVE)
            exact = single
            if faults and self._is_doubled:
                with contextlib.suppress(NotCompared), doubled(call) as raised:
                    exact = compute(raised, weights)[0]
                faults = self._differences_of(actual, single, exact, RELATIVE)
            for seed in range(_ROUNDINGS) if faults else ():
                with contextlib.suppress(NotCompared):
                    other = compute(call, weights, rounding=seed)[0]
                    still = self._differences_of(actual, other, exact, RELATIVE)
                    faults = {name: fault for name, fault in faults.items() if name in still}
        return faults

    def evaluation_faults(self, call: Call) -> dict[str, str]:
        """Outputs of the module in evaluation mode that differ from the file's. Raises NotCompared."""
        from ortflow.exporter.reference import Result, compute

        single, weights = compute(call, None)
        if len(single.outputs) != len(self.file.outputs):
            return {"the number of outputs": f"{len(single.outputs)}, not {len(self.file.outputs)}"}
        from_file = self.file.evaluated(call, dropout=False)
        return self._differences(call, [None] * len(weights), from_file, Result(single.outputs, {}))

    def _differences(
        self, call: Call, weights: list[np.ndarray | None], actual: Result, single: Result
    ) -> dict[str, str]:
        from ortflow.exporter.reference import NotCompared, NotFinite, compute, doubled

        if len(single.outputs) != len(actual.outputs):
            raise NotCompared("the file has other outputs than the module")
        if not single.is_finite:
            raise NotFinite("the module's own results on the example inputs are not finite")
        double, relative = single, RELATIVE_ALONE
        if self._is_doubled:
            with contextlib.suppress(NotCompared), doubled(call) as raised:
                found_in_double = compute(raised, weights)[0]
                # A mask's lowest number may be one of fp32 in the code, and overflow elsewhere.
                if found_in_double.is_finite:
                    double, relative = found_in_double, RELATIVE
        return self._differences_of(actual, single, double, relative)

    def _differences_of(self, actual: Result, single: Result, double: Result, relative: float) -> dict[str, str]:
        """How the file's result differs where the module's are finite."""
        outputs = actual.outputs, single.outputs, double.outputs
        gradients = actual.gradients, single.gradients, double.gradients
        return {
            **output_differences(self.file.outputs, *outputs, relative),
            **gradient_differences(*gradients, relative, self.file.padding),
        }

    @property
    def _is_doubled(self) -> bool:
        """Whether the module also runs in double precision, as far as it can."""
        return bool(sum(p.numel() for p in self.file.module.parameters()) <= _DOUBLE_ELEMENTS)
