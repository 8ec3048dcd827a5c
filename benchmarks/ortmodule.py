"""Time of a training step of ORTModule against eager PyTorch and torch.compile, alternating in one process.

    python benchmarks/ortmodule.py --device cpu --threads 1 --models gpt resnet
    python benchmarks/ortmodule.py --device cuda --models gpt bert resnet --micro-batch 8 16 --compile

A step is forward, backward and the update with torch's AdamW (fused on GPUs); on GPUs under autocast to bf16. Prints
the medians, the ratio to the faster of the others, the first step's seconds, and with `--memory` the peak of memory of
each, in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from ortmodule_models import Gpt

from ortflow.torch import ORTModule

Build = Callable[[int, str], tuple[torch.nn.Module, tuple[Any, ...]]]


def gpt(batch: int, device: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """124M parameters, 1,024 tokens on a GPU; 3M and 128 on a CPU."""
    small = device == "cpu"
    module = Gpt(4096, 192, 4, 6, 128) if small else Gpt(50304, 768, 12, 12, 1024)
    tokens = torch.randint(0, 4096, (batch, 128 if small else 1024), device=device)
    return module, (tokens, tokens.roll(-1, 1))


def bert(batch: int, device: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """transformers' BertForMaskedLM: base with 512 tokens on a GPU, a small one with 128 on a CPU."""
    from transformers import BertConfig, BertForMaskedLM

    small = device == "cpu"
    config = (
        BertConfig(vocab_size=4096, hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768)
        if small
        else BertConfig()
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = BertForMaskedLM(config)

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = self.model(input_ids=tokens, labels=labels)
            return found.logits, found.loss

    tokens = torch.randint(0, 4096, (batch, 128 if small else 512), device=device)
    return Masked(), (tokens, tokens)


def resnet(batch: int, device: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """torchvision's resnet50 with 224 pixels on a GPU, resnet18 with 64 on a CPU."""
    import torchvision

    small = device == "cpu"

    class Classified(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torchvision.models.resnet18() if small else torchvision.models.resnet50()

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.model(images)
            return logits, torch.nn.functional.cross_entropy(logits, labels)

    size = 64 if small else 224
    images = torch.randn(batch, 3, size, size, device=device)
    if not small:
        images = images.to(memory_format=torch.channels_last)
    return Classified(), (images, torch.randint(0, 1000, (batch,), device=device))


MODELS: dict[str, Build] = {"gpt": gpt, "bert": bert, "resnet": resnet}
DEFAULT_BATCH = {"cpu": {"gpt": 4, "bert": 4, "resnet": 8}, "cuda": {"gpt": 8, "bert": 32, "resnet": 64}}


class Variant:
    """A module that is trained, and how long its steps take."""

    def __init__(self, name: str, run: Any, module: torch.nn.Module, batch: tuple[Any, ...], device: str) -> None:
        self.name, self._run, self._batch, self._device = name, run, batch, device
        self._optimizer = torch.optim.AdamW(module.parameters(), 1e-4, fused=device == "cuda" or None)
        self.seconds: list[float] = []
        begun = time.perf_counter()
        self.loss = self._step()
        self.first = time.perf_counter() - begun

    def _step(self) -> float:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device == "cuda"):
            loss = self._run(*self._batch)[1]
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.item())  # waits for the GPU

    def time(self, count: int) -> None:
        begun = time.perf_counter()
        for _ in range(count):
            self.loss = self._step()
        self.seconds.append((time.perf_counter() - begun) / count)


def variants(options: argparse.Namespace, model: str, batch: int, only: str = "") -> list[Variant]:
    torch.manual_seed(0)
    module, data = MODELS[model](batch, options.device)
    module = module.to(options.device)
    if model == "resnet" and options.device == "cuda":
        module = module.to(memory_format=torch.channels_last)
    makers: dict[str, Callable[[torch.nn.Module], Any]] = {
        "eager": lambda m: m,
        "ortmodule": lambda m: ORTModule(m, verify=options.verify),
    }
    if options.compile:
        makers["compile"] = torch.compile
        if options.device == "cuda":
            makers["compile, max-autotune"] = lambda m: torch.compile(m, mode="max-autotune")
    made = []
    for name, make in makers.items():
        if only and name != only:
            continue
        own = copy.deepcopy(module)
        try:
            made.append(Variant(name, make(own), own, data, options.device))
        except Exception as error:  # noqa: BLE001 - the others are still of interest
            print(f"{model} {batch} {name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
    return made


def report(options: argparse.Namespace, model: str, batch: int) -> None:
    found = variants(options, model, batch)
    for _ in range(options.rounds):
        for each in found:
            each.time(options.steps)
    medians = {each.name: statistics.median(each.seconds[1:] or each.seconds) for each in found}
    others = [seconds for name, seconds in medians.items() if name != "ortmodule"]
    for each in found:
        line = {
            "model": model, "micro_batch": batch, "variant": each.name, "ms": round(medians[each.name] * 1e3, 2),
            "first_s": round(each.first, 1), "loss": round(each.loss, 4),
        }  # fmt: skip
        if each.name == "ortmodule" and others:
            line["speed_against_best"] = round(min(others) / medians["ortmodule"], 3)
        print(json.dumps(line), flush=True)
    if options.memory:
        for each in found:
            memory(options, model, batch, each.name)


def memory(options: argparse.Namespace, model: str, batch: int, name: str) -> None:
    """The peak of a variant, in a process of its own."""
    command = [
        sys.executable, __file__, "--device", options.device, "--models", model, "--micro-batch", str(batch),
        "--threads", str(options.threads), "--only", name, "--no-verify", *(["--compile"] if options.compile else []),
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    print((found.stdout.strip().splitlines() or [found.stderr[-300:]])[-1], flush=True)


def _peak_kib() -> int:
    """Of this program: `getrusage` begins with that of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def peak(options: argparse.Namespace, model: str, batch: int) -> None:
    free = torch.cuda.mem_get_info()[0] if options.device == "cuda" else 0
    built = _peak_kib()
    (found,) = variants(options, model, batch, options.only)
    least = free
    first = _peak_kib()
    for _ in range(3):
        found.time(1)
        if options.device == "cuda":
            least = min(least, torch.cuda.mem_get_info()[0])
    used = (free - least) / 2**20 if options.device == "cuda" else _peak_kib() / 1024
    line = {"model": model, "micro_batch": batch, "variant": options.only, "peak_mib": round(used)}
    if options.device == "cpu":
        line |= {"before_mib": built // 1024, "first_step_mib": first // 1024}
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--micro-batch", nargs="+", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also torch.compile, on GPUs in two modes")
    parser.add_argument("--memory", action="store_true", help="also the peak of memory of each")
    parser.add_argument("--no-verify", dest="verify", action="store_false")
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    for model in options.models:
        for batch in options.micro_batch or [DEFAULT_BATCH[options.device][model]]:
            (peak if options.only else report)(options, model, batch)


if __name__ == "__main__":
    main()
