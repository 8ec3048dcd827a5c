"""What the checks of a gradient have in common: passes of a training graph over a micro-batch, and moved parameters.

Parameters are moved in place and restored, but not behind an error, which ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ortflow.workflow.device import Buffer
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer.check.checked_part import CheckedPart, CheckedTensor
from ortflow.workflow.trainer.check.differences import Vector, scale_of
from ortflow.workflow.trainer.check.same_masks import standard_graph

PLACES = (1e-2, 3e-2, 5e-2)
"""How far the parameters move, relative to their tensor's root mean square, where a gradient seems wrong. At a kink of
a function two right gradients differ, and a deep network has many; but at one of these places right ones agree."""


class CheckedGraph:
    """A training graph. `bind` opens one over the trainer's buffers, `feed` gives it the micro-batch."""

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
        self.bind, self.part, self.seed = bind, part, seed
        self._feed, self._sums = feed, sums
        self.parameters, self.gradients, self.trained = part.parameters, part.gradients, part.tensors
        self.standard = standard_graph(sessions, graphs.train)
        """The graph of ONNX Runtime's operators."""

    def loss(self, binding: Binding) -> float:
        """Run it; the loss of the micro-batch. A training graph writes the gradients."""
        with self.part.passing():
            self._feed(binding)
            # Dropout's masks come from ONNX Runtime's global generator: each run begins with the same ones.
            onnxruntime.set_seed(self.seed)
            binding.run()
        return self.total(float(self._sums.read()[0])) / self.part.ranks

    def values_in(self, model: bytes, names: Sequence[str]) -> list[np.ndarray]:
        """Values inside a training graph."""
        from ortflow.workflow.graph.objective.loss_graph import with_outputs

        binding = self.bind(with_outputs(model, names))
        with self.part.passing():
            self._feed(binding)
            onnxruntime.set_seed(self.seed)
            return binding.fetch(names)

    def total(self, number: float) -> float:
        """The sum over the ranks."""
        return float(self.part.totals(np.array([number]))[0])

    def finite(self, gradients: Vector) -> bool:
        """Whether the gradients of all ranks are."""
        return self.total(float(not np.isfinite(gradients).all())) == 0

    def norms(self, vectors: Iterable[Vector]) -> list[float]:
        """The norm of each vector, of which each rank has a part."""
        squares = self.part.totals(np.array([float(np.vdot(vector, vector)) for vector in vectors]))
        return [math.sqrt(square) for square in squares]

    def errors(self, gradients: Vector) -> dict[str, float]:
        """Difference of each tensor's gradient in the buffer from the given one."""
        errors = self.norms(self._gradient(tensor) - part_of(gradients, tensor) for tensor in self.trained)
        return {tensor.name: error for tensor, error in zip(self.trained, errors, strict=True)}

    def _gradient(self, tensor: CheckedTensor) -> Vector:
        return self.gradients.slice(tensor.start, tensor.stop).read()

    def shaken(self, training: Binding) -> float:
        """The loss, with the gradients in the buffer, after every parameter has moved by about its last bit."""
        values = self.parameters.read()
        signs = np.random.default_rng(self.seed).choice(np.array([-1e-7, 1e-7], np.float32), values.size)
        with self._at(values, values * (1 + signs)):
            return self.loss(training)

    @contextmanager
    def moved(self, share: float) -> Iterator[None]:
        """The trained parameters are elsewhere, by about this fraction of their tensor's root mean square.

        Each element moves by another length: elements that were equal, as in a new tensor of zeros, are not equal.
        """
        values = self.parameters.read()
        moved: Vector = values.copy()
        random = np.random.default_rng(self.seed)
        for tensor in self.trained:
            part = part_of(moved, tensor)
            step = np.float32(share * scale_of(part))
            lengths = random.random(part.size, np.float32) + np.float32(0.5)
            part += step * np.copysign(lengths, random.random(part.size, np.float32) - np.float32(0.5))
        with self._at(values, moved):
            yield

    @contextmanager
    def _at(self, values: Vector, moved: Vector) -> Iterator[None]:
        self.parameters.write(moved)
        yield
        self.parameters.write(values)


def part_of(gradients: Vector, tensor: CheckedTensor) -> Vector:
    """A tensor's elements of a flat buffer."""
    return gradients[tensor.start : tensor.stop]
