"""What `ortflow submit -b kubernetes` costs over `kubectl apply` of what `ortflow render` has written before.

    KUBECONFIG=… python benchmarks/submit.py                       # a suspended run, in a namespace of its own
    KUBECONFIG=… python benchmarks/submit.py --run-file run.yaml   # one that trains there; also until its first step

Prints seconds, medians of a few rounds in which the two take turns. Beside what kubectl does, submit reads and checks
the run file, asks for the operator and for runs of the name, and rehearses every document and pod. The target is
0.5 s over kubectl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import yaml
from commands import ORTFLOW, run

RUN_FILE = """\
model: {path: model.onnx, loss: cross_entropy}
data: {train: train.arrow, micro_batch: 4}
train: {steps: 100, optimizer: {name: adamw, lr: 1e-3}}
resources: {nodes: 2, ranks_per_node: 2}
backends: {kubernetes: {image: ortflow, suspend: true, volume: {create: {size: 1Mi}}}}
"""
KINDS = (
    "mpijobs,jobs,deployments,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,"
    "poddisruptionbudgets,pvc"
)
PATIENCE = 300.0
"""Seconds until a first step."""


def first_step(name: str, namespace: str) -> float:
    """Unix time of the first step of a run, as its launcher pod tells it."""
    pods = f"ortflow.dev/run={name},ortflow.dev/component=launcher"
    command = ["kubectl", "-n", namespace, "logs", "-l", pods, "--tail=-1"]
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        # While its container is being made there is no log.
        for line in subprocess.run(command, check=False, capture_output=True, text=True).stdout.splitlines():
            if line.startswith("::ortflow "):
                record = json.loads(line.removeprefix("::ortflow "))["record"]
                if record.get("event") == "step":
                    return float(record["time"])
        time.sleep(0.5)
    raise SystemExit(f"no step of {name} within {PATIENCE:g} s")


def measured(command: list[str], name: str, namespace: str, *, trains: bool) -> tuple[float, float]:
    """Seconds to the end of a command, and to the first step of the run that it makes; takes the run away again."""
    began = time.time()
    _, ended = run(*command)
    try:
        return ended, first_step(name, namespace) - began if trains else 0.0
    finally:
        run("kubectl", "-n", namespace, "delete", KINDS, "-l", f"ortflow.dev/run={name}")


def rounds(file: Path, count: int, namespace: str, *, trains: bool) -> dict[str, list[tuple[float, float]]]:
    """What was measured of each way; a run of its own each time."""
    found: dict[str, list[tuple[float, float]]] = {"kubectl apply": [], "ortflow submit": []}
    for number in range(count):
        for way, results in found.items():
            name = f"bench-{way.split()[0]}-{number}-{os.getpid()}"
            wanted = [str(file), f"name={name}", f"backends.kubernetes.namespace={namespace}"]
            ready = file.with_suffix(".rendered")
            ready.write_text(run(*ORTFLOW, "render", "-b", "kubernetes", *wanted)[0])
            command = ["kubectl", "apply", "-n", namespace, "-f", str(ready)]
            if way == "ortflow submit":
                command = [*ORTFLOW, "submit", "-b", "kubernetes", *wanted, "--runs-dir", str(file.parent / "runs")]
            results.append(measured(command, name, namespace, trains=trains))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-file", type=Path, help="a run that trains on this cluster")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--namespace", help="one that is there; a new one if not given")
    wanted = parser.parse_args()
    namespace = wanted.namespace or f"ortflow-bench-{os.getpid()}"
    if not wanted.namespace:
        run("kubectl", "create", "namespace", namespace)
    try:
        with tempfile.TemporaryDirectory() as folder:
            values = yaml.safe_load(wanted.run_file.read_text() if wanted.run_file else RUN_FILE)
            file = Path(folder) / "run.yaml"
            file.write_text(yaml.safe_dump({"name": "bench", **values}))
            found = rounds(file, wanted.rounds, namespace, trains=wanted.run_file is not None)
    finally:
        if not wanted.namespace:
            run("kubectl", "delete", "namespace", namespace, "--wait=false")
    medians = {
        way: [statistics.median(column) for column in zip(*results, strict=True)] for way, results in found.items()
    }
    for way, (ended, first) in medians.items():
        print(f"{way:15} {ended:6.2f} s" + (f", first step after {first:6.2f} s" if first else ""))
    (kubectl, first), (submit, our_first) = medians.values()
    print(
        f"{'over':15} {submit - kubectl:6.2f} s" + (f", first step {our_first - first:+.2f} s later" if first else "")
    )


if __name__ == "__main__":
    main()
