"""Forgets: a random generator of the program. Needs no package."""

import random
from typing import Any

import ortflow.program


class Model:
    def __init__(self) -> None:
        self.weight = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


class Augmentation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, value: float) -> float:
        return value + self.random.uniform(-0.1, 0.1)


model, augmentation = Model(), Augmentation(7)
samples = [[float(number % 5), float(number % 3)] for number in range(20)]
run = ortflow.program.start(model=model)
for features in run.steps(samples, total=40):
    error = model.weight - augmentation(sum(features))
    model.weight -= 0.1 * error
    run.log(loss=error * error)
