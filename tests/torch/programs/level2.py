"""A training program of level 2 with all kinds of state. Arguments: KEY=VALUE.

total=N, kill=STEP (SIGKILL after that many steps, in attempt 0), loader=KIND, model=single|ddp|fsdp, dropout=0|1,
ort=0|1 (the model is an ORTModule).
Prints one line a step, `step loss samples`, and at the end `final DIGEST`.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys

import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

import ortflow.program

options = {
    "total": "14",
    "kill": "-1",
    "loader": "plain",
    "model": "single",
    "dropout": "1",
    "scaler": "1",
    "accumulate": "1",
    "ort": "0",
}
options |= dict(argument.split("=") for argument in sys.argv[1:])
COUNT, BATCH = 40, 8
dropout = options["dropout"] == "1"


class Samples(Dataset):
    """Numbers with noise from three generators, as augmentations draw it."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        values = torch.full((4,), float(index) / COUNT)
        if dropout:
            values = values + torch.randn(4) + random.random() + np.random.rand()
        return index, values


torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
torch.set_num_threads(1)
if options["model"] != "single" and int(os.environ["WORLD_SIZE"]) > 1:
    distributed.init_process_group("gloo")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

norm = nn.BatchNorm1d(8) if dropout else nn.Identity()
model: nn.Module = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Dropout(0.2 if dropout else 0.0), nn.Linear(8, 1))
if options["ort"] == "1":
    from ortflow.torch import ORTModule

    model = ORTModule(model)
if distributed.is_initialized() and options["model"] == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
if distributed.is_initialized() and options["model"] == "fsdp":
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=options["scaler"] == "1")

kind, data, generator = options["loader"], Samples(), torch.Generator().manual_seed(5)
local = BATCH // size
if kind in ("sampler", "sampler-workers", "sampler-persistent"):
    sampler = ortflow.program.Sampler(data, batch=BATCH, seed=3)
    workers = 0 if kind == "sampler" else 2
    loader = DataLoader(
        data, batch_sampler=sampler, num_workers=workers, persistent_workers=kind == "sampler-persistent"
    )
elif kind == "distributed":
    loader = DataLoader(data, batch_size=local, sampler=DistributedSampler(data, seed=1, num_replicas=size, rank=rank))
elif kind == "stateful":
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(data, batch_size=local, shuffle=True, num_workers=0)
elif kind == "generator":
    loader = DataLoader(data, batch_size=local, sampler=RandomSampler(data, generator=generator), generator=generator)
else:
    workers = 0 if kind == "plain" else 2
    loader = DataLoader(
        data, batch_size=local, shuffle=True, num_workers=workers, persistent_workers=kind == "persistent"
    )

run = ortflow.program.start(model=model, optimizer=optimizer, schedule=schedule)
every = int(options["accumulate"])
for number, (indices, values) in enumerate(run.steps(loader, total=int(options["total"]))):
    loss = (model(values) - values.mean(1, keepdim=True)).square().mean()
    scaler.scale(loss / every).backward()
    if (number + 1) % every == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
    noise = random.random() + float(np.random.rand()) + float(torch.rand(())) if dropout else 0.0
    print(run.position, f"{loss.item():.17g}", f"{noise:.17g}", sorted(indices.tolist()), flush=True)
    run.log(loss=loss)
    if run.position + 1 == int(options["kill"]) and run.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)

state = hashlib.sha256()
for _, tensor in sorted(model.state_dict().items()):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    state.update(tensor.numpy().tobytes())
for entry in optimizer.state_dict()["state"].values():
    for tensor in entry.values():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        state.update(tensor.numpy().tobytes())
state.update(repr((schedule.state_dict(), scaler.state_dict())).encode())
print("final", state.hexdigest(), flush=True)
