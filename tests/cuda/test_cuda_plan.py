"""The GPU memory that `ortflow inspect --plan` predicts, against what a run of the training graph takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_files import spec_of

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.assembly.updates import write_forms
from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.planning.forecast import activations

ROOT = Path(__file__).parents[2]
SIZES = {"layers": 4, "width": 768, "heads": 12, "context": 1024, "vocabulary": 20000}
LIBRARIES = 150e6
"""Bytes that cuBLAS, cuDNN and compiled kernels take in the first run; part of the stated constant."""


def test_activations_of_a_gpt(cuda: Runtime, tmp_path: Path) -> None:
    words = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    program = ROOT / "examples/gpt/model.py"
    subprocess.run([sys.executable, program, "--output", tmp_path / "m.onnx", *words], check=True)
    spec = spec_of(
        model={"path": str(tmp_path / "m.onnx"), "loss": {"kind": "cross_entropy"}}, resources={"gpus_per_rank": 1}
    )
    graphs = build_graphs(spec, tmp_path / "graphs", 1024)
    graphs.optimizer.write_bytes(graphs.train.read_bytes())
    write_forms(graphs, spec.train.precision)
    shapes = {"tokens": (8, 1024), "labels": (8, 1024)}
    peak = activations(graphs, spec, shapes)
    measured_run = [sys.executable, ROOT / "tests/support/measured_run.py", tmp_path / "graphs", "auto"]
    done = subprocess.run([*measured_run, json.dumps(shapes), "cuda"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = int(done.stdout.split()[-1])
    print(f"predicted {peak.held:,} ({peak.size:,} alive), measured {measured:,}: {peak.held / measured:.3f}")
    print(f"most at {peak.node}: {peak.values[:8]}; unknown: {peak.unknown}")
    assert 0.9 * peak.held <= measured <= 1.1 * peak.held + LIBRARIES, pytest.approx(measured)
