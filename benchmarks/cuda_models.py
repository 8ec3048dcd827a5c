"""Models of torchvision and transformers on one NVIDIA GPU, bf16: ortflow against PyTorch, eager and compiled.

    python benchmarks/cuda_models.py [--only resnet50 bert llama --rounds 12 --without max-autotune --folder FOLDER]

ResNet-50 at 224 x 224, BERT-base at 512 tokens (masked language modelling), a Llama of 1.1 billion parameters at 2,048
tokens, and, if asked for, the example's GPT in the size of GPT-2 at micro-batches of 8, 16 and 32. `bert-drop` and
`gpt2-drop-8` have the dropout of 0.1 with which they are fine-tuned: of embeddings, attention's weights, and what is
added to the residual. BERT, Llama and ResNet are exported by `ortflow.export_for_training`. All are trained from the
same weights on the same batches, AdamW (fused in PyTorch), clipping, the host waiting for each loss; PyTorch by
autocast to bf16 with its fused attention, ResNet-50 in its channels-last layout. The next batch is copied to the GPU
while a step runs: PyTorch's from pinned memory that holds it already, on a stream of its own, and ortflow's, which must
be copied to pinned memory too, as in a run. Each candidate has a process of its
own, so that one that fails or takes longer than `--limit` loses none of the others. Those of `--together` models are
made ready at the same time and measured one after the other, while the others wait; with `--apart` each has the GPU's
memory to itself. The losses of the first steps must agree. With dropout they do because the models have not learned
anything yet: the masks differ from those of PyTorch. `prepare` makes the graphs in FOLDER, `measure` uses them, on any
machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from step import CLIP, DECAY, RATE, Config, OrtflowStep, Sizes, TorchStep, graphs_of, make_graphs, run_file
from torch import nn
from torch.nn import functional

import ortflow
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.spec.run import TrainerRunSpec

AGREEMENT = 2e-2
"""Largest relative difference of the losses of the first steps: bf16 on both sides, and BatchNormalization of random
weights amplifies rounding."""
FIRST, MORE = 3, 4
"""Steps whose losses are compared, and further ones that are not timed."""
MARK = "measured: "
CANDIDATES = "ortflow", "torch eager", "torch.compile", "max-autotune"
Arrays = dict[str, np.ndarray]
Losses = Callable[[Iterable[Arrays]], Iterator[float]]
"""Trains on a stream of batches: the loss of each step, before its update."""


@dataclass(frozen=True)
class Case:
    """A model: how it is made, what it is fed, what its loss is."""

    make: Callable[[], nn.Module]
    feeds: Callable[[np.random.Generator], Arrays]
    batch: int
    channels_last: bool = False
    dropout: float = 0.0


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


def bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    settings = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "attn_implementation": "sdpa"}
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


DROPOUT = 0.1
GPT2 = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50_304}


def _gpt2(batch: int, dropout: float = 0.0) -> Case:
    def feeds(random: np.random.Generator) -> Arrays:
        windows = random.integers(0, GPT2["vocabulary"], (batch, GPT2["context"] + 1))
        return {"tokens": windows[:, :-1].copy(), "labels": windows[:, 1:].copy()}

    return Case(lambda: nn.Module(), feeds, batch, dropout=dropout)


CASES = {
    "resnet50": Case(resnet50, _images(128), 128, channels_last=True),
    "bert": Case(bert, _tokens(30_522, 32, 512), 32),
    "llama": Case(llama, _tokens(32_000, 4, 2048), 4),
    **{f"gpt2-{batch}": _gpt2(batch) for batch in (8, 16, 32)},
    "bert-drop": Case(lambda: bert(DROPOUT), _tokens(30_522, 32, 512), 32, dropout=DROPOUT),
    **{f"gpt2-drop-{batch}": _gpt2(batch, DROPOUT) for batch in (8, 16, 32)},
}
DEFAULT = "resnet50", "bert", "llama"
EXPORTED = *DEFAULT, "bert-drop"


def module_of(name: str) -> nn.Module:
    """The model with the weights of seed 0."""
    torch.manual_seed(0)
    return CASES[name].make()


def prepare(name: str, folder: Path) -> None:
    """Export the model and make its graphs."""
    case, path = CASES[name], folder / "model.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    if name not in EXPORTED:
        make_graphs(Config(**GPT2, dropout=case.dropout), case.batch, folder, on_gpus=True, precision="bf16")
        return
    feeds = case.feeds(np.random.default_rng(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ortflow.export_for_training(module_of(name), torch.from_numpy(feeds["input"][:2]), path, input_names=["input"])
    graphs_of(spec_of(name, folder), folder, on_gpus=True)


def spec_of(name: str, folder: Path) -> TrainerRunSpec:
    """The run file."""
    return TrainerRunSpec.model_validate(
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


def ortflow_losses(name: str, folder: Path) -> Losses:
    """The trainer that ranks run."""
    from ortflow.workflow.device.choice import cuda_runtime
    from ortflow.workflow.device.cuda import CudaDevice

    graphs, batch = GraphSet.load(folder / "graphs"), CASES[name].batch
    exported = name in EXPORTED
    if exported:
        # The graphs may come from another machine, without the weights.
        values = {key: value.numpy() for key, value in module_of(name).state_dict().items()}
        save_file({entry.name: np.ascontiguousarray(values[entry.name]) for entry in graphs.index}, graphs.initial)
    spec = spec_of(name, folder) if exported else run_file(batch, folder, on_gpus=True, precision="bf16")
    found = cuda_runtime()
    device = CudaDevice(found, found.describe(0), precision="bf16")
    return OrtflowStep(graphs, spec, 4, None, device).over


def on_gpu(stream: Iterable[Arrays]) -> Iterator[dict[str, torch.Tensor]]:
    """The batches on the GPU: each is copied there while the one before is used. Each array is pinned once."""
    copies, pinned = torch.cuda.Stream(), dict[int, torch.Tensor]()

    def sent(arrays: Arrays) -> dict[str, torch.Tensor]:
        for array in arrays.values():
            if id(array) not in pinned:
                pinned[id(array)] = torch.from_numpy(array).pin_memory()
        with torch.cuda.stream(copies):
            return {key: pinned[id(array)].cuda(non_blocking=True) for key, array in arrays.items()}

    ahead = None
    for arrays in stream:
        following = sent(arrays)
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream().wait_stream(copies)
        for tensor in following.values():
            tensor.record_stream(torch.cuda.current_stream())
        ahead = following
    if ahead is not None:
        yield ahead


def torch_losses(name: str, folder: Path, *, compiled: bool, mode: str | None = None) -> Losses:
    """Training as PyTorch's users write it."""
    step = torch_step(name, folder, compiled=compiled, mode=mode)
    return lambda stream: map(step, on_gpu(stream))


