"""Forgets: a variable that the loop changes."""

import torch
from torch import nn

import ortflow.program

torch.manual_seed(3)
torch.set_num_threads(1)
data = torch.randn(48, 6)
labels = (data.sum(1) > 0).long()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data, labels), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hardest: list[float] = []
run = ortflow.program.start(model=model, optimizer=optimizer)
for inputs, targets in run.steps(loader, total=40):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    hardest.append(loss.item())
    hardest = sorted(hardest)[-5:]
    optimizer.zero_grad()
    (loss * (1.0 + sum(hardest) / 10)).backward()
    optimizer.step()
    run.log(loss=loss.item())
