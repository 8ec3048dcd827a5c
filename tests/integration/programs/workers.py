"""Forgets: random state in the workers of the loader."""

import random

import torch
from torch import nn

import ortflow.program

torch.manual_seed(3)
torch.set_num_threads(1)


class Noisy(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.random = random.Random(9)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = torch.arange(6.0) - index % 7
        return sample * self.random.uniform(0.5, 1.5), index % 2


model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = Noisy()
sampler = ortflow.program.Sampler(dataset, batch=4, seed=3)
loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=1)
run = ortflow.program.start(model=model, optimizer=optimizer)
for inputs, targets in run.steps(loader, total=40):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.item())
