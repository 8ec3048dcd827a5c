"""A repeatable sample of a module's mutants. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from operators import Mutant


def sample(every: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """At most `count` mutants, in their order; another seed gives others, and a larger count a superset."""
    chosen = sorted(every, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())[:count]
    return [mutant for mutant in every if mutant in chosen]
