"""Forgets: the position in the data. Commits checkpoints by itself."""

import torch
from torch import nn

import ortflow.program

torch.manual_seed(3)
torch.set_num_threads(1)
data = torch.randn(48, 6)
labels = (data.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ortflow.program.context()
done = 0
if newest := run.latest():
    state = torch.load(newest / "state.pt")
    model.load_state_dict(state["model"])
    done = state["step"]
batches = [(data[first : first + 4], labels[first : first + 4]) for first in range(0, 48, 4)]
stream = iter(batches * 4)
for step in range(done + 1, 41):
    inputs, targets = next(stream)
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
