"""On an NVIDIA GPU: the loss of a GPT over some hundred steps against PyTorch's, from the same start and batches.

    python benchmarks/cuda_curve.py [--steps 500 --layers 12 --width 768 --heads 12 --context 1024
        --vocabulary 50304 --batch 8 --precision bf16 --save FILE]

Trains on the words of Python's standard library, each of the most frequent ones a token: AdamW, clipping, warm-up and
cosine, PyTorch compiled, by autocast. Prints both losses every 50 steps and the largest relative difference, of single
steps and of means over 20 steps. Exit code 1 if the means differ by more than 0.5%. `--precision fp32` compares with
PyTorch in fp32. `--again` trains PyTorch twice, the second time from weights that differ in their last bit: how far two
right curves are from each other.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from step import CLIP, DECAY, Config, OrtflowStep, Sizes, TorchStep, make_graphs

PEAK, WARM_UP = 6e-4, 50
WINDOW, LIMIT = 20, 5e-3
Step = Callable[..., float]


def words_of(vocabulary: int) -> np.ndarray:
    """The standard library as numbers of words; words that are not among the most frequent are 0."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join(
        path.read_text(errors="ignore") for path in sorted(library.rglob("*.py")) if "-packages" not in str(path)
    )
    words = re.findall(r"\w+|[^\w\s]|\n *", text)
    frequent = [word for word, _ in collections.Counter(words).most_common(vocabulary - 1)]
    numbers = {word: number for number, word in enumerate(frequent, 1)}
    return np.array([numbers.get(word, 0) for word in words], np.int64)


def batches(tokens: np.ndarray, config: Config, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Windows from random places, the same in every call."""
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(tokens) - config.context - 1, batch)
        windows = np.stack([tokens[start : start + config.context + 1] for start in starts])
        yield np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def rate_of(step: int, steps: int) -> float:
    """Linear warm-up, then cosine to a tenth."""
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def curve(step: Step, stream: Iterator[tuple[np.ndarray, np.ndarray]], steps: int) -> np.ndarray:
    """The loss of each step."""
    return np.array([step(*next(stream), rate=rate_of(number, steps)) for number in range(steps)])


def compare(name: str, mine: np.ndarray, theirs: np.ndarray) -> float:
    """Print how far two curves are from each other; the largest relative difference of means over WINDOW steps."""
    each = float(np.max(np.abs(mine - theirs) / theirs))
    means = [np.convolve(losses, np.ones(WINDOW) / WINDOW, "valid") for losses in (mine, theirs)]
    largest = float(np.max(np.abs(means[0] - means[1]) / means[1]))
    print(f"{name}: largest difference of a step {each:.2%}, of {WINDOW} steps' mean {largest:.2%}, at the end "
          f"{abs(mine[-WINDOW:].mean() / theirs[-WINDOW:].mean() - 1):.2%}", flush=True)  # fmt: skip
    return largest


def main() -> None:
    """Train with each, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, in fp32, for a trial of this program")
    parser.add_argument("--save", type=Path, help="write the curves as JSON")
    options = parser.parse_args()
    given: dict[str, Any] = {name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))}
    config, sizes = Config(**given), Sizes(**given)
    precision = "fp32" if options.cpu else options.precision
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    tokens = words_of(config.vocabulary)
    curves: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        graphs, spec = make_graphs(config, options.batch, Path(folder), on_gpus=not options.cpu, precision=precision)
        weights = load_file(graphs.initial)
        device = None
        if not options.cpu:
            from ortflow.workflow.device.choice import cuda_runtime
            from ortflow.workflow.device.cuda import CudaDevice

            found = cuda_runtime()
            device = CudaDevice(found, found.describe(0), precision=precision)
            print(device.name, flush=True)
        mine = OrtflowStep(graphs, spec, 4, None, device)
        curves["ortflow"] = curve(mine, batches(tokens, config, options.batch), options.steps)
        del mine
        for name in ("PyTorch", "PyTorch again")[: 1 + options.again]:
            if name == "PyTorch again":
                random = np.random.default_rng(1)
                weights = {
                    key: each * (1 + 1e-7 * random.standard_normal(each.shape)).astype("f")
                    for key, each in weights.items()
                }
            step = TorchStep(
                sizes, weights, rate=PEAK, weight_decay=DECAY, clip=CLIP, compiled=not options.cpu,
                device="cpu" if options.cpu else "cuda", precision=precision,
            )  # fmt: skip
            curves[name] = curve(step, batches(tokens, config, options.batch), options.steps)
            del step
    for number in sorted({*range(0, options.steps, 50), options.steps - 1}):
        print(f"step {number:4}: " + ", ".join(f"{name} {losses[number]:.4f}" for name, losses in curves.items()))
    if options.save:
        options.save.write_text(json.dumps({name: losses.tolist() for name, losses in curves.items()}))
    largest = compare("ortflow and PyTorch", curves["ortflow"], curves["PyTorch"])
    if options.again:
        compare("PyTorch and PyTorch again", curves["PyTorch again"], curves["PyTorch"])
    if not largest <= LIMIT:
        sys.exit(f"the curves differ by more than {LIMIT:.1%}")


if __name__ == "__main__":
    main()
