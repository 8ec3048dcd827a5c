"""A GPT divided over two NVIDIA GPUs: ortflow's pipelines and divided layers against one GPU and PyTorch's pipelining.

    python benchmarks/cuda_layouts.py [--layers 12 --width 768 --heads 12 --context 1024 --vocabulary 50304 --batch 8
        --micro 1 2 4 8 16 --rounds 6 --layouts 1f1b gpipe interleaved horizontal --peers "torch eager"]

Every candidate trains the same weights on the same batches in bf16 (PyTorch by autocast): AdamW, clipping, the host
waiting for each loss. A step has `--micro` micro-batches of `--batch` samples. Prints tokens a second, and the part of
the time in which GPUs do not do what one GPU does: 1 - (time of one GPU / 2) / time, beside (p - 1) / (m + p - 1).
PyTorch's stages are the first and the second half of the layers, with Schedule1F1B; the gradient of the embedding,
which both stages use, is summed over the ranks. SystemExit if losses differ. mpirun of the environment's MPI starts the
ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ALONE = "one GPU"
AGREEMENT = 1e-2
"""Largest relative difference of the losses of the first steps: bf16 on both sides."""
WARM = 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": 2},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
    "horizontal": {"horizontal": 2},
}
PEERS = ["torch eager", "torch compiled"]
Batches = Sequence[tuple[Any, Any]]
Step = Callable[[Batches], float]


def measure(options: argparse.Namespace) -> None:
    """What each rank does for one candidate; rank 0 prints the results as JSON."""
    import torch
    from cuda_ranks import connect_torch, world_of
    from step import Config, Sizes

    comm, device, means = world_of()
    torch.cuda.set_device(comm.rank)
    torch.set_float32_matmul_precision("high")
    sizes = Sizes(**{name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))})
    config, folder = Config(**vars(sizes)), Path(options.folder)
    found: dict[str, Any] = {"gpu": device.gpu.name, "torch": torch.__version__, "sums": means}
    name = options.measure
    if name in options.peers:
        connect_torch(comm, options.folder)
        step: Step = Pipelining(sizes, comm.rank, folder, name)
    else:
        step = Ortflow(options, name, comm, device)
    found |= _measured(step, config, options, least=2 if name in options.peers else 1)
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    comm.barrier()
    sys.stdout.flush()
    # Not left in order: what PyTorch has compiled may still hold NCCL.
    os._exit(0)


def _measured(step: Step, config: Any, options: argparse.Namespace, least: int) -> dict[str, Any]:
    """Losses of the first steps, and the median seconds of a step by the number of micro-batches, from `least` on."""
    from step import batches

    stream = batches(config, options.batch)
    most = max(options.micro)
    losses = [step(_taken(stream, most)) for _ in range(WARM)]
    seconds = {}
    for micro in (each for each in options.micro if each >= least):
        given = [_taken(stream, micro) for _ in range(options.rounds + 1)]
        times = []
        for each in given:
            begun = time.perf_counter()
            step(each)
            times.append(time.perf_counter() - begun)
        seconds[str(micro)] = statistics.median(times[1:])
    free, total = _memory()
    return {"losses": losses, "seconds": seconds, "gib": round((total - free) / 2**30, 2)}


def _taken(stream: Iterator[tuple[Any, Any]], count: int) -> list[tuple[Any, Any]]:
    return [next(stream) for _ in range(count)]


def _memory() -> tuple[int, int]:
    import torch

    return torch.cuda.mem_get_info()


def spec_of(options: argparse.Namespace, name: str) -> Any:
    """The run file of a layout, or of one GPU."""
    from step import CLIP, DECAY, RATE

    from ortflow.workflow.spec.run import RunSpec

    parallel = LAYOUTS.get(name, {})
    return RunSpec.model_validate(
        {
            "name": "benchmark",
            "model": {"path": str(Path(options.folder) / name / "model.onnx"), "loss": {"kind": "cross_entropy"}},
            "data": {"train": {"path": "none"}, "micro_batch": options.batch},
            "train": {
                "steps": 1, "precision": "bf16", "gradient_accumulation": max(2, *options.micro),
                "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": DECAY}, "clip_norm": CLIP,
            },
            "parallel": parallel,
            "resources": {"gpus_per_rank": 1, "ranks_per_node": 2 if parallel else 1},
        }
    )  # fmt: skip


def prepare(options: argparse.Namespace) -> None:
    """Write the graphs of a layout."""
    import onnx
    from step import Config, Sizes, build, graphs_of

    folder = Path(options.folder) / options.prepare
    folder.mkdir(parents=True)
    sizes = {name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))}
    onnx.save(build(Config(**sizes)), folder / "model.onnx")
    graphs_of(spec_of(options, options.prepare), folder, on_gpus=True)


class Ortflow:
    """A step of ortflow's trainer under a layout."""

    def __init__(self, options: argparse.Namespace, name: str, comm: Any, device: Any) -> None:
        from safetensors.numpy import load_file
        from step import RATE

        from ortflow.workflow.graph.types import GraphSet
        from ortflow.workflow.kernels.library import library_for
        from ortflow.workflow.sessions.session import Sessions
        from ortflow.workflow.trainer import Report
        from ortflow.workflow.trainer.builder import trainer_class
        from ortflow.workflow.trainer.divided_opening import open_divided

        spec = spec_of(options, name)
        graphs = GraphSet.load(Path(options.folder) / name / "graphs")
        report = Report(lambda line: print(line, file=sys.stderr, flush=True))
        library = library_for(spec.kernels)
        sessions = Sessions(device, 4, "error", library.path if library else None)
        if spec.divides:
            self._trainer: Any = open_divided(graphs, spec, sessions, comm, report)
        else:
            self._trainer = trainer_class(device, spec)(graphs, spec, sessions, comm, report)
            self._trainer.load_tensors(load_file(graphs.initial))
        self._rate, self._update = RATE, 0

    def __call__(self, given: Batches) -> float:
        """The loss before the update."""
        from ortflow.workflow.trainer import MicroBatch

        self._update += 1
        made = [MicroBatch({"tokens": tokens, "labels": labels}, len(labels)) for tokens, labels in given]
        outcome = self._trainer.step(
            made, learning_rate=self._rate, update=self._update, seeds=[0] * len(made), control_values=()
        )
        return float(outcome.loss)


