"""Emulates half precision on the CPU: how far the gradient is from double precision, against PyTorch's autocast.

    python tests/torch/survey/rounded.py --only 'handwritten/*' [--precision fp16]

The graph of a GPU run is computed in fp32, and every value that it stores as a half is rounded. Sums are in fp32 as on
a GPU, in another order. A loss curve magnifies rounding, the first gradients do not: what is much further from double
precision than autocast is computed by a node that must stay fp32. Exits with 1 if a model is off FACTOR times as much.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from safetensors.numpy import load_file

from ortflow.workflow.onnx_runtime import onnxruntime

sys.path.extend(str(Path(__file__).parents[number] / name) for number, name in ((1, ""), (2, "support")))
from case import Case
from catalogue import case_of, names
from composed_attention import compose_attention
from cuda_composed import composed
from worker import Reference, export, in_double_precision

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.fusion import halved
from ortflow.workflow.fusion.half import HALVES, MOVERS
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.types import LOSS_SCALE, LOSS_SUM, LOSS_WEIGHT, GraphSet
from ortflow.workflow.spec.run import TrainerRunSpec

Gradients = Mapping[str, np.ndarray]
BATCHES = 3
SCALE = 1024.0
FACTOR, ALLOWANCE = 2.0, 1e-3
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def graphs_of(case: Case, precision: str, folder: Path) -> GraphSet:
    """The graphs of a GPU run, the half-precision one without fused kernels."""
    export(case, folder / "model.onnx")
    spec = TrainerRunSpec.model_validate(
        {
            "name": "rounded",
            "model": {"path": str(folder / "model.onnx"), "loss": case.loss.model_dump(), "labels": list(case.labels)},
            "data": {"train": {"path": "unused"}, "micro_batch": 4},
            "train": {"steps": 1, "precision": precision, "optimizer": {"name": "adamw", "lr": 1e-3}},
            "resources": {"gpus_per_rank": 1},
        }
    )
    with ExitStack() as patches:
        for name in ("on_cuda", "put_joins", "put_products"):
            patches.enter_context(mock.patch.object(halved, name, lambda model, **kind: model))
        patches.enter_context(mock.patch.object(halved, "fused", lambda model: model))
        return build_graphs(spec, folder / "graphs")


def rounded(model: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """A copy in fp32, in which what was stored as half is rounded to it and back."""
    types, halves = element_types(model), set(HALVES.values())
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []

    def round_to(given: str, made: str) -> None:
        nodes.append(helper.make_node("Cast", [given], [f"{made}/rounded"], to=kind))
        nodes.append(helper.make_node("Cast", [f"{made}/rounded"], [made], to=TensorProto.FLOAT))

    for node in model.graph.node:
        made = [name for name in node.output if types.get(name) in halves]
        if node.op_type == "Cast" and made:
            round_to(node.input[0], made[0])
        elif node.op_type == "Cast" and types.get(node.input[0]) in halves:
            nodes.append(helper.make_node("Cast", node.input, node.output, to=types[node.output[0]]))
        else:
            plain = onnx.NodeProto.FromString(node.SerializeToString())
            nodes.append(plain)
            for place, name in enumerate(node.output):
                if name in made and node.op_type not in MOVERS:
                    plain.output[place] = f"{name}/exact"
                    round_to(plain.output[place], name)
    for number, node in enumerate(nodes):
        node.name = str(number)
    del copy.graph.node[:], copy.graph.value_info[:]
    copy.graph.node.extend(nodes)
    return copy


def gradients(graphs: GraphSet, session: onnxruntime.InferenceSession, batch: Mapping[str, Any]) -> Gradients:
    """The gradient of the mean loss of a batch, by parameter."""
    feeds = load_file(graphs.initial) | dict(batch) | {LOSS_SCALE: np.array([SCALE], np.float32)}
    given = [value.name for value in session.get_inputs()]
    made = [value.name for value in session.get_outputs()]
    values = dict(zip(made, session.run(made, {name: feeds[name] for name in given}), strict=True))
    assert np.isfinite(values[LOSS_SUM])
    weight = values[LOSS_WEIGHT] * (SCALE if LOSS_SCALE in given else 1.0)
    trained = [entry.name for entry in graphs.index if f"{entry.name}_grad" in values]
    return {name: values[f"{name}_grad"].astype(np.float64) / weight for name in trained}


def distance(found: Gradients, exact: Gradients) -> float:
    """Of two whole gradients, relative to the second."""
    known = [name for name in exact if name in found]
    apart = sum(float(((found[name].reshape(exact[name].shape) - exact[name]) ** 2).sum()) for name in known)
    return float(np.sqrt(apart / sum(float((exact[name] ** 2).sum()) for name in known)))


def distances(case: Case, precision: str, folder: Path) -> tuple[float, float]:
    """Root mean squares over the batches: ours and autocast's."""
    graphs = graphs_of(case, precision, folder)
    model = composed(compose_attention(rounded(onnx.load(Form.HALF.of(graphs.train)), HALVES[precision])))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rows = []
    for batch in case.batches(BATCHES):
        exact = in_double_precision(case, [batch]).gradients
        with torch.autocast("cpu", TYPES[precision], cache_enabled=False):
            theirs = Reference(case, [batch], torch.float32).gradients
        rows.append([distance(gradients(graphs, session, batch), exact), distance(theirs, exact)])
    ours, autocast = np.sqrt(np.mean(np.square(rows), axis=0))
    return float(ours), float(autocast)


def main() -> int:
    """Print a row of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="handwritten/*", help="a pattern of names")
    parser.add_argument("--precision", default="bf16", choices=TYPES)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # the median second of one step
    wrong = 0
    print("| model | gradient off | autocast's | ratio |\n|---|---|---|---|")
    for name in names():
        if not fnmatch(name, options.only):
            continue
        try:
            with tempfile.TemporaryDirectory(prefix="ortflow-rounded-") as folder:
                ours, autocast = distances(case_of(name), options.precision, Path(folder))
        except Exception as error:  # noqa: BLE001 - PyTorch's autocast and the CPU's runtime lack some operators
            print(f"| {name} | not computed: {' '.join(str(error).split())[:150]} | | |", flush=True)
            continue
        wrong += not ours <= FACTOR * autocast + ALLOWANCE
        print(f"| {name} | {ours:.1e} | {autocast:.1e} | {ours / autocast:.2f} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
