"""Horovod on two ranks: broadcast of the first state, gradients averaged by DistributedOptimizer.

Arguments: level-1 (its own files) or level-2 (the program of docs/programs.md, in recipe.py); accidents: rank 1 is
killed in the first attempt, and asked to stop in the second. Prints `world`, and what
tests/torch/test_program_frameworks.py reads.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

import ortflow.program

TOTAL, BATCH, EVERY, KILLED, STOPPED = 12, 8, 3, 5, 7
torch.set_num_threads(1)


def network() -> nn.Module:
    """The same network each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    inputs = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.square().sum(1, keepdim=True)


def say(*words: object) -> None:
    """Print a line in one piece: the ranks of a launcher share their output."""
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


def own_steps() -> Iterator[int]:
    """Level 1: the steps that are left. The ranks have the same state, so rank 0 saves, and all load."""
    first = 0
    if run.latest() is not None:
        state = torch.load(run.latest() / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    run.total = TOTAL
    for step in range(first, TOTAL):
        stop = run.should_stop
        if stop or (step > first and step % EVERY == 0):
            with run.commit(step) as folder:
                if run.rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, folder / "state.pt")
        if stop:
            raise SystemExit
        yield step
        run.step(step + 1)


def train(step: int) -> None:
    """A step."""
    inputs, labels = samples(step)
    loss = (model(inputs[hvd.rank() :: 2]) - labels[hvd.rank() :: 2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say("step", step, "horovod", hvd.allreduce(loss.detach()).item())
    run = ortflow.program.context()
    if "accidents" in sys.argv and run.rank == 1 and (run.attempt, step) == (0, KILLED):
        os.kill(os.getpid(), signal.SIGKILL)
    if "accidents" in sys.argv and run.rank == 1 and (run.attempt, step) == (1, STOPPED):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)  # the ranks agree within a fraction of it


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is another one on rank 1, before the broadcast."""
    model = network()
    for parameter in model.parameters():
        parameter.data.add_(float(hvd.rank()))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


total, loader = TOTAL, range(TOTAL)
names = ("RANK", "SIZE", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")
say("world", *(os.environ[f"HOROVOD_{name}"] for name in names))
try:
    if "level-1" in sys.argv:
        hvd.init()
        model, optimizer = build()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        run = ortflow.program.context()
        for step in own_steps():
            train(step)
    else:
        exec(Path("recipe.py").read_text())
except SystemExit:
    say("stopped", run.position)
    raise
assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (run.rank, run.world_size, run.local_rank)

digest = sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
for entry in optimizer.state_dict()["state"].values():
    for value in entry.values():
        digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
say("final", "horovod", digest.hexdigest())
if run.rank == 0:
    plain = network()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(TOTAL):
        inputs, labels = samples(step)
        loss = (plain(inputs) - labels).square().mean()
        say("plain", step, loss.item())
        plain_optimizer.zero_grad()
        loss.backward()
        plain_optimizer.step()
