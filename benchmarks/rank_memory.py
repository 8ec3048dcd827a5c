"""The memory of each rank of a sharded or divided model, phase by phase, against the parameters of the model.

    python benchmarks/rank_memory.py [--ranks 2 --megabytes 200 --width 2048 --most 0.3 --resumed]
        [parallel.zero=3 KEY=VALUE ...]

Trains a network of equal layers for two steps on CPU ranks through `ortflow run`, with a checkpoint at the end and an
export, and looks at the ranks' memory every 10 ms. Counted is what a process and its children hold for themselves
(RssAnon): pages of files that are mapped are the system's, which it takes back when memory is short. Prints the highest
of each phase and rank beside the state of the rank (event `memory`: parameters, gradients, moments, messages, its share
for checkpoints), and what rank 0 holds more than the others, in parameters of the whole model. Exit code 1 if that is
ever more than --most. With --resumed, looks at a second run that resumes from the first one's checkpoint. Linux only:
reads /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import yaml

from ortflow.launchers.supervision.processes import family, ranks_among

MB = 1_000_000
CLASSES = 10
STEPS, BATCH = 2, 8
PERIOD = 0.01
"""Seconds between two looks."""
PARTS = ("parameters", "gradients", "moments", "messages", "checkpoint")


def write_model(path: Path, megabytes: int, width: int) -> None:
    """A network of layers of width x width, and weights of about so many MB, in a file beside the graph."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random, layers = np.random.default_rng(0), max(1, round(megabytes * MB / (4 * width * width)))
    nodes, tensors, value = [], [], "x"
    for number in range(layers + 1):
        outputs = width if number < layers else CLASSES
        tensors.append(
            numpy_helper.from_array(
                (random.standard_normal((width, outputs), np.float32) * np.sqrt(2 / width)).astype(np.float32),
                f"w{number}",
            )
        )
        made = f"h{number}" if number < layers else "y"
        nodes.append(helper.make_node("MatMul", [value, f"w{number}"], [made], name=f"/product{number}"))
        value = made
        if number < layers:
            value = f"r{number}"
            nodes.append(helper.make_node("Relu", [made], [value], name=f"/relu{number}"))
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")


def write_run(folder: Path, options: argparse.Namespace) -> Path:
    """Model, data and run file."""
    from ortflow.workflow.data.write import record_batch, write_set

    write_model(folder / "model.onnx", options.megabytes, options.width)
    random = np.random.default_rng(1)
    count = BATCH * STEPS * options.ranks
    columns = {
        "x": random.standard_normal((count, options.width), np.float32),
        "labels": random.integers(0, CLASSES, count),
    }
    write_set(folder / "train.arrow", [record_batch(columns)])
    run = {
        "name": "memory",
        "model": {"path": "model.onnx", "loss": "cross_entropy"},
        "data": {"train": "train.arrow", "micro_batch": BATCH},
        "train": {"steps": STEPS, "optimizer": {"name": "adamw", "lr": 1e-4}},
        "resources": {"ranks_per_node": options.ranks, "cpus_per_rank": 1},
        "restart": {"failures": 0},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def anonymous(process: psutil.Process) -> int:
    """Bytes that a process holds for itself."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def phase(record: Path, attempt: int) -> str:
    """The last phase of an attempt that began on rank 0."""
    found = "start"
    try:
        lines = record.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        event = json.loads(line) if line.endswith("}") else {}
        if event.get("attempt") != attempt:
            continue
        if event.get("event") == "phase_start":
            found = str(event["phase"])
        elif event.get("event") == "step" and found == "train":
            found = "steps"
    return found


def watch(launcher: subprocess.Popen[bytes], record: Path, attempt: int) -> dict[str, dict[int, int]]:
    """Highest bytes by phase and rank; a rank's own processes count with it."""
    highest: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    root = psutil.Process(launcher.pid)
    while launcher.poll() is None:
        now = phase(record, attempt)
        for rank, process in ranks_among(family(root)).items():
            try:
                held = sum(anonymous(each) for each in family(process))
            except (OSError, psutil.Error):
                continue
            highest[now][rank] = max(highest[now][rank], held)
        time.sleep(PERIOD)
    return highest


def main() -> int:
    """Run, look, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", default=[], metavar="KEY=VALUE", help="further values of the run file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=200, help="of parameters")
    parser.add_argument("--width", type=int, default=2048, help="of a layer")
    parser.add_argument("--resumed", action="store_true", help="look at a resumed run")
    parser.add_argument("--most", type=float, default=0.3, help="excess of rank 0, in parameters, for exit code 0")
    options = parser.parse_args()
    changes = options.changes or ["parallel.zero=3"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, options)
        for attempt in range(1 + options.resumed):
            steps = f"train.steps={STEPS * (attempt + 1)}"
            with (folder / "log").open("wb") as log:
                launcher = subprocess.Popen(
                    [sys.executable, "-m", "ortflow", "run", "run.yaml", steps, *changes],
                    cwd=folder, stdout=log, stderr=log,
                )  # fmt: skip
                highest = watch(launcher, folder / "runs" / "memory" / "events" / "rank-0000.jsonl", attempt)
            if launcher.returncode:
                raise SystemExit((folder / "log").read_text(errors="replace"))
        state = []
        for rank in range(options.ranks):
            lines = (folder / "runs" / "memory" / "events" / f"rank-{rank:04d}.jsonl").read_text().splitlines()
            memory = [event for event in map(json.loads, lines) if event["event"] == "memory"][-1]
            state.append(sum(memory.get(part, 0) for part in PARTS))
        size = (folder / "model.onnx.data").stat().st_size
    what = ", ".join([*changes, *["resumed"] * options.resumed])
    print(f"{size / MB:.0f} MB of parameters, {options.ranks} ranks, {what}; MB a rank")
    print(
        f"{'':12}" + "".join(f"{f'rank {rank}':>9}" for rank in range(options.ranks)) + "  rank 0's excess / parameters"
    )
    print(f"{'state':12}" + "".join(f"{each / MB:9.0f}" for each in state))
    worst = 0.0
    for part, found in highest.items():
        others = max((found[rank] for rank in found if rank), default=0)
        excess = (found[0] - others) / size
        worst = max(worst, excess)
        print(f"{part:12}" + "".join(f"{found[rank] / MB:9.0f}" for rank in range(options.ranks)) + f"  {excess:8.2f}")
    print(f"rank 0 needs at most {worst:.2f} of the parameters more than the others")
    return int(worst > options.most)


if __name__ == "__main__":
    sys.exit(main())
