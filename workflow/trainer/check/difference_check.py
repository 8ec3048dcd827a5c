"""Compares the gradient of a training graph with differences of its loss along random directions of the parameters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from ortflow.workflow.errors import UserError
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer.check.checked_graph import CheckedGraph, part_of
from ortflow.workflow.trainer.check.differences import (
    UNDECIDED,
    Differences,
    Disagreement,
    Tensor,
    Undecided,
    Vector,
    Verdict,
)

NOISY = 0.01
"""Fraction of a gradient that changes with the last bit of the parameters, above which differences are inconclusive."""
EVALUATIONS = 8
"""Evaluations of the loss that the comparison of a correct gradient needs."""
ELSEWHERE = (0.3, 0.5, 1.0)
"""How far parameters move, relative to their tensor's root mean square, where a gradient seems wrong: further than the
steps of the differences, which would reach the kink that was left. Of 64 right gradients each agreed at one of these
places, and of 55 wrong ones none."""
NAMED = 5
"""Tensors that are compared again elsewhere, and named if they are wrong."""
LOSS_TOLERANCE = 1e-4


class DifferenceCheck:
    """One comparison, of `training` on a micro-batch."""

    def __init__(self, graph: CheckedGraph, training: Binding) -> None:
        self._graph, self._training = graph, training

    def run(self, loss: float, gradients: Vector, seconds: float) -> tuple[int, int]:
        """The groups of tensors that were compared in about so many seconds, and how many of them are undecided.

        Raises UserError that names tensors.
        """
        tensors = self._tensors(gradients)
        start = time.perf_counter()
        differences, rounding = self._differences(tensors, loss)
        evaluation_seconds = (time.perf_counter() - start) / differences.evaluations
        groups = _groups(tensors, self._graph.part.agreed(max(1, int(seconds / evaluation_seconds) // EVALUATIONS)))
        moved: dict[str, float] = {}
        undecided = 0
        for group in groups:
            verdict = differences.check(group, rounding)
            undecided += isinstance(verdict, Undecided)
            if isinstance(verdict, Disagreement):
                if not moved:
                    self._graph.shaken(self._training)
                    moved = self._graph.errors(gradients)
                culprits = [
                    t for t in group if len(group) > 1 and isinstance(differences.check([t], rounding), Disagreement)
                ]
                # A gradient that is more than rounding stays nearly the same where the parameters are shaken.
                suspects = culprits or group
                norms = self._graph.norms(tensor.gradient for tensor in suspects)
                exact = [t.name for t, size in zip(suspects, norms, strict=True) if moved[t.name] <= NOISY * size]
                wrong = self._wrong_elsewhere(exact[:NAMED])
                if wrong:
                    raise self._contradiction(wrong, len(exact) - len(wrong) if len(exact) > NAMED else 0, verdict)
                undecided += 1
        return len(groups), undecided

    def _tensors(self, gradients: Vector) -> list[Tensor]:
        parameters = self._graph.parameters
        return [
            Tensor(tensor.name, parameters.slice(tensor.start, tensor.stop).read(), part_of(gradients, tensor))
            for tensor in self._graph.trained
            if tensor.count
        ]

    def _differences(self, tensors: Sequence[Tensor], loss: float) -> tuple[Differences, float]:
        """Those at the present parameters, with this loss, and the loss's rounding."""
        forward = self._forward(loss)
        differences = Differences(
            lambda moved: self._loss_at(forward, moved, tensors), self._graph.seed, self._graph.total
        )
        return differences, differences.rounding(tensors)

    def _wrong_elsewhere(self, names: Sequence[str]) -> list[str]:
        """Which of these tensors have a gradient that disagrees with differences elsewhere, and agrees nowhere.

        Branches of residual networks often begin with weights of zero. Then zeros of the shortcut are at the kink of
        the ReLU behind the sum, and a central difference is between the slopes of its two sides.
        """
        suspects, disagree = list(names), set[str]()
        for place in ELSEWHERE:
            if suspects:
                with self._graph.moved(place):
                    verdicts = self._verdicts(suspects)
                disagree |= {name for name in suspects if isinstance(verdicts[name], Disagreement)}
                suspects = [name for name in suspects if verdicts[name] is not None]
        return [name for name in suspects if name in disagree]

    def _verdicts(self, names: Sequence[str]) -> dict[str, Verdict]:
        """The comparison of each of these tensors at the present parameters."""
        loss = self._graph.loss(self._training)
        gradients = self._graph.gradients.read()
        if not (np.isfinite(loss) and self._graph.finite(gradients)):
            return dict.fromkeys(names, UNDECIDED)
        tensors = self._tensors(gradients)
        differences, rounding = self._differences(tensors, loss)
        return {t.name: differences.check([t], rounding) for t in tensors if t.name in names}

    def _forward(self, loss: float) -> Binding:
        """The loss without its gradients, if it draws the same random numbers as the training graph.

        A value that passes no gradient keeps what it is now: to the gradient it is a constant.
        """
        from ortflow.workflow.graph.objective.loss_graph import loss_graph, stopped_values, with_fixed

        train = self._graph.standard
        stopped = stopped_values(train)
        if stopped:
            train = with_fixed(train, dict(zip(stopped, self._graph.values_in(train, stopped), strict=True)))
        forward = self._graph.bind(loss_graph(train))
        if abs(self._graph.loss(forward) - loss) <= LOSS_TOLERANCE * max(1.0, abs(loss)):
            return forward
        return self._graph.bind(train) if stopped else self._training

    def _loss_at(self, forward: Binding, moved: Iterable[tuple[str, Vector]], tensors: Sequence[Tensor]) -> float:
        parameters = self._graph.parameters
        places = {tensor.name: parameters.slice(tensor.start, tensor.stop) for tensor in self._graph.trained}
        for name, values in moved:
            places[name].write(values)
        loss = self._graph.loss(forward)
        for tensor in tensors:
            places[tensor.name].write(tensor.values)
        return loss

    def _contradiction(self, names: Sequence[str], unnamed: int, disagreement: Disagreement) -> UserError:
        from ortflow.workflow.graph.objective.loss_graph import reader

        quoted_names = ", ".join(map(repr, names)) + (f" and {unnamed} more" if unnamed else "")
        return UserError(
            f"the gradient of {quoted_names} disagrees with finite differences of the loss: along it the loss changes "
            f"by {disagreement.measured:.4g}, and the gradient predicts {disagreement.claimed:.4g}; the first node "
            f"that reads {names[0]!r} is {reader(self._graph.standard, names[0])}",
            where="model.path",
            fix="report the model to ortflow; train.check_gradient: false trains it anyway",
        )


def _groups(tensors: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    """Groups of adjacent tensors, at most `count` of them."""
    size = -(-len(tensors) // count)
    return [tensors[start : start + size] for start in range(0, len(tensors), size)]
