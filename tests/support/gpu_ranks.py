"""Ranks that train one small network, each on a GPU of its own: a program for tests, and a function to start it.

mpirun -n RANKS python gpu_ranks.py FOLDER WAY    # results in FOLDER/WAY-RANK.npz, FOLDER/WAY-RANK.log

A gradient of the network enters other gradients: w of `w + a b`. Each tensor is a bucket of its own. WAY is `cpu`,
`gpu`, `queued` (no CUDA graphs), or what fails on rank 1 alone: `graph` (its graph is not usable) or `bucket` (the
capture itself, behind the first sum).
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from graph_build_models import built, run_file, save_model, value
from onnx import helper
from real_ranks import on_ranks
from safetensors.numpy import load_file
from trainers import opened, write_update

from ortflow.workflow.assembly.updates import write_forms
from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.comm.over_gpus import over_gpus
from ortflow.workflow.device import capture
from ortflow.workflow.device.choice import cuda_runtime
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch, Report, StepOutcome, overlap
from ortflow.workflow.trainer.opening import open_trainer
from ortflow.workflow.trainer.overlap import Overlap
from ortflow.workflow.trainer.step import GraphTrainer

STEPS, ROWS = 12, 8
CHANGES: dict[str, Any] = {"train__clip_norm": 1.0, "data__last_batch": "drop"}


def trained(
    folder: Path, way: str, ranks: int = 2, program: str = __file__
) -> list[tuple[dict[str, npt.NDArray[Any]], list[str]]]:
    """What each rank has afterwards (`losses`, `norms` and flat buffers), and its log."""
    on_ranks(ranks, program, str(folder), way)
    return [
        (dict(np.load(folder / f"{way}-{rank}.npz")), json.loads((folder / f"{way}-{rank}.log").read_text()))
        for rank in range(ranks)
    ]


def graphs_in(folder: Path) -> GraphSet:
    """The network's graphs, for CPUs and GPUs."""
    random = np.random.default_rng(0)
    shapes = {"w": (5, 3), "a": (5, 2), "b": (2, 3), "c": (5, 3), "shift": (3,), "scale": (3,)}
    tensors = {name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["low"]),
        helper.make_node("Sum", ["w", "low", "c"], ["weight"]),
        helper.make_node("MatMul", ["x", "weight"], ["product"]),
        helper.make_node("Add", ["product", "shift"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["bent"]),
        helper.make_node("Mul", ["bent", "scale"], ["logits"]),
    ]
    inputs, outputs = [value("x", ["batch", 5])], [value("logits", ["batch", 3])]
    model = save_model(folder / "model.onnx", nodes, inputs, outputs, tensors)
    graphs = built(model, resources__gpus_per_rank=1, **CHANGES)
    write_update(graphs, run_file(model, **CHANGES))
    write_forms(graphs, run_file(model, **CHANGES).train.precision)
    return graphs


def fail(way: str) -> None:
    """Let this rank fail in its capture."""
    if way == "graph":
        capture.graph_fault = lambda runtime, graph: "planted"
    ready = Overlap.ready

    def failing(self: Overlap, number: int, gradients: Sequence[int]) -> None:
        ready(self, number, gradients)
        if number == 1 and way == "bucket" and self._comm.device.capturing:
            raise OrtflowError("planted")

    Overlap.ready = failing  # type: ignore[method-assign]


def connected(below: Communicator, precision: str = "fp32") -> tuple[Communicator, CudaDevice]:
    """NCCL over the ranks' GPUs, and this rank's."""
    found = cuda_runtime()
    device = CudaDevice(found, found.describe(below.rank), precision=precision)
    comm, means = over_gpus(below, device, socket.gethostname(), 60)
    assert "NCCL" in means, means
    return comm, device


def keep(path: Path, trainer: GraphTrainer, outcomes: Sequence[StepOutcome], log: list[str]) -> None:
    """Write what `trained` reads."""
    numbers = {"losses": [each.loss for each in outcomes], "norms": [each.grad_norm for each in outcomes]}
    buffers = {name: buffer.read() for name, buffer in trainer.state().items()}
    np.savez(f"{path}.npz", **numbers, **buffers)
    Path(f"{path}.log").write_text(json.dumps(log))


def main(folder: Path, way: str) -> None:
    """What each rank does."""
    below = MpiCommunicator()
    if below.rank == 0:
        graphs_in(folder)
    below.barrier()
    graphs, log = GraphSet.load(folder / "graphs"), list[str]()
    spec = run_file(folder / "model.onnx", resources__cuda_graph=way != "queued", **CHANGES)
    report = Report(note=log.append)
    if way == "cpu":
        trainer = opened(graphs, spec, below, report)
    else:
        comm, device = connected(below)
        overlap.LEAST = 1
        if way in ("graph", "bucket") and below.rank == 1:
            fail(way)
        trainer = open_trainer(graphs, spec, Sessions(device, 1, "error"), comm, report)
        trainer.load_tensors(load_file(graphs.initial))
    random, outcomes = np.random.default_rng(below.rank), []
    for step in range(STEPS):
        arrays = {"x": random.normal(size=(ROWS, 5)).astype("float32"), "labels": random.integers(0, 3, ROWS)}
        outcomes.append(
            trainer.step(
                [MicroBatch(arrays, ROWS)], learning_rate=1e-2, update=step + 1, seeds=[0], control_values=[1.0]
            )
        )
    keep(folder / f"{way}-{below.rank}", trainer, outcomes, log)
    trainer.end_training()
    (below if way == "cpu" else comm).close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
