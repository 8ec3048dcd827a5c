"""Models of torchvision and transformers on one NVIDIA GPU, bf16: ortflow against PyTorch, eager and compiled.

    python benchmarks/cuda_models.py [--only resnet50 bert llama --rounds 12 --max-autotune --folder FOLDER]

ResNet-50 at 224 x 224, BERT-base at 512 tokens (masked language modelling) and a Llama of 1.1 billion parameters at
2,048 tokens. Each is exported by `ortflow.export_for_training` and trained from the same weights on the same batches,
AdamW (fused in PyTorch), clipping, the host waiting for each loss; PyTorch by autocast to bf16 with its fused
attention, ResNet-50 in its channels-last layout. One after the other, so that each has the whole memory; the losses of
the first steps must agree. `prepare` makes the graphs in FOLDER, on any machine; `measure` uses them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from step import CLIP, DECAY, RATE, OrtflowStep, graphs_of
from torch import nn
from torch.nn import functional

import ortflow
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.spec.run import RunSpec

AGREEMENT = 2e-2
"""Largest relative difference of the losses of the first steps: bf16 on both sides, and BatchNormalization of random
weights amplifies rounding."""
FIRST = 3
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model: how it is made, what it is fed, what its loss is."""

    make: Callable[[], nn.Module]
    feeds: Callable[[np.random.Generator], Arrays]
    batch: int
    channels_last: bool = False


class Logits(nn.Module):
    """A language model of transformers without its caches and losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input, use_cache=False).logits


class Encoder(nn.Module):
    """A BERT for masked language modelling, on whole sentences without padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input).logits


def resnet50() -> nn.Module:
    from torchvision import models

    return models.resnet50()


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "sdpa"}
    return Encoder(BertForMaskedLM(BertConfig(**settings)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048, attn_implementation="sdpa",
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


def _tokens(vocabulary: int, batch: int, length: int) -> Callable[[np.random.Generator], Arrays]:
    def feeds(random: np.random.Generator) -> Arrays:
        return {name: random.integers(0, vocabulary, (batch, length)) for name in ("input", "labels")}

    return feeds


def _images(batch: int) -> Callable[[np.random.Generator], Arrays]:
    def feeds(random: np.random.Generator) -> Arrays:
        images = random.standard_normal((batch, 3, 224, 224), np.float32)
        return {"input": images, "labels": random.integers(0, 1000, batch)}

    return feeds


CASES = {
    "resnet50": Case(resnet50, _images(128), 128, channels_last=True),
    "bert": Case(bert, _tokens(30_522, 32, 512), 32),
    "llama": Case(llama, _tokens(32_000, 4, 2048), 4),
}


def module_of(name: str) -> nn.Module:
    """The model with the weights of seed 0."""
    torch.manual_seed(0)
    return CASES[name].make()


def prepare(name: str, folder: Path) -> None:
    """Export the model and make its graphs."""
    case, path = CASES[name], folder / "model.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    feeds = case.feeds(np.random.default_rng(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ortflow.export_for_training(module_of(name), torch.from_numpy(feeds["input"][:2]), path, input_names=["input"])
    graphs_of(spec_of(name, folder), folder, on_gpus=True)


def spec_of(name: str, folder: Path) -> RunSpec:
    """The run file."""
    return RunSpec.model_validate(
        {
            "name": "benchmark",
            "model": {"path": str(folder / "model.onnx"), "loss": {"kind": "cross_entropy"}},
            "data": {"train": {"path": "none"}, "micro_batch": CASES[name].batch},
            "train": {
                "steps": 1,
                "precision": "bf16",
                "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": DECAY, "no_decay": []},
                "clip_norm": CLIP,
            },
            "resources": {"gpus_per_rank": 1},
        }
    )


def ortflow_step(name: str, folder: Path) -> Callable[[Arrays], float]:
    """One step of the trainer that ranks run: the loss before the update."""
    from ortflow.workflow.device.choice import cuda_runtime
    from ortflow.workflow.device.cuda import CudaDevice

    graphs = GraphSet.load(folder / "graphs")
    # The graphs may come from another machine, without the weights.
    values = {key: value.numpy() for key, value in module_of(name).state_dict().items()}
    save_file({entry.name: np.ascontiguousarray(values[entry.name]) for entry in graphs.index}, graphs.initial)
    found = cuda_runtime()
    device = CudaDevice(found, found.describe(0), precision="bf16")
    return OrtflowStep(graphs, spec_of(name, folder), 4, None, device).of


def torch_step(name: str, *, compiled: bool, mode: str | None = None) -> Callable[[Arrays], float]:
    """One step as PyTorch's users write it."""
    case = CASES[name]
    module = module_of(name).cuda().train()
    if case.channels_last:
        module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def loss_of(input: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(module(input).flatten(0, -2), labels.flatten())

    forward: Any = torch.compile(loss_of, mode=mode) if compiled else loss_of

    def step(arrays: Arrays) -> float:
        input, labels = (torch.from_numpy(arrays[key]).cuda(non_blocking=True) for key in ("input", "labels"))
        if case.channels_last:
            input = input.to(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(input, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(name: str, folder: Path, options: argparse.Namespace) -> None:
    """Print the model's lines; SystemExit where losses differ."""
    case = CASES[name]
    candidates: dict[str, Callable[[], Callable[[Arrays], float]]] = {
        "ortflow": lambda: ortflow_step(name, folder),
        "torch eager": lambda: torch_step(name, compiled=False),
        "torch.compile": lambda: torch_step(name, compiled=True),
    }
    if options.max_autotune:
        candidates["max-autotune"] = lambda: torch_step(name, compiled=True, mode="max-autotune")
    random = np.random.default_rng(0)
    arrays = [case.feeds(random) for _ in range(4)]
    times: dict[str, float] = {}
    reference: list[float] = []
    for candidate, make in candidates.items():
        torch.compiler.reset()
        with emptied():
            begun = time.perf_counter()
            step = make()
            losses = [step(arrays[place % 4]) for place in range(FIRST + 4)][:FIRST]
            ready = time.perf_counter() - begun
            reference = reference or losses
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
            seconds = []
            for place in range(options.rounds):
                start = time.perf_counter()
                step(arrays[place % 4])
                seconds.append(time.perf_counter() - start)
            del step
        times[candidate] = statistics.median(seconds)
        print(
            f"{name}, batch {case.batch}, {candidate:14} {1e3 * times[candidate]:8.2f} ms a step, "
            f"{case.batch / times[candidate]:10,.1f} samples a second (first {FIRST + 4} steps {ready:.1f} s; losses "
            f"{apart:.1e} from ortflow's)",
            flush=True,
        )
        if not (np.isfinite(losses).all() and apart < AGREEMENT):
            raise SystemExit(f"the losses differ, so the times mean nothing: {losses}, {reference}")
    best = min((each for each in times if each.startswith(("torch", "max"))), key=times.__getitem__)
    print(f"{name}: {best} / ortflow = {times[best] / times['ortflow']:.2f}", flush=True)


@contextlib.contextmanager
def emptied() -> Iterator[None]:
    """Give the memory back afterwards."""
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Prepare, measure, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["prepare", "measure"], help="only this")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-autotune", action="store_true", help="that mode of torch.compile too")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for name in options.only:
            if options.what != "measure":
                prepare(name, folder / name)
            if options.what != "prepare":
                measure(name, folder / name, options)


if __name__ == "__main__":
    main()
