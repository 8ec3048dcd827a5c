"""Which tensor of a file becomes which tensor of the model. Pure: reads no elements."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ortflow.workflow.errors import UserError

WHERE = "model.start_from"
SHOWN = 3
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """The result."""

    sources: Mapping[str, Sequence[str]]
    """Tensor of the model -> the entries of the file that it has its value of; tied entries are all listed."""
    other_entries: Mapping[str, str]
    """Entry of the module's state_dict that no tensor of the run has -> entry of the file."""
    unchanged: Sequence[str]
    """Tensors that keep the values of the model file."""


@dataclass(frozen=True)
class Targets:
    """What the model has."""

    shapes: Mapping[str, Shape]
    """Its tensors, which a run may change or freeze."""
    aliases: Mapping[str, str]
    """PyTorch's name -> the tensor, where there is a table."""
    other_entries: Mapping[str, Shape]
    """Further entries of the module's state_dict, and constants of the graph."""

    def tensor(self, name: str) -> str | None:
        """The tensor with a name, PyTorch's or the file's."""
        return name if name in self.shapes else self.aliases.get(name)


def match(
    sources: Mapping[str, Shape],
    targets: Targets,
    names: Mapping[str, str],
    missing: Sequence[str],
    unexpected: Sequence[str],
) -> Match:
    """Find a source for every tensor.

    Parameters
    ----------
    sources
        Shapes of the file's entries.
    targets
        What the model has.
    names
        Pattern over the file's entries -> their name in the model; an asterisk stands for the same text in both. The
        first pattern that matches applies.
    missing
        Patterns of tensors that keep their values of the model file.
    unexpected
        Patterns of entries of the file that are not read.

    Raises
    ------
    UserError
        If a tensor has no source, an entry no tensor, or the two other shapes; or if a pattern matches nothing.
    """
    unchanged = _kept(targets, missing)
    skipped = {name for name in sources for pattern in unexpected if fnmatch.fnmatchcase(name, pattern)}
    _refuse_idle(unexpected, sources, "unexpected", "entry of the file")
    _refuse_idle(names, sources, "names", "entry of the file")
    tensor_sources: dict[str, list[str]] = {}
    other_entries: dict[str, str] = {}
    unmatched: list[str] = []
    for name in sources:
        if name in skipped:
            continue
        renamed = rename(name, names)
        tensor = targets.tensor(renamed)
        if tensor is not None:
            tensor_sources.setdefault(tensor, []).append(name)
        elif renamed in targets.other_entries:
            other_entries[renamed] = name
        else:
            unmatched.append(name)
    for name in unchanged:
        tensor_sources.pop(name, None)
    absent = [name for name in targets.shapes if name not in tensor_sources and name not in unchanged]
    if absent:
        raise UserError(
            f"the file has no value for {some(absent)} of {len(targets.shapes)} tensors of the model",
            where=WHERE,
            fix=_prefix_hint(sources, targets) or "map its names (names), or list what keeps its values (missing)",
        )
    wrong = [
        f"{name} ({_shape(targets.shapes[tensor])} in the model, {_shape(sources[name])} in the file)"
        for tensor, entries in tensor_sources.items()
        for name in entries
        if sources[name] != targets.shapes[tensor]
    ]
    wrong += [
        f"{name} ({_shape(targets.other_entries[other])} in the model, {_shape(sources[name])} in the file)"
        for other, name in other_entries.items()
        if sources[name] != targets.other_entries[other]
    ]
    if wrong:
        fix = "use the weights of the same architecture, or list what keeps the model's values (missing)"
        raise UserError(f"the shapes differ: {some(wrong)}", where=WHERE, fix=fix)
    if unmatched:
        sentence = f"the model has no tensor for {some(unmatched)} of {len(sources)} entries of the file"
        raise UserError(sentence, where=WHERE, fix="map the names (names), or list what is not read (unexpected)")
    return Match(tensor_sources, other_entries, sorted(unchanged))


def rename(name: str, names: Mapping[str, str]) -> str:
    """The name of an entry in the model."""
    for pattern, replacement in names.items():
        expression = "(.*)".join(map(re.escape, pattern.split("*")))
        if (hit := re.fullmatch(expression, name)) is None:
            continue
        parts = list(hit.groups())
        if replacement.count("*") > len(parts):
            raise UserError(
                f"{replacement!r} has more asterisks than {pattern!r}", where=f"{WHERE}.names", fix="give as many"
            )
        pieces = replacement.split("*")
        return pieces[0] + "".join(part + piece for part, piece in zip(parts, pieces[1:], strict=False))
    return name


def some(names: Sequence[str]) -> str:
    """The first few names, and the number of others."""
    suffix = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + suffix


def _kept(targets: Targets, missing: Sequence[str]) -> set[str]:
    unchanged: set[str] = set()
    for place, pattern in enumerate(missing):
        candidates = (*targets.shapes, *targets.aliases)
        hits = {str(targets.tensor(name)) for name in candidates if fnmatch.fnmatchcase(name, pattern)}
        if not hits:
            raise UserError(
                f"the pattern {pattern!r} matches no tensor of the model",
                where=f"{WHERE}.missing[{place}]",
                fix="`ortflow inspect` lists them",
            )
        unchanged |= hits
    return unchanged


def _refuse_idle(patterns: Iterable[str], names: Collection[str], key: str, kind: str) -> None:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            shown = some(sorted(names))
            raise UserError(f"the pattern {pattern!r} matches no {kind}", where=f"{WHERE}.{key}", fix=f"it has {shown}")


def _prefix_hint(sources: Mapping[str, Shape], targets: Targets) -> str:
    """How to map names that differ by a prefix, as DistributedDataParallel and torch.compile add one."""
    model_names = {*targets.shapes, *targets.aliases}
    for name in sources:
        for place in (i for i, letter in enumerate(name) if letter == "."):
            prefix, rest = name[: place + 1], name[place + 1 :]
            if rest in model_names and name not in model_names:
                return f"if the prefix is all that differs: `names: {{'{prefix}*': '*'}}`"
    first = next(iter(sources), "")
    for name in model_names:
        if first and name.endswith(f".{first}"):
            return f"if the prefix is all that differs: `names: {{'*': '{name.removesuffix(first)}*'}}`"
    return ""


def _shape(shape: Shape) -> str:
    return " x ".join(map(str, shape)) if shape else "a scalar"
