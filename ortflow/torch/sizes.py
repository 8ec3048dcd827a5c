"""The sizes of inputs that a traced graph is right for. Called by `tracing`.

PyTorch records what a trace has assumed of sizes: fixed ones, bounds, and conditions such as "even". A graph is used
for other sizes only if all of it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sizes:
    """Conditions on the shapes of a call's tensors."""

    shapes: tuple[tuple[Any, ...], ...]
    """Each size is a number, or a sympy expression of symbols."""
    ranges: dict[Any, tuple[Any, Any]]
    """Symbol -> smallest and largest size."""
    conditions: tuple[Any, ...]
    """Sympy expressions that must be true."""
    _known: dict[Shapes, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Any) -> Sizes:
        """Those of a torch.export.ExportedProgram."""
        inputs = set(program.graph_signature.user_inputs)
        values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in inputs]
        environments, shapes = {}, []
        for value in values:
            sizes = []
            for size in value.shape:
                if isinstance(size, int):
                    sizes.append(size)
                else:
                    environments[id(size.node.shape_env)] = size.node.shape_env
                    sizes.append(size.node.expr)
            shapes.append(tuple(sizes))
        ranges = {symbol: (bounds.lower, bounds.upper) for symbol, bounds in program.range_constraints.items()}
        conditions = []
        for environment in environments.values():
            conditions += [guard.expr for guard in environment.guards]
            conditions += [
                condition.expr for asserts in environment.deferred_runtime_asserts.values() for condition in asserts
            ]
        return cls(tuple(shapes), ranges, tuple(dict.fromkeys(conditions)))

    def fit(self, shapes: Shapes) -> bool:
        """Whether the graph is right for these shapes."""
        fits = self._known.get(shapes)
        if fits is None:
            fits = self._known[shapes] = self._hold(shapes)
        return fits

    def _hold(self, shapes: Sequence[Sequence[int]]) -> bool:
        symbols: dict[Any, int] = {}
        derived = []
        for expected, actual in zip(self.shapes, shapes, strict=True):
            if len(expected) != len(actual):
                return False
            for size, number in zip(expected, actual, strict=True):
                if isinstance(size, int):
                    if size != number:
                        return False
                elif size.is_Symbol:
                    if symbols.setdefault(size, number) != number:
                        return False
                else:
                    derived.append((size, number))
        if any(expression.subs(symbols) != number for expression, number in derived):
            return False
        for symbol, number in symbols.items():
            low, high = self.ranges.get(symbol, (number, number))
            if not low <= number <= high:
                return False
        for condition in self.conditions:
            value = condition.subs(symbols)
            # What depends on values instead of sizes is checked by the graph.
            if not getattr(value, "free_symbols", None) and not bool(value):
                return False
        return True
