"""Time of a training step of ORTModule against eager PyTorch and torch.compile, alternating in one process.

    python benchmarks/ortmodule.py --device cpu --threads 1 --models gpt resnet --compile default
    python benchmarks/ortmodule.py --device cuda --models gpt bert --micro-batch 8 16 --compile default reduce-overhead

A step is forward, backward and the update with torch's AdamW, fused on GPUs; on GPUs under autocast to bf16. The host
waits for the GPU after `--steps` steps. Prints a JSON line when a variant has made its first step, with the seconds
that it took, and one with the median of the rounds, and for ORTModule the ratio to the fastest of the others. `--late`
modes of torch.compile follow when the others are measured: what is known is printed before they compile. With
`--memory`, the peak of each, in a process of its own. With `--kernels N`, the N kernels of a step on which each variant
spends the most time.

Several processes share a GPU with `--lock FILE`: first steps run side by side, measurements alone.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ortmodule_cases import BATCH, CASES

from ortflow.torch import ORTModule

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class Variant:
    """A module that is trained, and how long its steps take."""

    def __init__(self, name: str, run: Any, module: torch.nn.Module, batch: tuple[Any, ...], device: str) -> None:
        self.name, self._run, self._batch, self._device = name, run, batch, device
        self._optimizer = torch.optim.AdamW(module.parameters(), 1e-4, fused=device == "cuda" or None)
        self.seconds: list[float] = []
        begun = time.perf_counter()
        self.loss = float(self._step().item())
        self.first = time.perf_counter() - begun
        self.release()

    def _step(self) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device == "cuda"):
            loss: torch.Tensor = self._run(*self._batch)[1]
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def time(self, count: int) -> None:
        """Seconds of a step, of `count` in a row."""
        begun = time.perf_counter()
        for _ in range(count):
            loss = self._step()
        self.loss = float(loss.item())  # waits for the GPU
        self.seconds.append((time.perf_counter() - begun) / count)

    def kernels(self, steps: int = 3) -> tuple[float, dict[str, tuple[float, float]]]:
        """Milliseconds of all kernels and copies of a step; name -> milliseconds and calls of a step."""
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                self._step()
            torch.cuda.synchronize()
        rows = {
            row.key: (row.self_device_time_total / steps / 1e3, row.count / steps) for row in profile.key_averages()
        }
        return sum(milliseconds for milliseconds, _ in rows.values()), rows

    def release(self) -> None:
        """Give memory that nothing uses back to the GPU, where other processes compile."""
        self._optimizer.zero_grad()
        if self._device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    @property
    def is_ours(self) -> bool:
        """Whether it is an ORTModule."""
        return self.name.startswith("ortmodule")

    @property
    def median(self) -> float:
        """Seconds of a step; the first round warms up."""
        return statistics.median(self.seconds[1:] or self.seconds)


@contextlib.contextmanager
def turn(lock: Path | None, *, alone: bool) -> Iterator[None]:
    """While other processes with the same lock may run, too, or none of them."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


