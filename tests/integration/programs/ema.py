"""Forgets: a copy of the parameters, such as an EMA."""

import copy

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
average = copy.deepcopy(model)
run = ortflow.program.start(model=model, optimizer=optimizer)
for inputs, targets in run.steps(loader, total=40):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.1)
    run.log(loss=loss.item())
