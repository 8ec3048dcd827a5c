"""Tensors that several ranks of a replica hold: which they are, and that the first rank's values are taken over."""

from __future__ import annotations

import pytest
from divided_models import part_of
from real_ranks import all_good

from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.parallel.division import Division, Holding
from ortflow.workflow.parallel.grid import Grid, Place
from ortflow.workflow.parallel.region import Region
from ortflow.workflow.parallel.ties import Tie, common, ties

EMBEDDING, NORM, SCALE, MATRIX, FROZEN = (
    Tensor("embedding", (6, 4), "decay"), Tensor("norm", (64,), "no_decay"), Tensor("scale", (3,), "no_decay"),
    Tensor("matrix", (4, 8), "decay"), Tensor("frozen", (5,), "frozen"),
)  # fmt: skip


def holding(tensors: list[Tensor], regions: dict[str, Region]) -> Holding:
    shaped = [
        Tensor(t.name, regions[t.name].shape(t.shape) if t.name in regions else t.shape, t.group) for t in tensors
    ]
    return Holding(FlatIndex.place(shaped), regions)


def test_parts_have_in_common_what_each_holds_whole() -> None:
    tensors = [MATRIX, NORM, SCALE, FROZEN]
    parts = [holding(tensors, {"matrix": part_of(MATRIX.shape, 1, part, 2)}) for part in range(2)]
    division = Division(FlatIndex.place(tensors), Grid(1, 1, 2), parts)
    index = parts[0].index
    for part in range(2):
        # The norm fills its place, so the scale's elements follow it without padding.
        assert common(division, Place(0, 0, part)) == [(index["norm"].offset, index["scale"].end)]
        assert ties(division, Place(0, 0, part)) == []


def test_stages_share_a_tensor_that_both_hold() -> None:
    stages = [holding([EMBEDDING, NORM], {}), holding([MATRIX, EMBEDDING, FROZEN], {})]
    division = Division(FlatIndex.place([EMBEDDING, NORM, MATRIX, FROZEN]), Grid(1, 2, 1), stages)
    for stage, each in enumerate(stages):
        entry = each.index["embedding"]
        assert ties(division, Place(0, stage, 0)) == [Tie(entry.offset, entry.end, (0, 1))]
        assert common(division, Place(0, stage, 0)) == []


def test_stages_that_divide_a_tensor_otherwise_are_refused() -> None:
    whole = [holding([EMBEDDING], {}) for _ in range(2)]
    divided = [holding([MATRIX, EMBEDDING], {"embedding": part_of((6, 4), 0, part, 2)}) for part in range(2)]
    with pytest.raises(ValueError, match="embedding is not covered once"):
        Division(FlatIndex.place([EMBEDDING, MATRIX]), Grid(1, 2, 2), [*whole, *divided])


PROGRAM = """
import numpy as np
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import CpuDevice, HostBuffer
from ortflow.workflow.trainer.tied import CommonWeights

parts = MpiCommunicator()
own = np.arange(10, dtype=np.float32) + 100 * parts.rank
buffer = HostBuffer(own.copy())
CommonWeights([(0, 2), (5, 9)], parts, buffer, CpuDevice(), lambda name, run: run).take_over()
expected = own.copy()
expected[0:2], expected[5:9] = np.arange(0, 2), np.arange(5, 9)
assert np.array_equal(buffer.array, expected), buffer.array
print("good")
parts.close()
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_first_parts_values_replace_the_others(ranks: int) -> None:
    all_good(ranks, PROGRAM)
