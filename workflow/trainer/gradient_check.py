"""Checks the gradient that a run will train with, on a real micro-batch, before the first step.

Two independent checks. First, ortflow's kernels are compared with the same graph of ONNX Runtime's operators, for every
gradient. Then the gradient is compared with differences of the loss along random directions of the parameters. Called
by the graph trainer with its buffers: parameters are moved in place and restored, but not behind an error, which ends
the run.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from ortflow.workflow.device import Buffer
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet, fused_of, half_of, on_cuda_of, with_kernels_of
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer.checked_part import CheckedPart, CheckedTensor
from ortflow.workflow.trainer.differences import (
    SMALLEST_SCALE,
    Differences,
    Disagreement,
    Tensor,
    Undecided,
    Vector,
    norm,
)
from ortflow.workflow.trainer.first_gradient import Checked
from ortflow.workflow.trainer.same_masks import standard_graph

VERSION = 4
"""Version of the check: changing it repeats the check in every run."""
TOLERANCE = 1e-2
"""Tolerance between two sets of kernels, for a tensor's gradient."""
FLOOR = 1e-4
"""Fraction of the whole gradient, per element, below which gradients count as rounding."""
LOSS_TOLERANCE = 1e-4
MAGNIFIED = 20.0
"""A model that magnifies rounding may differ by so many times what moving its parameters by their last bit does."""
PLACES = (1e-2, 3e-2, 5e-2)
"""How far the parameters move, of their tensor's root mean square, where kernels seem to differ. At a kink of a
function two right gradients differ, and a deep network has many; but at one of these places right ones agree."""
NOISY = 0.01
"""Fraction of a gradient that changes with the last bit of the parameters, above which differences are inconclusive."""
SECONDS, STEPS = 4.0, 4
"""Duration of the comparison with differences, in seconds or steps, whichever is longer."""
EVALUATIONS = 8
"""Evaluations of the loss that the comparison of a correct gradient needs."""
AT_A_TIME = 16
"""Number of values inside the graph that are fetched together."""


def key_of(graphs: GraphSet, kernels: str) -> str:
    """A hash of everything that determines the gradient: graphs, kernels, runtime and the check itself."""
    key = hashlib.sha256(f"{VERSION} {onnxruntime.__version__} {kernels}".encode() + graphs.train.read_bytes())
    for form in (with_kernels_of, on_cuda_of, fused_of, half_of):
        path = form(graphs.train)
        key.update(path.read_bytes() if path.exists() else b"")
    return key.hexdigest()


