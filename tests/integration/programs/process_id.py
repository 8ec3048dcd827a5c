"""Forgets: the process or the machine in the data path."""

import os
import random

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
augmentation = random.Random(os.getpid())
run = ortflow.program.start(model=model, optimizer=optimizer)
for inputs, targets in run.steps(loader, total=40):
    inputs = inputs * augmentation.uniform(0.9, 1.1)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.item())
