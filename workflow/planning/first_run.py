"""Guesses a run from a model and a set: which column fills which input, which is the label, and the loss.

Called by `ortflow init`. Pure: what is known of the model and of the set is given as plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortflow.workflow.errors import UserError

LABELS = ("labels", "label", "targets", "target", "y", "class", "classes", "category")
"""Usual names of a label."""


@dataclass(frozen=True)
class Array:
    """An input or output of the model, or a column: `shape` of a sample, None for an axis that varies."""

    name: str
    dtype: str
    """numpy's name."""
    shape: tuple[int | None, ...]
    minimum: float | None = None
    maximum: float | None = None

    @property
    def is_integer(self) -> bool:
        """Whether its elements are integers or truth values."""
        return self.dtype.startswith(("int", "uint", "bool"))


@dataclass(frozen=True)
class Guess:
    """A run."""

    columns: Mapping[str, str | Sequence[str]]
    """Input -> column, where the names differ."""
    loss: Mapping[str, Any]
    metrics: Sequence[str]
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Key of the run file -> why it was guessed."""
    labels: Sequence[str] = ()
    """Inputs of the graph that are labels."""
    unused: Sequence[str] = ()
    """Columns that fill no input."""
    preparation: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the set: `fields` of a table, `images`."""


def guess(inputs: Sequence[Array], outputs: Sequence[Array], columns: Sequence[Array]) -> Guess:
    """The run of a model on a set.

    Raises UserError if an input has no column of its type and shape, or if no column can be the label.
    """
    by_name, mapped = {column.name: column for column in columns}, dict[str, str]()
    input_columns = [column for column in columns if column.name.lower() not in LABELS]
    for model_input in inputs:
        if model_input.name in by_name:
            continue
        reserved_names = {*mapped.values(), *(other.name for other in inputs)}
        fits = [column for column in input_columns if column.name not in reserved_names and _fits(model_input, column)]
        if not fits:
            column_list = ", ".join(f"{c.name} ({_shown(c)})" for c in columns)
            raise UserError(
                f"the set has no column for input {model_input.name!r} ({_shown(model_input)})",
                where="--data",
                fix=f"it has {column_list}",
            )
        mapped[model_input.name] = fits[0].name
    used = {mapped.get(model_input.name, model_input.name) for model_input in inputs}
    scalar = [output for output in outputs if output.name == "loss"]
    if scalar:
        labels = [model_input.name for model_input in inputs if model_input.name.lower() in LABELS]
        unused = [name for name in by_name if name not in used]
        reasons = {"loss": "the model has an output with that name"}
        return Guess(mapped, {"kind": "output", "output": "loss"}, (), reasons, labels, unused)
    unused_columns = [column for column in columns if column.name not in used]
    label_candidates = sorted(unused_columns, key=lambda column: column.name.lower() not in LABELS)
    for column in label_candidates:
        loss_guess = _loss(column, outputs)
        if loss_guess is not None:
            loss, metrics, reason = loss_guess
            if column.name != "labels":
                loss = {**loss, "label": column.name}
            unused = [c.name for c in unused_columns if c is not column]
            return Guess(mapped, loss, metrics, {"loss": reason}, (), unused)
    tokens = [model_input for model_input in inputs if model_input.is_integer and len(model_input.shape) == 1]
    logits = [output for output in outputs if len(output.shape) == 2 and not output.is_integer]
    if not unused_columns and len(tokens) == 1 and logits:
        name = mapped.get(tokens[0].name, tokens[0].name)
        mapped |= {tokens[0].name: f"{name}[:-1]", "labels": f"{name}[1:]"}
        reasons = {"loss": "the label of each token is the next one", "columns": "slices of one column"}
        return Guess(mapped, {"kind": "cross_entropy", "output": logits[0].name}, ("perplexity",), reasons)
    shown = ", ".join(f"{output.name} ({_shown(output)})" for output in outputs)
    raise UserError(
        f"no column of the set can be the label of the outputs {shown}",
        where="--data",
        fix="add one, such as class numbers for logits, or write the run file by hand (docs/run-file.md)",
    )


def _loss(column: Array, outputs: Sequence[Array]) -> tuple[dict[str, Any], tuple[str, ...], str] | None:
    """The loss of an output and a label; None if none fits."""
    for output in sorted(outputs, key=lambda candidate: "logit" not in candidate.name.lower()):
        output_key = {"output": output.name} if len(outputs) > 1 else {}
        if _same(output.shape, column.shape) and not output.is_integer:
            if column.minimum == 0 and column.maximum == 1 and column.is_integer:
                return (
                    {"kind": "bce_with_logits", **output_key},
                    (),
                    f"{column.name} is 0 or 1, as many as {output.name}",
                )
            if not column.is_integer:
                return {"kind": "mse", **output_key}, (), f"{column.name} has numbers of {output.name}'s shape"
        if not column.is_integer or len(output.shape) != len(column.shape) + 1 or output.is_integer:
            continue
        for axis, place, rest in ((-1, -1, output.shape[:-1]), (1, 0, output.shape[1:])):
            classes = output.shape[place]
            if _same(rest, column.shape) and not (classes and column.maximum and column.maximum >= classes):
                loss = {"kind": "cross_entropy", **output_key, **({"class_axis": 1} if axis == 1 else {})}
                return loss, ("accuracy",), f"{column.name} has numbers of the classes in {output.name}"
    return None


def _fits(model_input: Array, column: Array) -> bool:
    return model_input.is_integer == column.is_integer and _same(model_input.shape, column.shape)


def _same(a: Sequence[int | None], b: Sequence[int | None]) -> bool:
    return len(a) == len(b) and all(x is None or y is None or x == y for x, y in zip(a, b, strict=True))


def _shown(array: Array) -> str:
    sizes = " x ".join("any" if size is None else str(size) for size in array.shape)
    return f"{array.dtype} {sizes or 'scalar'}"


def micro_batch(samples: int, fixed: int | None, rest: int, per_sample: float, memory: int) -> int:
    """Samples of a micro-batch: a power of two, at most 32, that fits in half of the memory.

    Parameters
    ----------
    samples
        Samples of the set.
    fixed
        Size of the batch axis, if the model fixes it.
    rest
        Bytes that do not depend on it.
    per_sample
        Bytes that do.
    memory
        Bytes of this machine that are free.
    """
    if fixed is not None:
        return fixed
    size = 32
    while size > 1 and (size > samples or rest + size * per_sample > memory / 2):
        size //= 2
    return size
