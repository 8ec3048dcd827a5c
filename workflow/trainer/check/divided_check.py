"""Checks the gradient of a divided model along random directions against differences of the loss.

All ranks move their parameters together, shared elements alike, and sum their predictions. This covers what a check of
a single graph cannot: sums between parts, messages between stages, tied weights.
"""

from __future__ import annotations

import hashlib
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import UserError
from ortflow.workflow.layout import TRAINED
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.grid import Place
from ortflow.workflow.trainer import MicroBatch, Report
from ortflow.workflow.trainer.check.difference_check import ELSEWHERE
from ortflow.workflow.trainer.check.differences import SMALLEST_SCALE
from ortflow.workflow.trainer.check.first_gradient import Checked, conclude, has_passed
from ortflow.workflow.trainer.divided_reduction import counts, predicts

if TYPE_CHECKING:
    from ortflow.workflow.trainer.check.divided_checker import CheckedHolding

VERSION = 2
"""Version of the check: changing it repeats the check in every run."""
GROUPS = 6
"""Number of groups of tensors that are moved together; each takes four passes."""
REACH = 2e-2
"""How far parameters move, relative to their tensor's root mean square."""
NEARER = (0.2, 0.04)
"""Shares of `REACH` where a difference that seems wrong is measured again: a loss may bend within that reach, and a
right gradient agrees at one of these distances."""
TOLERANCE = 2e-2
"""Tolerance of a derivative."""
ROUNDING = 4e-7
"""Relative rounding error of a loss."""
Vector = npt.NDArray[np.float32]


def key_of(folder: Path, kernels: str, place: Place) -> str:
    """A hash of everything that determines the gradient of a rank at a place of the grid: its graphs, kernels, runtime
    and the check itself.
    """
    key = hashlib.sha256(f"{VERSION} {onnxruntime.__version__} {kernels} {place.stage} {place.part}".encode())
    for path in sorted(folder.glob("*.onnx")):
        key.update(path.name.encode() + path.read_bytes())
    return key.hexdigest()


