"""Which weights the run file names: those that stay whole, and those that are divided by columns or by rows.

Called by `divide`. The columns of a weight are the outputs of its product, and its rows the inputs, however the file
stores them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.patterns import matches

_LISTS = ("whole", "columns", "rows")
_WAYS = {"columns": "divided by columns", "rows": "divided by rows", "whole": "whole"}


@dataclass(frozen=True)
class Named:
    """Weights by the keys of `parallel`; each maps a weight to the key path that names it."""

    whole: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)

    def way(self, name: str) -> str | None:
        """How a weight is to be divided, and the key path that says so; None if the run file does not name it."""
        return next((f"{_WAYS[key]} by {names[name]}" for key, names in self._lists() if name in names), None)

    def _lists(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        yield from ((key, getattr(self, key)) for key in _LISTS)


def named_in(patterns: Mapping[str, Sequence[str]], matrices: Collection[str]) -> Named:
    """Find the weights that the patterns of each list match.

    Parameters
    ----------
    patterns
        Names or glob patterns under `whole`, `columns` and `rows`.
    matrices
        The matrices that products and look-ups read.

    Raises
    ------
    UserError
        If a pattern matches none, with the nearest names, or if two lists name the same weight.
    """
    matches_by_key: dict[str, dict[str, str]] = {key: {} for key in _LISTS}
    for key in _LISTS:
        for number, pattern in enumerate(patterns.get(key, ())):
            key_path = f"parallel.{key}[{number}]"
            for name in matches(pattern, matrices, key_path, "matrix that a product or a look-up of the model reads"):
                for other in _LISTS:
                    if other != key and name in matches_by_key[other]:
                        raise UserError(
                            f"names {name!r} as {_WAYS[key]}, and {matches_by_key[other][name]} as {_WAYS[other]}",
                            where=key_path,
                            fix="name it in one of the lists",
                        )
                matches_by_key[key].setdefault(name, key_path)
    return Named(**matches_by_key)


def check_named(assigned: Named, columns: Collection[str], rows: Collection[str], reasons: Mapping[str, str]) -> None:
    """Raise UserError for a weight that is not divided as the run file says.

    Parameters
    ----------
    columns, rows
        Weights that are divided by columns, and by rows.
    reasons
        Why the layers of other weights cannot be divided, by weight.
    """
    for way, assignments, divided in (("columns", assigned.columns, columns), ("rows", assigned.rows, rows)):
        for name, key_path in assignments.items():
            if name not in divided:
                default = (
                    "no other product sums over its columns" if way == "columns" else "nothing before it is divided"
                )
                raise UserError(
                    f"{name!r} cannot be {_WAYS[way]}: {reasons.get(name, default)}",
                    where=key_path,
                    fix="remove it from the list, or name other weights of its layer",
                )