class Pipelining:
    """A step of torch.distributed.pipelining on two ranks."""

    def __init__(self, sizes: Any, rank: int, folder: Path, how: str) -> None:
        import torch
        from safetensors.numpy import load_file
        from step import CLIP, DECAY, RATE
        from torch import nn
        from torch_gpt import Gpt, load

        model = Gpt(sizes)
        # The weights of any of ortflow's layouts: all are made alike.
        load(model, load_file(next(folder.glob("*/graphs/initial.safetensors"))))
        half = sizes.layers // 2

        class Half(nn.Module):
            """One half of the layers."""

            def __init__(self) -> None:
                super().__init__()
                self.wte = model.wte
                self.h = model.h[half:] if rank else model.h[:half]
                if rank:
                    self.ln_f = model.ln_f
                else:
                    self.wpe = model.wpe

            def forward(self, x: Any) -> Any:
                if not rank:
                    x = self.wte(x) + self.wpe.weight[: x.shape[1]]
                for block in self.h:
                    x = block(x)
                return nn.functional.linear(self.ln_f(x), self.wte.weight) if rank else x

        self._rank, self._clip, self._torch = rank, CLIP, torch
        self._device = torch.device("cuda", rank)
        self._module: Any = Half().to(self._device)
        parameters = list(self._module.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
        self._run = torch.compile(self._module) if how == "torch compiled" else self._module
        self._schedules: dict[int, Any] = {}

    def _schedule(self, micro: int) -> Any:
        if micro not in self._schedules:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B
            from torch.nn import functional as F  # noqa: N812

            def loss(scores: Any, labels: Any) -> Any:
                return F.cross_entropy(scores.flatten(0, 1), labels.flatten())

            stage = PipelineStage(self._run, self._rank, 2, self._device)
            self._schedules[micro] = Schedule1F1B(stage, micro, loss_fn=loss)
        return self._schedules[micro]

    def __call__(self, given: Batches) -> float:
        """The loss before the update."""
        import torch
        import torch.distributed as dist

        tokens, labels = (
            torch.cat([torch.from_numpy(each[place]) for each in given]).to(self._device) for place in (0, 1)
        )
        losses: list[Any] = []
        with torch.autocast("cuda", torch.bfloat16):
            if self._rank:
                self._schedule(len(given)).step(target=labels, losses=losses)
            else:
                self._schedule(len(given)).step(tokens)
        dist.all_reduce(self._module.wte.weight.grad)
        # The schedule has divided the gradients by the number of micro-batches.
        squares = [
            p.grad.float().square().sum()
            for name, p in self._module.named_parameters()
            if not (self._rank and name == "wte.weight")
        ]
        norm = torch.stack(squares).sum()
        dist.all_reduce(norm)
        factor = torch.clamp(self._clip / (norm.sqrt() + 1e-6), max=1.0)
        for parameter in self._module.parameters():
            parameter.grad.mul_(factor)
        self._optimizer.step()
        self._optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if self._rank else torch.zeros((), device=self._device)
        dist.all_reduce(mean)
        return float(mean)


def start(name: str, ranks: int, folder: str, words: Sequence[str], limit: float) -> dict[str, Any]:
    """Measure a candidate in processes of its own; what rank 0 prints last, or the error."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["mpirun", "-n", str(ranks), sys.executable, __file__, *words, "--measure", name, "--folder", folder]
    try:
        done = subprocess.run(
            command, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it took longer than {limit:g} s"}
    if done.returncode:
        return {"error": f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare_all(options: argparse.Namespace, folder: str, words: Sequence[str]) -> None:
    """Write the graphs of all layouts that the folder lacks, at the same time."""
    names = [each for each in (ALONE, *options.layouts) if not (Path(folder) / each).exists()]
    started = [
        subprocess.Popen([sys.executable, __file__, "--prepare", name, *words, "--folder", folder]) for name in names
    ]
    codes = [each.wait() for each in started]
    if any(codes):
        raise SystemExit("the graphs of a layout cannot be made")


def table(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the results. SystemExit if losses differ."""
    alone, tokens = found[ALONE], options.batch * options.context
    if "error" in alone:
        raise SystemExit(f"{ALONE}: {alone['error']}")
    print(f"{alone['gpu']}, torch {alone['torch']}, {tokens} tokens a micro-batch")
    rates: dict[str, float] = {}
    for name, each in found.items():
        if "error" in each:
            print(f"{name:18} failed: {each['error']}")
            continue
        apart = max(abs(a - b) / b for a, b in zip(each["losses"], alone["losses"], strict=True))
        for micro, seconds in each["seconds"].items():
            rates[name] = int(micro) * tokens / seconds
            idle = 1 - alone["seconds"][micro] / 2 / seconds
            print(
                f"{name:18} {micro:>3} micro-batches {rates[name]:10,.0f} tokens a second {1e3 * seconds:8.2f} ms"
                + (f"  idle {idle:6.3f}" if name != ALONE else "")
                + (f" (formula {1 / (int(micro) + 1):.3f})" if "pipeline" in LAYOUTS.get(name, {}) else "")
                + f"  {each['gib']} GiB on the GPU, losses {apart:.1e} from one GPU's"
            )
        if not apart < AGREEMENT:
            raise SystemExit(f"the losses differ, so the times mean nothing: {each['losses']}, {alone['losses']}")
    peers = [rates[name] for name in options.peers if name in rates]
    for name in options.layouts:
        if name in rates and peers:
            print(f"{name} / torch.distributed.pipelining = {rates[name] / max(peers):.2f} (most micro-batches)")
    if any("error" in each for each in found.values()):
        raise SystemExit(1)


def main() -> None:
    """Measure one and two GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("vocabulary", 50304))
    for name, value in (*sizes, ("batch", 8), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--layouts", nargs="*", choices=[*LAYOUTS], default=[*LAYOUTS])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--limit", type=float, default=300, help="seconds for each candidate")
    parser.add_argument("--folder", help="folder for the graphs, which a later call uses again")
    parser.add_argument("--only-prepare", action="store_true", help="write the graphs into --folder and leave")
    for hidden in ("--measure", "--prepare"):
        parser.add_argument(hidden, nargs="?", const=True, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        prepare(options)
    elif options.measure:
        measure(options)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            compare(options, str(Path(options.folder or temporary).absolute()))


def compare(options: argparse.Namespace, folder: str) -> None:
    """Measure all candidates, and print the table."""
    prepare_all(options, folder, sys.argv[1:])
    if options.only_prepare:
        return
    found: dict[str, dict[str, Any]] = {}
    for name in (ALONE, *options.layouts, *options.peers):
        found[name] = start(name, 1 if name == ALONE else 2, folder, sys.argv[1:], options.limit)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    table(found, options)


if __name__ == "__main__":
    main()
