"""On an NVIDIA GPU: whether the examples train there as on the CPU, and how fast a GPT does, against PyTorch.

    python benchmarks/cuda.py curves [--steps 60] [--folder FOLDER]
    python benchmarks/cuda.py speed [--layers 12 --width 768 --heads 12 --context 1024 --vocabulary 50257 --batch 8]

`curves` runs examples/digits and examples/gpt through the command line, on the GPU and on the CPU from the same start,
and prints the largest and the last difference of the losses. `speed` trains the same GPT with the same weights on the
same batches, fp32 on both sides (PyTorch also with TF32), AdamW, gradient clipping, the host waiting for each loss; it
prints tokens a second, the medians of rounds by turns, and the largest difference of the losses over the first steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"
ALIKE = ["resources.ranks_per_node=1", "train.epochs=null", "export.enabled=false", "train.check_gradient=false"]


def losses(run_dir: Path) -> list[float]:
    """Loss of each step, as the run's events have it."""
    lines = (run_dir / "events" / "rank-0000.jsonl").read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]


def curves(steps: int, folder: Path) -> None:
    """Each example on both devices; SystemExit where a run fails."""
    subprocess.run([sys.executable, str(EXAMPLES / "digits" / "prepare.py")], check=True, capture_output=True)
    for name in ("digits", "gpt"):
        found = {}
        for device, gpus in (("GPU", 1), ("CPU", 0)):
            run_dir = folder / f"{name}-{device}"
            words = [*ALIKE, f"train.steps={steps}", f"resources.gpus_per_rank={gpus}", f"run_dir={run_dir}"]
            start = time.perf_counter()
            command = [sys.executable, "-m", "ortflow", "run", str(EXAMPLES / name / "run.yaml"), *words, "--fresh"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
            found[device] = losses(run_dir)
            print(f"{name} on the {device}: {steps} steps in {time.perf_counter() - start:.1f} s", flush=True)
        apart = [abs(a - b) / abs(b) for a, b in zip(found["GPU"], found["CPU"], strict=True)]
        print(
            f"{name}: loss {found['GPU'][0]:.6f} to {found['GPU'][-1]:.6f}, on the CPU to {found['CPU'][-1]:.6f}; "
            f"largest relative difference {max(apart):.2e}, over the first 10 steps {max(apart[:10]):.2e}, "
            f"last {apart[-1]:.2e}",
            flush=True,
        )


def speed(options: argparse.Namespace) -> None:
    """The race; SystemExit where the losses differ."""
    import numpy as np
    import torch
    from step import Config, Sizes, batches

    from ortflow.workflow.device.choice import cuda_runtime

    config = Config(**{name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))})
    sizes = Sizes(**{name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))})
    found = cuda_runtime()
    print(f"{found.describe(0).name}, torch {torch.__version__}, {options.batch} x {config.context} tokens", flush=True)
    tokens = options.batch * config.context
    stream = batches(config, options.batch)
    first = [next(stream) for _ in range(3)]
    reference: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        candidates = _candidates(options, config, sizes, Path(folder))
        if options.no_peers:
            candidates = {name: each for name, each in candidates.items() if name.startswith("ortflow")}
        candidates = {name: each for name, each in candidates.items() if name not in options.without}
        for name, (precision, make) in candidates.items():
            # One after the other: each has the whole memory.
            torch.set_float32_matmul_precision(precision)
            torch.compiler.reset()
            start = time.perf_counter()
            step = make()
            losses = [step(*arrays) for arrays in first]
            ready = time.perf_counter() - start
            reference = reference or losses
            apart = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
            seconds = []
            for _ in range(options.rounds):
                arrays = next(stream)
                start = time.perf_counter()
                step(*arrays)
                seconds.append(time.perf_counter() - start)
            median = statistics.median(seconds)
            print(
                f"{name:20} {tokens / median:12,.0f} tokens a second  {1e3 * median:8.2f} ms a step  "
                f"(first 3 steps {ready:.1f} s; losses {apart:.1e} from ortflow's)",
                flush=True,
            )
            del step
            torch.cuda.empty_cache()
            if (
                not apart < (1e-4 if precision == "highest" and not options.half else 1e-2)
                or not np.isfinite(losses).all()
            ):
                raise SystemExit(f"the losses differ, so the times mean nothing: {losses}, {reference}")


Candidate = tuple[str, Callable[[], Any]]


def _candidates(options: argparse.Namespace, config: Any, sizes: Any, folder: Path) -> dict[str, Candidate]:
    """Name -> torch's precision of fp32 products, and what makes a step; ortflow's come first."""
    from safetensors.numpy import load_file
    from step import CLIP, DECAY, RATE, OrtflowStep, TorchStep, make_graphs

    from ortflow.workflow.device.choice import cuda_runtime
    from ortflow.workflow.device.cuda import CudaDevice

    def mine(precision: str, made_for: str, *, fuse: bool = True) -> Callable[[], Any]:
        place = folder / made_for
        if not place.exists():
            place.mkdir()
            made[made_for] = make_graphs(config, options.batch, place, on_gpus=True, precision=made_for)
        found = cuda_runtime()
        device = CudaDevice(found, found.describe(0), precision=precision)
        return lambda: OrtflowStep(*made[made_for], 4, None, device, fuse=fuse)

    def peer(*, compiled: bool, precision: str = "fp32", mode: str | None = None) -> Callable[[], Any]:
        weights = load_file(next(iter(made.values()))[0].initial)
        settings = {"rate": RATE, "weight_decay": DECAY, "clip": CLIP, "compiled": compiled, "device": "cuda"}
        return lambda: TorchStep(sizes, weights, precision=precision, mode=mode, **settings)

    made: dict[str, Any] = {}
    if options.half:
        return {
            "ortflow, bf16": ("high", mine("bf16", "bf16")),
            "ortflow, fp16": ("high", mine("fp16", "fp16")),
            "torch eager, bf16": ("high", peer(compiled=False, precision="bf16")),
            "torch.compile, bf16": ("high", peer(compiled=True, precision="bf16")),
            **(
                {"max-autotune, bf16": ("high", peer(compiled=True, precision="bf16", mode="max-autotune"))}
                if options.max_autotune
                else {}
            ),
        }
    return {
        "ortflow": ("highest", mine("fp32", "fp32")),
        "ortflow, TF32": ("high", mine("tf32", "fp32")),
        "ortflow, unfused": ("highest", mine("fp32", "fp32", fuse=False)),
        "torch eager": ("highest", peer(compiled=False)),
        "torch.compile": ("highest", peer(compiled=True)),
        "torch.compile, TF32": ("high", peer(compiled=True)),
    }


def main() -> None:
    """Curves or speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["curves", "speed"])
    for name, value in (("layers", 4), ("width", 256), ("heads", 4), ("context", 128), ("vocabulary", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("batch", 8), ("rounds", 12), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--half", action="store_true", help="fp16 and bf16, against PyTorch's autocast")
    parser.add_argument("--max-autotune", action="store_true", help="with --half, that mode of torch.compile too")
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch out: torch.compile takes half a minute")
    parser.add_argument("--without", nargs="*", default=[], help="leave these out, by the names that are printed")
    parser.add_argument("--folder", type=Path, default=Path("runs/cuda"))
    options = parser.parse_args()
    if options.what == "curves":
        curves(options.steps, options.folder.absolute())
    else:
        speed(options)


if __name__ == "__main__":
    main()
