"""What `export.quantize: int8` makes of the walks' models: size, latency and metric against the exported model in fp32.

    python benchmarks/quantized.py [--only table images language] [--rounds 30]

Each walk of benchmarks/walks.py is one run that evaluates a fifth of its samples and exports both forms. Size,
difference of the outputs and metrics are those of the event `export_variant`. For the latency of a micro-batch,
sessions of ONNX Runtime take turns, because a machine's speed drifts. Needs PyTorch, timm and transformers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from walks import WALKS, run

from ortflow.workflow.onnx_runtime import onnxruntime

LENGTH = 64
"""Tokens of a sample, where the model leaves it open."""
MEASURED = ("table", "images", "language")
"""Not masked tokens, which have labels in training alone."""
LOOSE = {"quantize_tolerance": 10.0, "metric_tolerance": 10.0}
"""What is measured here is not refused."""


def feed_of(session: Any, batch: int) -> dict[str, Any]:
    """Values of the inputs of a micro-batch."""
    chance, values = np.random.default_rng(0), {}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) else LENGTH for size in value.shape]
        shape[0] = batch
        if value.type == "tensor(float)":
            values[value.name] = chance.normal(size=shape).astype(np.float32)
        elif "mask" in value.name:
            values[value.name] = np.ones(shape, np.int64)
        elif "position" in value.name:
            values[value.name] = np.broadcast_to(np.arange(shape[-1]), shape).copy()
        else:
            values[value.name] = chance.integers(0, 500, shape)
    return values


def latencies(paths: list[Path], batch: int, rounds: int) -> list[float]:
    """Median seconds of a micro-batch of each model, in turns behind a first round."""
    sessions = [onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]) for path in paths]
    feed, durations = feed_of(sessions[0], batch), [[0.0] * 0 for _ in paths]
    for turn in range(rounds + 1):
        for session, own in zip(sessions, durations, strict=True):
            begun = time.perf_counter()
            session.run(None, feed)
            if turn:
                own.append(time.perf_counter() - begun)
    return [statistics.median(own) for own in durations]


def main() -> None:
    """Run the walks, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURED, default=MEASURED)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    for name in options.only:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            values = WALKS[name](folder, options)
            values["data"]["eval"] = {"fraction": 0.2}
            values["model"].setdefault("metrics", ["accuracy"])
            events = run(folder, {**values, "export": {"quantize": "int8", **LOOSE}})
            (form,) = (event for event in events if event["event"] == "export_variant")
            batch, export = values["data"]["micro_batch"], folder / "runs" / "walk" / "export"
            int8, fp32 = latencies([export / "model.int8.onnx", export / "model.onnx"], batch, options.rounds)
            size, load = form["bytes"] / form["exported_bytes"], os.getloadavg()[0]
            shown = (
                f"{name:9} size {size:.2f}, latency {int8 / fp32:.2f} ({fp32 * 1e3:.2f} ms in fp32, {batch} samples)"
            )
            print(f"{shown}, outputs {form['difference']:.1%} apart, load {load:.1f}", flush=True)
            for metric, value in form["metrics"].items():
                print(f"  {metric:9} int8 {value:.4f}, fp32 {form['exported_metrics'][metric]:.4f}", flush=True)


if __name__ == "__main__":
    main()
