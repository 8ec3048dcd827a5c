"""Forgets: buffers of a module, such as the statistics of BatchNorm. Commits checkpoints by itself."""

import torch
from torch import nn

import ortflow.program

torch.manual_seed(3)
torch.set_num_threads(1)
data = torch.randn(48, 6)
labels = (data.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ortflow.program.context()
done = 0
if newest := run.latest():
    state = torch.load(newest / "state.pt")
    model.load_state_dict(state["parameters"], strict=False)
    done = state["step"]
for step in range(done + 1, 41):
    part = slice(4 * (step % 12), 4 * (step % 12) + 4)
    inputs, targets = data[part], labels[part]
    model.train()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        run.log(step=step, eval_loss=nn.functional.cross_entropy(model(data), labels).item())
    run.log(step=step, loss=loss.item())
    run.step(step)
    stop = run.should_stop
    if stop or step % 3 == 0:
        with run.commit(step) as folder:
            torch.save({"parameters": dict(model.named_parameters()), "step": step}, folder / "state.pt")
    if stop:
        break
