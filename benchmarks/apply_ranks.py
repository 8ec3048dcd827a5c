"""What `--ranks N` gains in `ortflow evaluate` and `predict`: `python benchmarks/apply_ranks.py [--ranks 2]`.

Two sets, one that is decoded and one that is computed: JPEG files through a mean and a product, and vectors through
five products of 2048 x 2048. Prints the seconds of each command with one process and with N, as the shortest of some
rounds, whose order alternates, and their ratio. Both take all cores of this machine: one process computes with as many
threads, and decodes with one. A third of a second to two seconds of each command are its start.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import onnx
from commands import ORTFLOW, run
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from ortflow.workflow.data.write import record_batch, write_set

SIDE, WIDTH, CLASSES = 224, 2048, 10


def save_model(path: Path, name: str, shape: list[int], nodes: list[onnx.NodeProto], width: int, depth: int) -> None:
    """Products of `depth` matrices, behind `nodes` that make `v0` [batch, width] of the input."""
    random = np.random.default_rng(0)
    sizes = [width] * depth + [CLASSES]
    weights = [random.normal(0, 0.02, size=pair).astype(np.float32) for pair in itertools.pairwise(sizes)]
    layers = range(len(weights))
    nodes += [helper.make_node("MatMul", [f"v{layer}", f"w{layer}"], [f"v{layer + 1}"]) for layer in layers]
    given = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
    made = helper.make_tensor_value_info(f"v{len(weights)}", TensorProto.FLOAT, ["batch", CLASSES])
    tensors = [numpy_helper.from_array(weight, f"w{number}") for number, weight in enumerate(weights)]
    tensors.append(numpy_helper.from_array(np.array([2, 3], np.int64), "axes"))
    graph = helper.make_graph(nodes, "model", [given], [made], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def images(folder: Path, count: int) -> None:
    """JPEG files of 224 x 224 in ten folders, and a model that takes their mean colour."""
    random = np.random.default_rng(1)
    for number in range(count):
        place = folder / "images.set" / f"class-{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        noise = random.integers(0, 255, (SIDE // 8, SIDE // 8, 3), np.uint8)
        data = io.BytesIO()
        Image.fromarray(noise).resize((SIDE, SIDE)).save(data, "JPEG")
        (place / f"{number:06}.jpg").write_bytes(data.getvalue())
    mean = helper.make_node("ReduceMean", ["image", "axes"], ["v0"], keepdims=0)
    save_model(folder / "images.onnx", "image", [3, SIDE, SIDE], [mean], 3, 1)


def vectors(folder: Path, count: int) -> None:
    """Vectors of 2048 numbers, and a model of five large products."""
    random = np.random.default_rng(1)
    rows = random.normal(size=(count, WIDTH)).astype(np.float32)
    write_set(folder / "vectors.set", [record_batch({"x": rows, "labels": random.integers(0, CLASSES, count)})])
    save_model(folder / "vectors.onnx", "x", [WIDTH], [helper.make_node("Identity", ["x"], ["v0"])], WIDTH, 5)


def measure(folder: Path, kind: str, ranks: int, rounds: int) -> None:
    """Print a line for each command."""
    label = "label" if kind == "images" else "labels"
    applied = [str(folder / f"{kind}.onnx"), "--data", str(folder / f"{kind}.set")]
    for verb in ("evaluate", "predict"):
        seconds: dict[int, list[float]] = {1: [], ranks: []}
        for number in range(rounds):
            for count in sorted(seconds, reverse=number % 2 == 1):
                out = folder / f"{kind}-{count}-{number}.npz"
                more = ["--loss", "cross_entropy", "--label", label] if verb == "evaluate" else ["-o", str(out)]
                seconds[count].append(run(*ORTFLOW, verb, *applied, *more, "--ranks", str(count))[1])
        one, several = min(seconds[1]), min(seconds[ranks])
        print(f"{kind:8} {verb:9} {one:6.2f} s  {several:6.2f} s  {one / several:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--vectors", type=int, default=40_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images(folder, given.images)
        vectors(folder, given.vectors)
        print(f"set      command   1 process  {given.ranks} ranks  ratio; load {os.getloadavg()[0]:.1f}")
        for kind in ("images", "vectors"):
            measure(folder, kind, given.ranks, given.rounds)


if __name__ == "__main__":
    main()
