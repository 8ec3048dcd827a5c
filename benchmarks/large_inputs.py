"""CPU seconds of commands on inputs of unusual size: `python benchmarks/large_inputs.py [NAME …]`.

Prints for each the processor seconds of the command and its children, the memory at its peak, and the exit code.
On 2026-11-29 many-nodes and many-relus, on 2026-11-28 the others (Intel Xeon, 2 cores, CPython 3.11, load 5 to 8):

    unknown-keys   2.2 CPU s     94 MiB  exit 2
    many-nodes     7.2 CPU s    330 MiB  exit 0
    many-relus     4.6 CPU s    191 MiB  exit 0
    long-name      0.4 CPU s    194 MiB  exit 2
    sweep          4.2 CPU s    190 MiB  exit 0, 412,153 bytes
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from commands import ORTFLOW
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.data.write import record_batch, write_set

RUN_FILE = """\
name: small
model: {path: model.onnx, loss: cross_entropy}
data: {train: train.arrow, micro_batch: 4}
train: {steps: 100, optimizer: {name: adamw, lr: 1e-3}}
"""


def chain(path: Path, operators: int, operator: str, weights: str = "weights") -> None:
    """A model of a product and a chain of `operators` nodes."""
    matrix = numpy_helper.from_array(np.eye(8, dtype=np.float32), weights)
    nodes = [helper.make_node("MatMul", ["x", weights], ["v0"], name="product")]
    nodes += [helper.make_node(operator, [f"v{i}"], [f"v{i + 1}"], name=f"node_{i}") for i in range(operators)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 8]) for name in ("x", f"v{operators}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], [matrix])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)


def folder_of_a_run(folder: Path, operators: int = 1) -> None:
    """A run file, its model and its data."""
    chain(folder / "model.onnx", operators, "Relu")
    rows = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    write_set(folder / "train.arrow", [record_batch({"x": rows, "labels": np.zeros(16, np.int64)})])
    (folder / "run.yaml").write_text(RUN_FILE)


def unknown_keys(folder: Path) -> list[str]:
    """A run file with 20,000 keys that do not exist, just below the limit of 256 KiB."""
    more = "".join(f" k{number}: 1\n" for number in range(20_000))
    (folder / "run.yaml").write_text(f"{RUN_FILE}monitor:\n{more}")
    return ["validate", "run.yaml"]


def many_nodes(folder: Path) -> list[str]:
    """A model of 50,000 nodes."""
    chain(folder / "model.onnx", 50_000, "Relu")
    return ["inspect", "model.onnx"]


def many_relus(folder: Path) -> list[str]:
    """A model of 2,000 nodes, whose training graph `validate` builds."""
    chain(folder / "model.onnx", 2_000, "Relu")
    return ["validate", "run.yaml"]


def long_name(folder: Path) -> list[str]:
    """A model with a parameter whose name has 10 MB."""
    chain(folder / "model.onnx", 1, "Relu", weights="n" * 10_000_000)
    return ["inspect", "model.onnx"]


def sweep(folder: Path) -> list[str]:
    """970 runs in one script of Slurm."""
    (folder / "run.yaml").write_text(f"{RUN_FILE}resources: {{memory: 1GB}}\nbackends: {{slurm: {{}}}}\n")
    return ["render", "--backend", "slurm", "run.yaml", "--set", "seed=1..970"]


INPUTS: Mapping[str, Callable[[Path], list[str]]] = {
    "unknown-keys": unknown_keys,
    "many-nodes": many_nodes,
    "many-relus": many_relus,
    "long-name": long_name,
    "sweep": sweep,
}


def measure(name: str) -> None:
    """Run the command in a child of its own and print its costs."""
    with tempfile.TemporaryDirectory(prefix="ortflow-large-") as folder:
        folder_of_a_run(Path(folder))
        command = [*ORTFLOW, *INPUTS[name](Path(folder))]
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        seconds = usage.ru_utime + usage.ru_stime
        costs = f"{seconds:6.2f} CPU s {usage.ru_maxrss / 2**10:6.0f} MiB"
        print(f"{name:13} {costs}  exit {code}  {len(printed):9,} bytes printed", flush=True)


def main() -> None:
    """Measure the inputs that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(INPUTS)}; all if none")
    for name in parser.parse_args().names or INPUTS:
        measure(name)


if __name__ == "__main__":
    main()