class Work:
    """A model at one size of the micro-batch."""

    def __init__(self, options: argparse.Namespace, model: str, batch: int) -> None:
        self._options, self._model, self._size = options, model, batch
        torch.manual_seed(0)
        module, self._data = CASES[model](batch, options.device)
        self._module = module.to(options.device)

    def variant(self, name: str) -> Variant | None:
        """The variant after its first step; None, and a printed reason, if it fails."""
        own = copy.deepcopy(self._module)
        run: Any = own
        if name.startswith("ortmodule"):
            run = ORTModule(own, verify=self._options.verify and name == "ortmodule", cuda_graphs=True)
        elif name != "eager":
            torch.compiler.reset()  # sizes of another mode's graphs would become dynamic
            run = torch.compile(own, mode=name, dynamic=False)
        try:
            made = Variant(name, run, own, self._data, self._options.device)
        except Exception as error:  # noqa: BLE001 - the others are still of interest
            self.print(name, error=f"{type(error).__name__}: {str(error)[:1500]}")
            # The graphs differ from PyTorch, or cannot be compared: how fast are they?
            return self.variant("ortmodule, not compared") if name == "ortmodule" and self._options.verify else None
        self.print(name, first_s=round(made.first, 1), loss=round(made.loss, 4))
        return made

    def measure(self, variants: list[Variant]) -> None:
        """Time all by turns, and print a line for each."""
        for each in variants:
            each.seconds.clear()
        for _ in range(self._options.rounds):
            for each in variants:
                each.time(self._options.steps)
        others = [each.median for each in variants if not each.name.startswith("ortmodule")]
        for each in variants:
            ratio = (
                {"of_fastest_other": round(each.median / min(others), 3)}
                if each.name.startswith("ortmodule") and others
                else {}
            )
            self.print(each.name, ms=round(each.median * 1e3, 2), **ratio, loss=round(each.loss, 4))

    def print_kernels(self, variant: Variant, count: int) -> None:
        """A line for each of the kernels that take the most time, and one for all."""
        total, rows = variant.kernels()
        self.print(variant.name, kernels_ms=round(total, 3), calls=round(sum(calls for _, calls in rows.values())))
        for name, (milliseconds, calls) in sorted(rows.items(), key=lambda row: -row[1][0])[:count]:
            self.print(variant.name, kernel=name[:160], ms=round(milliseconds, 3), calls=round(calls, 1))

    def print(self, variant: str, **found: Any) -> None:
        """A line of the result, in one write."""
        line = {"model": self._model, "micro_batch": self._size, "variant": variant, **found}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def report(options: argparse.Namespace, model: str, batch: int) -> None:
    """Time the variants of a model."""
    early = [mode for mode in options.compile if mode not in options.late]
    with turn(options.lock, alone=False):
        work = Work(options, model, batch)
        made = [work.variant(name) for name in ("eager", "ortmodule", *early)]
    variants = [each for each in made if each is not None]
    with turn(options.lock, alone=True):
        work.measure(variants)
        for each in variants:
            if options.kernels:
                work.print_kernels(each, options.kernels)
            each.release()
    for mode in options.late:
        with turn(options.lock, alone=True):
            found = work.variant(mode)
            if found is not None:
                work.measure([*(each for each in variants if each.is_ours), found])
                found.release()
    for name in options.memory:
        peak_of(options, model, batch, name)


def peak_of(options: argparse.Namespace, model: str, batch: int, name: str) -> None:
    """Print the peak of a variant, found in a process of its own."""
    command = [
        sys.executable, __file__, "--device", options.device, "--models", model, "--micro-batch", str(batch),
        "--threads", str(options.threads), "--only", name, "--no-verify",
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    print((found.stdout.strip().splitlines() or [found.stderr[-300:]])[-1], flush=True)


def _peak_kib() -> int:
    """Of this program: `getrusage` begins with that of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _gpu_bytes() -> int:
    """Of this process; of the whole GPU where NVIDIA's library does not say whose they are."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
    free, total = torch.cuda.mem_get_info()
    return total - free


def peak(options: argparse.Namespace, model: str, batch: int) -> None:
    """Print the most memory that a variant takes in four steps; neither allocator gives any back within a step."""
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.zeros(1, device="cuda")
    before = _gpu_bytes() if on_gpu else 0
    built = _peak_kib()
    work = Work(options, model, batch)
    variant = work.variant(options.only)
    if variant is None:
        return
    first = _peak_kib()
    most = 0
    for _ in range(3):
        variant.time(1)
        most = max(most, _gpu_bytes() - before) if on_gpu else _peak_kib() * 1024
    extra = {} if on_gpu else {"before_mib": built // 1024, "first_step_mib": first // 1024}
    work.print(options.only, peak_mib=round(most / 2**20), **extra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--micro-batch", nargs="+", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", nargs="*", choices=MODES, default=[], help="also these modes of torch.compile")
    parser.add_argument("--late", nargs="*", choices=MODES, default=[], help="and these, when all else is measured")
    parser.add_argument("--memory", nargs="*", default=[], help="also the peak of memory of these variants")
    parser.add_argument("--kernels", type=int, default=0, help="also this many kernels of each variant, on a GPU")
    parser.add_argument("--lock", type=Path, help="file that processes on one GPU share")
    parser.add_argument("--no-verify", dest="verify", action="store_false")
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    for model in options.models:
        for batch in options.micro_batch or [BATCH[options.device][model]]:
            (peak if options.only else report)(options, model, batch)


if __name__ == "__main__":
    main()
