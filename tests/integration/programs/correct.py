"""Forgets: nothing."""

import random
import time

import torch
from torch import nn

import ortflow.program

random.seed(3)
torch.manual_seed(3)
torch.set_num_threads(1)
data = torch.randn(48, 6)
labels = (data.sum(1) > 0).long()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data, labels), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
losses: list[float] = []
started = time.time()
run = ortflow.program.start(model=model, optimizer=optimizer, schedule=schedule)
for inputs, targets in run.steps(loader, total=40):
    inputs = inputs * random.uniform(0.9, 1.1)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    run.log(loss=loss.item(), seconds=time.time() - started)