class DividedCheck:
    """One check, on all ranks of the run."""

    def __init__(self, part: CheckedHolding, ranks: GridRanks, seed: int, report: Report) -> None:
        self._part, self._ranks, self._seed, self._report = part, ranks, seed, report

    def run(self, batch: MicroBatch, keys: Sequence[str] | None) -> None:
        """Run the check, unless one with the same keys of all ranks has passed before. `keys` are on rank 0.

        Raises UserError, equal on all ranks of a replica, if a gradient is wrong. Any error ends the run: what it moved
        stays moved.
        """
        # A GPU would write it back only after messages for which the other rank may have no answer.
        key = hashlib.sha256(" ".join(keys).encode()).hexdigest() if keys is not None else ""
        if self._ranks.world.broadcast_object(keys is not None and has_passed(key)):
            return
        start = time.perf_counter()
        with self._part.exact():
            comparison = self._compare(batch)
        if comparison is not None:
            self._part.compare_precision(comparison[1], batch, self._seed)
        self._part.forget_gradient()
        if self._ranks.world.rank == 0:
            checked = Checked(comparison[0]) if comparison is not None else None
            conclude(key, checked, time.perf_counter() - start, self._report)

    def _compare(self, batch: MicroBatch) -> tuple[str, Vector] | None:
        """What was compared, and this rank's gradient; None if it is not finite."""
        loss, gradients = self._part.gradient_of(batch, self._seed)
        gradient = gradients.read()
        # Each rank predicts from its own graphs: for a tied weight, one term of the gradient.
        if not math.isfinite(self._sum(float(np.abs(gradient, dtype=np.float64).sum()) + abs(loss))):
            return None
        names = [entry.name for entry in self._part.division.whole if entry.tensor.group in TRAINED]
        steps = self._steps(names)
        size = -(-len(names) // GROUPS)
        groups = [names[start : start + size] for start in range(0, len(names), size)]
        for group in groups:
            group_steps = {name: steps[name] for name in group}
            disagreement = self._disagreement(group_steps, gradient, loss, batch)
            if disagreement is not None and self._wrong_elsewhere(group_steps, steps, batch):
                raise _contradiction(group, *disagreement)
        return f"{len(names)} tensors of all ranks against differences of the loss in {len(groups)} groups", gradient

    def _steps(self, names: Sequence[str]) -> dict[str, float]:
        """How far each tensor's elements move; equal on all ranks that hold it."""
        squares = np.zeros(len(names))
        for place, name in enumerate(names):
            if name in self._part.index and counts(self._part.division, self._ranks, name):
                squares[place] = np.square(self._part.values(name), dtype=np.float64).sum()
        summed = HostBuffer(squares)
        self._ranks.replica.all_reduce(summed)
        sizes = [max(1, self._part.division.whole[name].tensor.count) for name in names]
        scales = np.sqrt(summed.array / sizes)
        return {name: REACH * max(float(scale), SMALLEST_SCALE) for name, scale in zip(names, scales, strict=True)}

    def _disagreement(
        self, steps: Mapping[str, float], gradient: Vector, loss: float, batch: MicroBatch
    ) -> tuple[float, float] | None:
        """The change of the loss and what the gradients predict, where the two disagree."""
        directions = self._directions(steps, 0)
        claimed = self._claimed(directions, gradient)
        far, near = (self._measured(directions, reach, batch) for reach in (1.0, 0.5))
        # Differences over both distances agree except for the loss's curvature: their disagreement is the error.
        error = abs(far - near) + ROUNDING * max(1.0, abs(loss))
        wrong = not abs(near - claimed) <= TOLERANCE * max(abs(near), abs(claimed)) + 2 * error
        for reach in NEARER if wrong else ():
            near = self._measured(directions, reach, batch)
            # Without the error's allowance, which would accept any gradient where rounding is larger than it.
            wrong = not abs(near - claimed) <= TOLERANCE * max(abs(near), abs(claimed))
            if not wrong:
                break
        return (near, claimed) if wrong else None

    def _wrong_elsewhere(self, group: Mapping[str, float], steps: Mapping[str, float], batch: MicroBatch) -> bool:
        """Whether the gradients of a group disagree wherever all parameters are moved to: no kink is at all places."""
        for number, place in enumerate(ELSEWHERE, 1):
            moves = self._directions({name: place / REACH * step for name, step in steps.items()}, number)
            before = {name: self._part.values(name) for name in moves}
            for name, move in moves.items():
                self._part.set_values(name, before[name] + move)
            loss, gradients = self._part.gradient_of(batch, self._seed)
            agrees = math.isfinite(loss) and self._disagreement(group, gradients.read(), loss, batch) is None
            for name, values in before.items():
                self._part.set_values(name, values)
            if agrees:
                return False
        return True

    def _directions(self, steps: Mapping[str, float], draw: int) -> dict[str, Vector]:
        """This rank's regions of random directions through tensors; those of each draw are others."""
        return {name: self._direction(name, step, draw) for name, step in steps.items() if name in self._part.index}

    def _direction(self, name: str, step: float, draw: int) -> Vector:
        random = np.random.default_rng([self._seed, zlib.crc32(name.encode()), draw])
        signs = random.choice(np.array([-step, step], np.float32), self._part.division.whole[name].tensor.shape)
        return np.ascontiguousarray(self._part.region(name).of(signs), np.float32).reshape(-1)

    def _claimed(self, directions: dict[str, Vector], gradient: Vector) -> float:
        total = 0.0
        for name, direction in directions.items():
            entry = self._part.index[name]
            if predicts(self._part.division, self._ranks, name):
                total += float(np.dot(gradient[entry.offset : entry.end].astype(np.float64), direction))
        return self._sum(total)

    def _measured(self, directions: dict[str, Vector], reach: float, batch: MicroBatch) -> float:
        """The change of the loss along the directions, from both sides, for a reach of 1."""
        before = {name: self._part.values(name) for name in directions}
        losses = []
        for sign in (reach, -reach):
            for name, direction in directions.items():
                self._part.set_values(name, before[name] + np.float32(sign) * direction)
            losses.append(self._part.gradient_of(batch, self._seed)[0])
        for name, values in before.items():
            self._part.set_values(name, values)
        return (losses[0] - losses[1]) / (2 * reach)

    def _sum(self, value: float) -> float:
        total = HostBuffer(np.array([value], np.float64))
        self._ranks.replica.all_reduce(total)
        return float(total.array[0])


def _contradiction(group: Sequence[str], measured: float, claimed: float) -> UserError:
    quoted_names = ", ".join(map(repr, group[:5])) + (f" and {len(group) - 5} more" if len(group) > 5 else "")
    return UserError(
        f"the gradient of {quoted_names} disagrees with finite differences of the loss: along it the loss changes by "
        f"{measured:.4g}, and the gradients of all ranks predict {claimed:.4g}",
        where="parallel",
        fix="report the model to ortflow; train.check_gradient: false trains it anyway",
    )
