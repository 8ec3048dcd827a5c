"""Low-rank adapters as plain arrays: their names, and the weights that they amount to. Pure.

An adapter of a weight W [rows, columns] is A [rank, columns] and B [rows, rank]: W + alpha / rank * B A, as in
E. J. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, and in the package peft.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ortflow.workflow.spec.model import Lora
from ortflow.workflow.weights.table import Array

A, B = ".lora_A", ".lora_B"
"""What the names of an adapter's tensors add to that of the weight."""


def adapted(tensors: Mapping[str, Array]) -> list[str]:
    """The weights that have an adapter."""
    return [name.removesuffix(A) for name in tensors if name.endswith(A) and name.removesuffix(A) + B in tensors]


def merged(tensors: Mapping[str, Array], section: Lora) -> dict[str, Array]:
    """The tensors with every adapter added to its weight, without the adapters."""
    adapted_weights = set(adapted(tensors))
    scale = np.float32(section.alpha / section.rank)
    apart = {name + end for name in adapted_weights for end in (A, B)}

    def whole(name: str) -> Array:
        weight = tensors[name]
        return weight + scale * (tensors[name + B] @ tensors[name + A]) if name in adapted_weights else weight

    return {name: whole(name) for name in tensors if name not in apart}
