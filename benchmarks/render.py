"""Documents a second that `ortflow render --backend kubernetes` makes: `python benchmarks/render.py [--helm HELM]`.

Made and written as YAML, from values that are read already. The peer, in the same run: a whole `helm template` of the
same run from the chart, if there is a Helm.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ortflow.manifests.kubernetes import Placement, documents, dump
from ortflow.workflow.spec.file.load import read_run_file

ROOT = Path(__file__).parents[1]
RUN_FILE = """\
name: small
model: {path: model.onnx, loss: cross_entropy}
data: {train: train.arrow, micro_batch: 4}
train: {steps: 100, optimizer: {name: adamw, lr: 1e-3}}
resources: {nodes: 4, ranks_per_node: 8, cpus_per_rank: 4, memory: 64Gi}
backends:
  kubernetes:
    image: ortflow:1
    volume: {create: {size: 100Gi}}
    env: {NCCL_DEBUG: INFO}
    tolerations: [{key: spot, operator: Exists}]
    queue: gpus
"""


def rate(make: Callable[[], int], seconds: float) -> float:
    """Documents a second, in the fastest of the stretches of a fiftieth of the time: others may need the machine."""
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        made, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds / 50:
            made += make()
        best = max(best, made / (time.perf_counter() - begin))
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--helm", default=shutil.which("helm"))
    parser.add_argument("--seconds", type=float, default=4.0)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(RUN_FILE)
        reading = read_run_file(file, files=False)
        spec, placement = reading.spec, Placement()
        if spec is None or reading.faults:
            sys.exit(f"the run file is wrong: {reading.faults}")
        found = documents(reading.written, spec, placement)

        def render() -> int:
            dump(documents(reading.written, spec, placement))
            return len(found)

        def helm() -> int:
            command = [wanted.helm, "template", "x", str(ROOT / "charts" / "ortflow"), "-f", str(file), "--skip-tests"]
            subprocess.run(command, check=True, capture_output=True)
            return len(found)

        ours = rate(render, wanted.seconds)
        print(f"render, {len(found)} documents a run: {ours:8.0f} documents/s (target 1000)")
        if wanted.helm:
            theirs = rate(helm, wanted.seconds)
            print(f"helm template, with its start: {theirs:8.0f} documents/s; ours is {ours / theirs:.2f} times that")
    sys.exit(0 if ours >= 1000 else 1)


if __name__ == "__main__":
    main()
