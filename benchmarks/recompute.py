"""Memory of activations and time of a micro-batch, with and without recomputation of layers, against PyTorch.

    python benchmarks/recompute.py                                # GPT-2's shape, 4 x 512 tokens
    python benchmarks/recompute.py --layers 8 --width 256 --heads 4 --vocabulary 2000 --rounds 4     # minutes

Trains the GPT of examples/gpt with `model.recompute: layers` and without, and the same module in PyTorch, if it is
installed, with torch.utils.checkpoint around each block and without. Each side runs forward and backward pass in a
process of its own; the sides take turns. `activations` is how much the process grows in its steps, without the
gradients; `time` the median of all steps. The prediction is that of `ortflow inspect --plan`: for the time, the ratio
of operations. The gradients of ortflow's two sides are compared bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gpt" / "model.py"
OWN, PEER = ("kept", "layers"), ("torch", "torch checkpoint")
MB = 1e6
STEPS = 3
"""Timed steps of a process, after one that is not."""


def batch_of(options: argparse.Namespace) -> np.ndarray[Any, Any]:
    """Tokens, one more for each sample than the model reads."""
    return np.random.default_rng(0).integers(0, options.vocabulary, (options.batch, options.context + 1))


def build(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the model and the graphs of both sides; the prediction."""
    import onnx

    from ortflow.workflow.assembly.build import build_graphs
    from ortflow.workflow.assembly.saving import operations
    from ortflow.workflow.planning.forecast import activations
    from ortflow.workflow.spec.run import TrainerRunSpec

    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads", "context", "vocabulary")}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    subprocess.run([sys.executable, str(EXAMPLE), "--output", str(folder / "model.onnx"), *words], check=True)
    shapes = dict.fromkeys(("tokens", "labels"), (options.batch, options.context))
    predicted = {}
    for side, recompute in zip(OWN, ([], "layers"), strict=True):
        run = {
            "name": side,
            "model": {"path": str(folder / "model.onnx"), "loss": {"kind": "cross_entropy"}, "recompute": recompute},
            "data": {"train": {"path": "unused"}, "micro_batch": options.batch},
            "train": {"steps": 1, "optimizer": {"name": "adamw", "lr": 1e-3}},
        }
        spec = TrainerRunSpec.model_validate(run)
        graphs = build_graphs(spec, folder / side)
        held = activations(graphs, spec, shapes).held
        predicted[side] = {"bytes": held, "operations": operations(onnx.load(graphs.train), shapes)}
    return predicted


def own_step(folder: Path, options: argparse.Namespace) -> tuple[Callable[[], bytes], int]:
    """A function that runs a micro-batch and returns a digest of the gradients, and the gradients' bytes."""
    from safetensors.numpy import load_file

    from ortflow.workflow.device.cpu import CpuDevice
    from ortflow.workflow.graph.forms import Form
    from ortflow.workflow.graph.types import GraphSet
    from ortflow.workflow.kernels.library import library_for
    from ortflow.workflow.sessions.session import Sessions

    graphs, library = GraphSet.load(folder / options.side), library_for("auto")
    path = Form.KERNELS.of(graphs.train) if library is not None else graphs.train
    session = Sessions(CpuDevice(), options.threads, "error", library.path if library else None).open(path)
    tokens = batch_of(options)
    feeds = {**load_file(graphs.initial), "tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    names = sorted(value.name for value in session.get_outputs())
    given = {value.name: feeds[value.name] for value in session.get_inputs()}

    def step() -> bytes:
        digest = hashlib.sha256()
        for array in session.run(names, given):
            digest.update(array)
        return digest.digest()

    return step, 4 * graphs.index.trained


def torch_step(options: argparse.Namespace) -> tuple[Callable[[], bytes], int]:
    """The same in PyTorch, without a digest."""
    import torch
    from torch.utils.checkpoint import checkpoint
    from torch_gpt import Gpt, Sizes

    torch.set_num_threads(options.threads)
    names = ("layers", "width", "heads", "context", "vocabulary")
    model = Gpt(Sizes(**{name: getattr(options, name) for name in names}))
    if options.side == PEER[1]:
        for block in model.h:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    tokens = torch.tensor(batch_of(options))

    def step() -> bytes:
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        return b""

    return step, sum(4 * parameter.numel() for parameter in model.parameters())


def measure(step: Callable[[], bytes], gradients: int) -> dict[str, Any]:
    """Growth of this process and the time of each step."""

    def kilobytes(name: str) -> int:
        found = re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    digest, seconds = step().hex(), []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"bytes": (kilobytes("VmHWM") - before) * 1024 - gradients, "seconds": seconds, "digest": digest}


def main() -> None:
    """Measure all sides in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 12, "width": 768, "heads": 12, "context": 512, "vocabulary": 50257, "batch": 4}
    for name, value in {**sizes, "threads": 2, "rounds": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--side", choices=(*OWN, *PEER), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        made = own_step(options.folder, options) if options.side in OWN else torch_step(options)
        print(json.dumps(measure(*made)))
        return
    sides = OWN + (PEER if importlib.util.find_spec("torch") else ())
    with tempfile.TemporaryDirectory() as folder:
        predicted = build(options, Path(folder))
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                words = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--folder", folder]
                done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
                found[side].append(json.loads(done.stdout.splitlines()[-1]))
    held = {side: max(each["bytes"] for each in found[side]) for side in sides}
    times = {side: statistics.median(t for each in found[side] for t in each["seconds"]) for side in sides}
    print(f"{'side':18}{'activations':>14}{'predicted':>12}{'time':>10}")
    for side in sides:
        wanted = f"{predicted[side]['bytes'] / MB:9.0f} MB" if side in predicted else ""
        print(f"{side:18}{held[side] / MB:11.0f} MB{wanted:>12}{times[side]:8.2f} s")
    more = predicted["layers"]["operations"] / predicted["kept"]["operations"]
    print(
        f"ortflow: memory x {held['layers'] / held['kept']:.2f}, time x {times['layers'] / times['kept']:.2f}", end=""
    )
    print(f" (operations x {more:.2f})")
    if PEER[0] in sides:
        print(f"torch:   memory x {held[PEER[1]] / held[PEER[0]]:.2f}, time x {times[PEER[1]] / times[PEER[0]]:.2f}")
        print(
            f"ortflow / torch, both recomputing: memory {held['layers'] / held[PEER[1]]:.2f}, "
            f"time {times['layers'] / times[PEER[1]]:.2f}"
        )
    digests = {each["digest"] for side in OWN for each in found[side]}
    print("gradients: " + ("the same bits" if len(digests) == 1 else "NOT THE SAME BITS"))


if __name__ == "__main__":
    main()
