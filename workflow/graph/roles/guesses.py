"""Reports the tensors that are left untrained by heuristics alone, and rejects a model in which they are many.

Called by `source` and `inspect`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.roles.decide import Role, Roles

LARGEST_SHARE = 0.01
"""Largest share of a model's float values that may stay untrained on a guess."""
_NAMED = 3


def judged_constants(roles: Roles) -> list[str]:
    """One sentence that names the constants that might be parameters, and their share; None without any."""
    judged = [role for role in roles if role.confidence != "certain"]
    if not judged:
        return []
    return [
        f"not trained, because {'they are' if len(judged) > 1 else 'it is'} taken for"
        f" {'constants' if len(judged) > 1 else 'a constant'}: {_described(judged, roles)};"
        " model.parameters.train and .constant override this"
    ]


def refuse_guesses(roles: Roles, location: str) -> None:
    """Raise UserError if guesses alone leave more than LARGEST_SHARE of the float values untrained."""
    guesses = [role for role in roles if role.confidence == "guess"]
    if _share(guesses, roles) > LARGEST_SHARE:
        raise UserError(
            f"the file does not say whether these are parameters: {_described(guesses, roles)}",
            where=location,
            fix="name each under model.parameters.train, .freeze or .constant",
        )


def _described(guesses: Sequence[Role], roles: Roles) -> str:
    largest = sorted(guesses, key=lambda role: -role.count)
    names = ", ".join(f"{role.name!r} ({role.reason})" for role in largest[:_NAMED])
    rest = f" and {len(guesses) - _NAMED} more" if len(guesses) > _NAMED else ""
    values = sum(role.count for role in guesses)
    return f"{names}{rest}, {values:,} values, {_share(guesses, roles):.2%} of the model's"


def _share(guesses: Sequence[Role], roles: Roles) -> float:
    """Share of all float values in the file."""
    everything = sum(role.count for role in roles if role.dtype == "FLOAT")
    return sum(role.count for role in guesses) / max(everything, 1)
