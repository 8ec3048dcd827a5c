"""Checks the gradient that a run will train with, on a real micro-batch, before the first step.

Two independent checks. First, ortflow's kernels are compared with the same graph of ONNX Runtime's operators, for every
gradient. Then the gradient is compared with differences of the loss (`difference_check`). Called by the graph trainer
with its buffers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection

import numpy as np

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer.check.checked_graph import PLACES, CheckedGraph, part_of
from ortflow.workflow.trainer.check.difference_check import LOSS_TOLERANCE, DifferenceCheck
from ortflow.workflow.trainer.check.differences import Vector
from ortflow.workflow.trainer.check.first_gradient import Checked

VERSION = 6
"""Version of the check: changing it repeats the check in every run."""
TOLERANCE = 1e-2
"""Tolerance between two sets of kernels, for a tensor's gradient."""
FLOOR = 1e-4
"""Fraction of the whole gradient, per element, below which gradients count as rounding."""
MAGNIFIED = 20.0
"""A model that magnifies rounding may differ by so many times what moving its parameters by their last bit does."""
SECONDS, STEPS = 4.0, 4
"""Duration of the comparison with differences, in seconds or steps, whichever is longer."""
AT_A_TIME = 16
"""Number of values inside the graph that are fetched together."""


def key_of(graphs: GraphSet, kernels: str) -> str:
    """A hash of everything that determines the gradient: graphs, kernels, runtime and the check itself."""
    key = hashlib.sha256(f"{VERSION} {onnxruntime.__version__} {kernels}".encode() + graphs.train.read_bytes())
    for form in (Form.KERNELS, Form.CUDA, Form.FUSED, Form.HALF):
        path = form.of(graphs.train)
        key.update(path.read_bytes() if path.exists() else b"")
    return key.hexdigest()


class GradientCheck:
    """One check."""

    def __init__(self, graphs: GraphSet, sessions: Sessions, graph: CheckedGraph) -> None:
        self._graphs, self._sessions, self._graph = graphs, sessions, graph
        self._part, self._trained = graph.part, graph.trained

    def run(self, training: Binding) -> Checked | None:
        """Check `training`; None if the micro-batch has no finite loss and gradient.

        Raises UserError that names the tensors and the first node that differs.
        """
        start = time.perf_counter()
        loss = self._graph.loss(training)
        step_seconds = time.perf_counter() - start
        gradients = self._graph.gradients.read()
        if not np.isfinite(loss) or not self._graph.finite(gradients):
            return None
        references = []
        if self._sessions.form_of(self._graphs.train) is not None:
            self._compare_kernels(training, loss, gradients)
            references.append("ONNX Runtime's operators")
        differences = DifferenceCheck(self._graph, training)
        groups, undecided = differences.run(loss, gradients, max(SECONDS, STEPS * step_seconds))
        grouped = f" in {groups} groups" if groups < len(self._trained) else ""
        if undecided < groups:
            undecided_groups = f", {undecided} of {groups} undecided" if undecided else ""
            references.append(f"differences of the loss{grouped}{undecided_groups}")
        compared = f"{len(self._trained)} tensors against {' and '.join(references)}" if references else ""
        return Checked(compared, decided=undecided < groups)

    def _compare_kernels(self, training: Binding, loss: float, gradients: Vector) -> None:
        standard = self._graph.bind(self._graph.standard)
        other = self._graph.loss(standard)
        wrong = self._wrong(training, gradients)
        far = abs(other - loss)
        if far > LOSS_TOLERANCE * max(1.0, abs(loss)):
            rounding = abs(self._graph.shaken(training) - loss)
            if not far <= MAGNIFIED * rounding:
                raise self._differ(f"the loss ({loss:.7g}, {other:.7g})")
        for place in PLACES:
            if wrong:
                still_wrong = self._wrong_at(place, training, standard)
                wrong = {name: share for name, share in wrong.items() if name in still_wrong}
        for name, share in wrong.items():
            raise self._differ(f"the gradient of {name!r} (by {share:.2g} of it)")

    def _wrong(self, training: Binding, gradients: Vector) -> dict[str, float]:
        """Tensors whose gradient in the buffer differs from the given one, and the relative difference."""
        errors, scales = self._graph.errors(gradients), self._scales(gradients)
        wrong = [name for name, error in errors.items() if not error <= TOLERANCE * scales[name]]
        if wrong:
            self._graph.shaken(training)
            rounding = self._graph.errors(gradients)
            wrong = [name for name in wrong if not errors[name] <= MAGNIFIED * rounding[name]]
        return {name: errors[name] / max(scales[name], 1e-30) for name in wrong}

    def _wrong_at(self, place: float, training: Binding, standard: Binding) -> Collection[str]:
        """Tensors whose gradients still differ at moved parameters; all if there is no gradient."""
        with self._graph.moved(place):
            self._graph.loss(training)
            gradients = self._graph.gradients.read()
            self._graph.loss(standard)
            if self._graph.finite(self._graph.gradients.read()):
                return self._wrong(training, gradients)
            return {tensor.name for tensor in self._trained}

    def _scales(self, gradients: Vector) -> dict[str, float]:
        """The norm of each tensor's gradient, or, where that is rounding, of its share of the whole."""
        whole_norm, *norms = self._graph.norms([gradients, *(part_of(gradients, tensor) for tensor in self._trained)])
        return {
            tensor.name: max(tensor_norm, FLOOR * whole_norm * (tensor.count / self._part.size) ** 0.5)
            for tensor, tensor_norm in zip(self._trained, norms, strict=True)
        }

    def _differ(self, difference: str) -> UserError:
        node = self._first_difference()
        return UserError(
            f"ortflow's kernels and ONNX Runtime's operators differ in {difference}"
            + (f"; the first node whose output differs is {node}" if node else ""),
            where="resources.kernels",
            fix="set resources.kernels: onnxruntime, and report the model to ortflow",
        )

    def _first_difference(self) -> str | None:
        from ortflow.workflow.graph.objective.loss_graph import common_values, maker

        standard, form = self._graph.standard, self._sessions.form_of(self._graphs.train)
        faster = form.read_bytes() if form is not None else standard
        names = common_values(standard, faster)
        for start in range(0, len(names), AT_A_TIME):
            fetched_names = names[start : start + AT_A_TIME]
            values = [self._graph.values_in(data, fetched_names) for data in (standard, faster)]
            for name, a, b in zip(fetched_names, *values, strict=True):
                alike = a.shape == b.shape and np.allclose(a, b, rtol=1e-3, atol=1e-4 * float(np.abs(a).max(initial=0)))
                if self._part.agreed(int(not alike)):
                    return maker(standard, name)
        return None