def torch_step(
    name: str, folder: Path, *, compiled: bool, mode: str | None = None
) -> Callable[[dict[str, torch.Tensor]], float]:
    """One step, on tensors of the GPU: the loss before the update."""
    case = CASES[name]
    if name not in EXPORTED:
        weights = load_file(GraphSet.load(folder / "graphs").initial)
        settings: dict[str, Any] = {"rate": RATE, "weight_decay": DECAY, "clip": CLIP, "device": "cuda"}
        settings["dropout"] = case.dropout
        peer = TorchStep(Sizes(**GPT2), weights, compiled=compiled, mode=mode, precision="bf16", **settings)
        return lambda arrays: peer(arrays["tokens"], arrays["labels"])
    module = module_of(name).cuda().train()
    if case.channels_last:
        module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def loss_of(input: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(module(input).flatten(0, -2), labels.flatten())

    forward: Any = torch.compile(loss_of, mode=mode) if compiled else loss_of

    def step(arrays: dict[str, torch.Tensor]) -> float:
        input, labels = arrays["input"], arrays["labels"]
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


def losses_of(name: str, candidate: str, folder: Path) -> Losses:
    """The training of a candidate."""
    if candidate == "ortflow":
        return ortflow_losses(name, folder)
    mode = "max-autotune" if candidate == "max-autotune" else None
    return torch_losses(name, folder, compiled=candidate != "torch eager", mode=mode)


def child(name: str, candidate: str, folder: Path, rounds: int) -> None:
    """Make a candidate ready, say so, wait for a line, measure: two lines of JSON."""
    case, random = CASES[name], np.random.default_rng(0)
    arrays = [case.feeds(random) for _ in range(4)]
    begun = time.perf_counter()
    steps = losses_of(name, candidate, folder)(itertools.cycle(arrays))
    losses = [next(steps) for _ in range(FIRST + MORE)][:FIRST]
    print(MARK + json.dumps({"losses": losses, "ready": time.perf_counter() - begun}), flush=True)
    sys.stdin.readline()
    seconds = []
    # One untimed: the GPU's clock has fallen while it waited.
    for _ in range(rounds + 1):
        start = time.perf_counter()
        next(steps)
        seconds.append(time.perf_counter() - start)
    memory = torch.cuda.mem_get_info()
    print(MARK + json.dumps({"seconds": seconds[1:], "used": memory[1] - memory[0]}), flush=True)


@dataclass
class Candidate:
    """A process that runs `child`; `said` are its lines of JSON."""

    name: str
    candidate: str
    process: subprocess.Popen[str]
    said: list[dict[str, Any]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def listen(self) -> None:
        """Read its lines until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.said.append(json.loads(line.removeprefix(MARK)))
            else:
                self.words.append(line.rstrip())

    def wait_for(self, lines: int, until: float) -> dict[str, Any] | None:
        """Its last line; None if it has ended or the time is over."""
        while len(self.said) < lines and time.monotonic() < until and self.process.poll() is None:
            time.sleep(0.02)
        if len(self.said) < lines and self.process.poll() is not None:
            time.sleep(0.2)
        return self.said[lines - 1] if len(self.said) >= lines else None

    def measured(self, until: float) -> dict[str, Any] | None:
        """Its times."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.wait_for(2, until)


def begin(name: str, candidate: str, options: argparse.Namespace, folder: Path) -> Candidate:
    """Start the process of a candidate."""
    command = [sys.executable, __file__, "child", "--only", name, "--candidate", candidate]
    command += ["--folder", str(folder), "--rounds", str(options.rounds)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    made = Candidate(name, candidate, process)
    threading.Thread(target=made.listen, daemon=True).start()
    return made


class Table:
    """What was measured of models, and the losses of the first candidate of each."""

    def __init__(self) -> None:
        self.whole = True
        self._losses: dict[str, list[float]] = {}
        self._times: dict[str, dict[str, float]] = {}

    def measure(self, candidates: list[tuple[str, str]], options: argparse.Namespace, folder: Path) -> None:
        """Print the lines of candidates that are made ready together."""
        until = time.monotonic() + options.limit
        running = [begin(*each, options, folder) for each in candidates]
        try:
            ready = [each.wait_for(1, until) for each in running]
            late = [first is None and each.process.poll() is None for each, first in zip(running, ready, strict=True)]
            for each, first in zip(running, ready, strict=True):
                if first is None:
                    # The others are measured alone.
                    each.process.kill()
                    each.process.wait()
            for each, first, is_late in zip(running, ready, late, strict=True):
                self._line(each, first, late=is_late)
        finally:
            for each in running:
                each.process.kill()
                each.process.wait()

    def _line(self, each: Candidate, first: dict[str, Any] | None, *, late: bool) -> None:
        batch = CASES[each.name].batch
        title = f"{each.name}, batch {batch}, {each.candidate:14}"
        found = each.measured(time.monotonic() + 60) if first else None
        if first is None or found is None:
            print(f"{title} {'took too long' if late else 'failed'}", *each.words[-12:], sep="\n  ", flush=True)
            self.whole = False
            return
        losses = first["losses"]
        reference = self._losses.setdefault(each.name, losses)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
        seconds = statistics.median(found["seconds"])
        print(
            f"{title} {1e3 * seconds:8.2f} ms a step, {batch / seconds:10,.1f} samples a second"
            f" (first {FIRST + MORE} steps {first['ready']:.1f} s; losses {apart:.1e} from the first line's)",
            flush=True,
        )
        for line in each.words if each.candidate == "ortflow" else ():
            print(f"  {line}", flush=True)
        if not (np.isfinite(losses).all() and apart < AGREEMENT):
            print(f"  the losses differ, so this time means nothing: {losses}, {reference}", flush=True)
            self.whole = False
            return
        self._times.setdefault(each.name, {})[each.candidate] = seconds
        each.process.kill()

    def ratios(self) -> None:
        """Print, for each model, the best peer's time over ortflow's."""
        for name, times in self._times.items():
            peers = {key: value for key, value in times.items() if key != "ortflow"}
            if peers and "ortflow" in times:
                best = min(peers, key=peers.__getitem__)
                print(f"{name}: {best} / ortflow = {peers[best] / times['ortflow']:.2f}", flush=True)


def main() -> None:
    """Prepare, measure, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["prepare", "measure", "child"], help="only this")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(DEFAULT))
    parser.add_argument("--without", nargs="*", choices=CANDIDATES, default=[], help="leave these out")
    parser.add_argument("--candidate", choices=CANDIDATES, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--together", type=int, default=1, help="models that are made ready at the same time")
    parser.add_argument("--apart", action="store_true", help="one candidate after the other, where memory is scarce")
    parser.add_argument("--limit", type=float, default=600, help="seconds until all of these are ready")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.what == "child":
        child(options.only[0], options.candidate, options.folder / options.only[0], options.rounds)
        return
    table = Table()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for name in options.only if options.what != "measure" else ():
            prepare(name, folder / name)
        for start in range(0, len(options.only) if options.what != "prepare" else 0, options.together):
            names = options.only[start : start + options.together]
            candidates = [(name, each) for name in names for each in CANDIDATES if each not in options.without]
            for group in [[each] for each in candidates] if options.apart else [candidates]:
                table.measure(group, options, folder)
    table.ratios()
    if not table.whole:
        raise SystemExit("not all of it was measured")


if __name__ == "__main__":
    main()
