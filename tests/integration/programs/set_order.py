"""Forgets: the order of a set."""

import torch
from torch import nn

import ortflow.program

torch.manual_seed(3)
torch.set_num_threads(1)

words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "it"]
numbers = {word: number for number, word in enumerate(set(words))}
tokens = torch.tensor([numbers[word] for word in words])
model = nn.Sequential(nn.Embedding(len(numbers), 8), nn.Linear(8, len(numbers)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(tokens[place : place + 4], tokens[place + 1 : place + 5]) for place in range(8)]
run = ortflow.program.start(model=model, optimizer=optimizer)
for inputs, targets in run.steps(batches, total=40):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.item())
