"""Forgets: the epoch of the sampler. Commits checkpoints by itself."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ortflow.program

torch.manual_seed(3)
torch.set_num_threads(1)
data = torch.randn(48, 6)
labels = (data.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(data, labels)
sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=3)
loader = DataLoader(dataset, batch_size=12, sampler=sampler)
run = ortflow.program.context()
done = 0
if newest := run.latest():
    state = torch.load(newest / "state.pt")
    model.load_state_dict(state["model"])
    done = state["step"]
skipped, step, epoch, stop = done % len(loader), done, 0, False
while step < 40 and not stop:
    sampler.set_epoch(epoch)
    epoch += 1
    for place, (inputs, targets) in enumerate(loader):
        if place < skipped:
            continue
        skipped = 0
        step += 1
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(step=step, loss=loss.item())
        run.step(step)
        stop = run.should_stop
        if stop or step % 3 == 0:
            with run.commit(step) as folder:
                torch.save({"model": model.state_dict(), "step": step}, folder / "state.pt")
        if stop:
            break
