"""LAMB under ZeRO: a trust ratio needs a whole tensor, of which a rank may have only a piece.

Two graphs, between which the ranks add up the sums of squares of their pieces. Built and run by the trainer for ZeRO.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto

from ortflow.workflow.optim import average, lamb
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.segments import Piece
from ortflow.workflow.spec.optimizers import Lamb, moments


def change_graph(optimizer: Lamb, pieces: Sequence[Piece]) -> onnx.ModelProto:
    """Graph for the new moments, and the change of each piece at a learning rate of 1.

    Inputs are `step` int64 [1], and for piece i `parameters.i`, `gradients.i` and `<moment>.i`, fp32 [count]. Outputs
    are `<moment>.i.out`, to be bound to the memory of the inputs, `change.i`, to be bound to that of `gradients.i`, and
    `weights` and `changes`, fp64 [pieces]: the sums of squares of parameters and changes.
    """
    build = Builder("lamb_change")
    build.input("step", 1, TensorProto.INT64)
    for i, piece in enumerate(pieces):
        for name in ("parameters", "gradients", *moments(optimizer)):
            build.input(f"{name}.{i}", piece.count)
        for name in moments(optimizer):
            build.output(f"{name}.{i}.out", piece.count)
    lamb.changes(build, optimizer, pieces)
    for i, piece in enumerate(pieces):
        build.output(f"change.{i}", piece.count)
    for name, of in (("weights", "parameters"), ("changes", "change")):
        lamb.square_sums(build, of, len(pieces), output=name)
        build.output(name, len(pieces), TensorProto.DOUBLE)
    return build.model()


def apply_graph(pieces: Sequence[Piece], tensors: int) -> onnx.ModelProto:
    """Graph for the new parameters.

    Inputs are `learning_rate` fp32 [1], `weights` and `changes` fp64 [tensors], summed over the ranks, and for piece i
    `parameters.i` and `change.i`, fp32 [count]. Outputs are `parameters.i.out`, to be bound to the memory of the
    inputs.
    """
    build = Builder("lamb_apply")
    build.input("learning_rate", 1)
    sums = [build.input(name, tensors, TensorProto.DOUBLE) for name in ("weights", "changes")]
    for i, piece in enumerate(pieces):
        for name in ("parameters", "change"):
            build.input(f"{name}.{i}", piece.count)
        build.output(f"parameters.{i}.out", piece.count)
    numbers = build.constant([piece.number for piece in pieces], "int64")
    ratios = build("Gather", lamb.trust_ratios(build, *sums), numbers)
    lamb.apply(build, lamb.scaled_rates(build, ratios, pieces), len(pieces))
    average.update(build, pieces)
    return build.model()