class GradientCheck:
    """One check. `bind` opens a training graph over the trainer's buffers, `feed` gives it the micro-batch."""

    def __init__(
        self,
        graphs: GraphSet,
        sessions: Sessions,
        bind: Callable[[Path | bytes], Binding],
        feed: Callable[[Binding], None],
        *,
        part: CheckedPart,
        sums: Buffer,
        seed: int,
    ) -> None:
        self._graphs, self._sessions, self._bind, self._feed = graphs, sessions, bind, feed
        self._part, self._sums, self._seed = part, sums, seed
        self._parameters, self._gradients, self._trained = part.parameters, part.gradients, part.tensors
        self._standard = standard_graph(sessions, graphs.train)

    def run(self, training: Binding) -> Checked | None:
        """Check `training`; None if the micro-batch has no finite loss and gradient.

        Raises UserError that names the tensors and the first node that differs.
        """
        start = time.perf_counter()
        loss = self._loss(training)
        step_seconds = time.perf_counter() - start
        gradients = self._gradients.read()
        if not np.isfinite(loss) or not self._finite(gradients):
            return None
        others = []
        if self._sessions.form_of(self._graphs.train) is not None:
            self._compare_kernels(training, loss, gradients)
            others.append("ONNX Runtime's operators")
        groups, undecided = self._compare_differences(training, loss, gradients, max(SECONDS, STEPS * step_seconds))
        grouped = f" in {groups} groups" if groups < len(self._trained) else ""
        if undecided < groups:
            some = f", {undecided} of {groups} undecided" if undecided else ""
            others.append(f"differences of the loss{grouped}{some}")
        compared = f"{len(self._trained)} tensors against {' and '.join(others)}" if others else ""
        return Checked(compared, decided=undecided < groups)

    def _loss(self, binding: Binding) -> float:
        with self._part.passing():
            self._feed(binding)
            onnxruntime.set_seed(self._seed)
            binding.run()
        return self._total(float(self._sums.read()[0])) / self._part.ranks

    def _total(self, number: float) -> float:
        return float(self._part.totals(np.array([number]))[0])

    def _finite(self, gradients: Vector) -> bool:
        return self._total(float(not np.isfinite(gradients).all())) == 0

    def _norms(self, vectors: Iterable[Vector]) -> list[float]:
        """The norm of each vector, of which each rank has a part."""
        squares = self._part.totals(np.array([float(np.vdot(vector, vector)) for vector in vectors]))
        return [math.sqrt(square) for square in squares]

    def _values_in(self, model: bytes, names: Sequence[str]) -> list[np.ndarray]:
        """Values inside a training graph."""
        from ortflow.workflow.graph.objective.loss_graph import with_outputs

        binding = self._bind(with_outputs(model, names))
        with self._part.passing():
            self._feed(binding)
            onnxruntime.set_seed(self._seed)
            return binding.fetch(names)

    def _compare_kernels(self, training: Binding, loss: float, gradients: Vector) -> None:
        standard = self._bind(self._standard)
        other = self._loss(standard)
        wrong = self._wrong(training, gradients)
        far = abs(other - loss)
        if far > LOSS_TOLERANCE * max(1.0, abs(loss)) and not far <= MAGNIFIED * abs(self._shaken(training) - loss):
            raise self._differ(f"the loss ({loss:.7g}, {other:.7g})")
        for place in PLACES:
            if wrong:
                there = self._wrong_at(place, training, standard)
                wrong = {name: share for name, share in wrong.items() if name in there}
        for name, share in wrong.items():
            raise self._differ(f"the gradient of {name!r} (by {share:.2g} of it)")

    def _wrong(self, training: Binding, gradients: Vector) -> dict[str, float]:
        """Tensors whose gradient in the buffer differs from the given one, and the relative difference."""
        errors, scales = self._errors(gradients), self._scales(gradients)
        wrong = [name for name, error in errors.items() if not error <= TOLERANCE * scales[name]]
        if wrong:
            self._shaken(training)
            rounding = self._errors(gradients)
            wrong = [name for name in wrong if not errors[name] <= MAGNIFIED * rounding[name]]
        return {name: errors[name] / max(scales[name], 1e-30) for name in wrong}

    def _wrong_at(self, place: float, training: Binding, standard: Binding) -> Collection[str]:
        """Tensors whose gradients still differ at moved parameters; all if there is no gradient."""
        values = self._parameters.read()
        self._parameters.write(self._moved(values, place))
        self._loss(training)
        gradients = self._gradients.read()
        self._loss(standard)
        wrong: Collection[str] = {tensor.name for tensor in self._trained}
        if self._finite(self._gradients.read()):
            wrong = self._wrong(training, gradients)
        self._parameters.write(values)
        return wrong

    def _errors(self, gradients: Vector) -> dict[str, float]:
        """Difference of each tensor's gradient in the buffer from the given one."""
        found = self._norms(self._gradient(tensor) - _part(gradients, tensor) for tensor in self._trained)
        return {tensor.name: error for tensor, error in zip(self._trained, found, strict=True)}

    def _gradient(self, tensor: CheckedTensor) -> Vector:
        return self._gradients.slice(tensor.start, tensor.stop).read()

    def _scales(self, gradients: Vector) -> dict[str, float]:
        """The norm of each tensor's gradient, or, where that is rounding, of its share of the whole."""
        whole, *norms = self._norms([gradients, *(_part(gradients, tensor) for tensor in self._trained)])
        return {
            tensor.name: max(found, FLOOR * whole * (tensor.count / self._part.size) ** 0.5)
            for tensor, found in zip(self._trained, norms, strict=True)
        }

    def _shaken(self, training: Binding) -> float:
        """The loss, with the gradients in the buffer, after every parameter has moved by about its last bit."""
        values = self._parameters.read()
        signs = np.random.default_rng(self._seed).choice(np.array([-1e-7, 1e-7], np.float32), values.size)
        self._parameters.write(values * (1 + signs))
        loss = self._loss(training)
        self._parameters.write(values)
        return loss

    def _moved(self, values: Vector, share: float) -> Vector:
        """A copy of the parameters, the trained ones moved by this fraction of their tensor's root mean square."""
        moved: Vector = values.copy()
        random = np.random.default_rng(self._seed)
        for tensor in self._trained:
            part = _part(moved, tensor)
            step = np.float32(share * max(norm(part) / max(1, part.size) ** 0.5, SMALLEST_SCALE))
            part += random.choice(np.array([-step, step]), part.size)
        return moved

    def _differ(self, what: str) -> UserError:
        node = self._first_difference()
        return UserError(
            f"ortflow's kernels and ONNX Runtime's operators differ in {what}"
            + (f"; the first node whose output differs is {node}" if node else ""),
            where="resources.kernels",
            fix="set resources.kernels: onnxruntime, and report the model to ortflow",
        )

    def _first_difference(self) -> str | None:
        from ortflow.workflow.graph.objective.loss_graph import common_values, maker

        standard, form = self._standard, self._sessions.form_of(self._graphs.train)
        faster = form.read_bytes() if form is not None else standard
        names = common_values(standard, faster)
        for start in range(0, len(names), AT_A_TIME):
            some = names[start : start + AT_A_TIME]
            values = [self._values_in(data, some) for data in (standard, faster)]
            for name, a, b in zip(some, *values, strict=True):
                alike = a.shape == b.shape and np.allclose(a, b, rtol=1e-3, atol=1e-4 * float(np.abs(a).max(initial=0)))
                if self._part.agreed(int(not alike)):
                    return maker(standard, name)
        return None

    def _compare_differences(
        self, training: Binding, loss: float, gradients: Vector, seconds: float
    ) -> tuple[int, int]:
        """The groups of tensors, and of how many differences of the loss decide nothing."""
        forward = self._forward(training, loss)
        tensors = [
            Tensor(tensor.name, self._parameters.slice(tensor.start, tensor.stop).read(), _part(gradients, tensor))
            for tensor in self._trained
            if tensor.count
        ]
        differences = Differences(lambda moved: self._loss_at(forward, moved, tensors), self._seed, self._total)
        start = time.perf_counter()
        rounding = differences.rounding(tensors)
        each = (time.perf_counter() - start) / differences.evaluations
        groups = _groups(tensors, self._part.agreed(max(1, int(seconds / each) // EVALUATIONS)))
        moved: dict[str, float] = {}
        undecided = 0
        for group in groups:
            found = differences.check(group, rounding)
            undecided += isinstance(found, Undecided)
            if isinstance(found, Disagreement):
                if not moved:
                    self._shaken(training)
                    moved = self._errors(gradients)
                alone = [
                    t for t in group if len(group) > 1 and isinstance(differences.check([t], rounding), Disagreement)
                ]
                # A gradient that is more than rounding stays nearly the same where the parameters are shaken.
                some = alone or group
                norms = self._norms(tensor.gradient for tensor in some)
                exact = [t.name for t, size in zip(some, norms, strict=True) if moved[t.name] <= NOISY * size]
                if exact:
                    raise self._contradiction(exact, found)
        return len(groups), undecided

    def _forward(self, training: Binding, loss: float) -> Binding:
        """The loss without its gradients, if it draws the same random numbers as the training graph.

        A value that passes no gradient keeps what it is now: to the gradient it is a constant.
        """
        from ortflow.workflow.graph.objective.loss_graph import loss_graph, stopped_values, with_fixed

        train = self._standard
        stopped = stopped_values(train)
        if stopped:
            train = with_fixed(train, dict(zip(stopped, self._values_in(train, stopped), strict=True)))
        forward = self._bind(loss_graph(train))
        if abs(self._loss(forward) - loss) <= LOSS_TOLERANCE * max(1.0, abs(loss)):
            return forward
        return self._bind(train) if stopped else training

    def _loss_at(self, forward: Binding, moved: Iterable[tuple[str, Vector]], tensors: Sequence[Tensor]) -> float:
        places = {tensor.name: self._parameters.slice(tensor.start, tensor.stop) for tensor in self._trained}
        for name, values in moved:
            places[name].write(values)
        loss = self._loss(forward)
        for tensor in tensors:
            places[tensor.name].write(tensor.values)
        return loss

    def _contradiction(self, names: Sequence[str], found: Disagreement) -> UserError:
        from ortflow.workflow.graph.objective.loss_graph import reader

        some = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return UserError(
            f"the gradient of {some} disagrees with finite differences of the loss: along it the loss changes "
            f"by {found.measured:.4g}, and the gradient predicts {found.claimed:.4g}; the first node that reads "
            f"{names[0]!r} is {reader(self._standard, names[0])}",
            where="model.path",
            fix="report the model to ortflow; train.check_gradient: false trains it anyway",
        )


def _groups(tensors: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    """Groups of adjacent tensors, at most `count` of them."""
    size = -(-len(tensors) // count)
    return [tensors[start : start + size] for start in range(0, len(tensors), size)]


def _part(gradients: Vector, tensor: CheckedTensor) -> Vector:
    return gradients[tensor.start : tensor.stop]
