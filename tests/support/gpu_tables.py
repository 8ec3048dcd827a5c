"""Ranks that train a network with two tables in bf16, each on a GPU of its own: a program for tests.

mpirun -n RANKS python gpu_tables.py FOLDER WAY    # results in FOLDER/WAY-RANK.npz, FOLDER/WAY-RANK.log

One table is the output layer too. WAY is `rows` (the ranks copy gradients to each other, and exchange the looked-up
rows), `queued` (the same without CUDA graphs), or `whole` (NCCL sums whole gradients). In some steps rank 1
has fewer samples, or none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gpu_ranks import connected, keep
from graph_build_models import built, run_file, save_model, value
from onnx import TensorProto, helper
from safetensors.numpy import load_file
from trainers import write_update

from ortflow.workflow.assembly.updates import write_forms
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch, Report, overlap, peer_sums
from ortflow.workflow.trainer.opening import open_trainer

HEIGHT, WIDTH, LENGTH, STEPS, ROWS = 60_000, 16, 6, 12, 8
CHANGES: dict[str, Any] = {"train__clip_norm": 1.0, "train__precision": "bf16", "resources__gpus_per_rank": 1}
FEWER = {5: 3, 8: 0, 9: 7}
"""Step -> samples of rank 1."""


def tables_in(folder: Path) -> GraphSet:
    """The network's graphs, for GPUs."""
    random = np.random.default_rng(0)
    shapes = {"shared": (HEIGHT, WIDTH), "other": (HEIGHT, WIDTH), "w": (WIDTH, WIDTH), "b": (WIDTH,)}
    tensors = {name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Constant", [], ["axis"], value=axis),
        helper.make_node("Gather", ["shared", "ids"], ["one"]),
        helper.make_node("Gather", ["other", "ids"], ["two"]),
        helper.make_node("Add", ["one", "two"], ["looked_up"]),
        helper.make_node("MatMul", ["looked_up", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["bent"]),
        helper.make_node("ReduceMean", ["bent", "axis"], ["mean"], keepdims=0),
        helper.make_node("Transpose", ["shared"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["mean", "turned"], ["logits"]),
    ]
    inputs, outputs = [value("ids", ["batch", LENGTH], "int64")], [value("logits", ["batch", HEIGHT])]
    model = save_model(folder / "model.onnx", nodes, inputs, outputs, tensors)
    graphs = built(model, **CHANGES)
    write_update(graphs, run_file(model, **CHANGES))
    write_forms(graphs, "bf16")
    return graphs


def main(folder: Path, way: str) -> None:
    """What each rank does."""
    below = MpiCommunicator()
    if below.rank == 0:
        tables_in(folder)
    below.barrier()
    graphs, log = GraphSet.load(folder / "graphs"), list[str]()
    spec = run_file(folder / "model.onnx", resources__cuda_graph=way != "queued", **CHANGES)
    comm, device = connected(below, "bf16")
    overlap.LEAST = peer_sums.LEAST = 1
    peer_sums.RATE = 0.0
    if way == "whole":
        overlap.peer_sums = lambda *given: "planted"
    trainer = open_trainer(graphs, spec, Sessions(device, 1, "error"), comm, Report(note=log.append))
    trainer.load_tensors(load_file(graphs.initial))
    random, outcomes = np.random.default_rng(below.rank), []
    for step in range(STEPS):
        ids, labels = random.integers(0, HEIGHT, (ROWS, LENGTH)), random.integers(0, HEIGHT, ROWS)
        count = FEWER.get(step, ROWS) if below.rank == 1 else ROWS
        batch = MicroBatch({"ids": ids[:count], "labels": labels[:count]}, count)
        given: dict[str, Any] = {"update": step + 1, "seeds": [0], "control_values": [1.0]}
        outcomes.append(trainer.step([batch], learning_rate=1e-2, **given))
    keep(folder / f"{way}-{below.rank}", trainer, outcomes, log)
    trainer.end_training()
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
