"""DeepSpeed on two ranks: ZeRO's stages 1, 2 and 3 side by side, or a pipeline of two stages.

Arguments: zero (level 1), accumulating (level 2, an update every two steps) or pipeline (level 1); accidents: rank 1 is
killed in the first attempt, and asked to stop in the second. Level 1 is the program
of docs/programs.md, in recipe.py. Prints what tests/torch/test_program_frameworks.py reads.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import distributed, nn

import ortflow.program

TOTAL, BATCH, KILLED, STOPPED = 12, 8, 5, 7
PARTS = 2
"""Micro-batches of an update of the pipeline, or steps of one that accumulates."""
accumulates = "accumulating" in sys.argv
# Otherwise DeepSpeed 0.19.8 looks for compilers, and compiles its sums over shared memory, for minutes.
deepspeed.ops.__compatible_ops__ = {}
torch.set_num_threads(1)
deepspeed.init_distributed("gloo", verbose=False)
rank = distributed.get_rank()


def layers() -> list[nn.Module]:
    """The same network each time."""
    torch.manual_seed(1)
    return [nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 1)]


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    inputs = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.square().sum(1, keepdim=True)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a micro-batch."""
    return (outputs - labels).square().mean()


def say(*words: object) -> None:
    """Print a line in one piece: the ranks of a launcher share their output."""
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


def make(model: nn.Module, stage: int) -> deepspeed.DeepSpeedEngine:
    """An engine without the clipping that DeepSpeed 0.19.8 has by default."""
    pipeline = isinstance(model, PipelineModule)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "gradient_accumulation_steps": PARTS if pipeline or accumulates else 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


class Together:
    """Several engines with the calls of one, for the program of the page."""

    def load_checkpoint(self, folder: str, tag: str) -> tuple[Any, Any]:
        """Load all."""
        for name, each in engines.items():
            path, state = each.load_checkpoint(folder, tag=f"{tag}-{name}")
            assert path is not None
        return path, state

    def save_checkpoint(self, folder: str, tag: str, **more: Any) -> None:
        """Save all."""
        for name, each in engines.items():
            each.save_checkpoint(folder, tag=f"{tag}-{name}", **more)


def train(step: int) -> None:
    """A step of every engine."""
    inputs, labels = samples(step)
    for name, each in engines.items():
        if name == "pipeline":
            loss = each.train_batch(iter(zip(inputs.chunk(PARTS), labels.chunk(PARTS), strict=True)))
        else:
            loss = loss_of(each(inputs[rank::2]), labels[rank::2])
            each.backward(loss)
            each.step()
            loss = loss.detach()
            distributed.all_reduce(loss)
            loss = loss / 2
        say("step", step, name, loss.item())
    run = ortflow.program.context()
    if "accidents" in sys.argv and rank == 1 and (run.attempt, step) == (0, KILLED):
        os.kill(os.getpid(), signal.SIGKILL)
    if "accidents" in sys.argv and rank == 1 and (run.attempt, step) == (1, STOPPED):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)  # the ranks agree within a fraction of it


if "pipeline" in sys.argv:
    model = PipelineModule(layers=layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engines = {"pipeline": make(model, 0)}
else:
    engines = {f"stage-{stage}": make(nn.Sequential(*layers()), stage) for stage in (1, 2, 3)}
total, engine = TOTAL, Together()
try:
    if accumulates:
        for step in ortflow.program.start(**engines).steps(range(TOTAL), total=TOTAL):
            train(step)
    else:
        exec(Path("recipe.py").read_text())
except SystemExit:
    say("stopped", ortflow.program.context().position)
    raise

for name, each in engines.items():
    digest = sha256()
    with deepspeed.zero.GatheredParameters(list(each.module.parameters())):
        for _, parameter in sorted(each.module.named_parameters()):
            digest.update(parameter.detach().numpy().tobytes())
    for entry in each.basic_optimizer.state.values():
        for value in entry.values():
            digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    say("final", name, digest.hexdigest())
if rank == 0:
    plain = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(TOTAL):
        inputs, labels = samples(step)
        loss = loss_of(plain(inputs), labels)
        say("plain", step, loss.item())
        (loss / (PARTS if accumulates else 1)).backward()
        if not accumulates or step % PARTS == PARTS - 1:
            optimizer.step()
            optimizer.zero_grad()
