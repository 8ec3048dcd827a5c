"""Guesses how a set in any format fills a model's inputs. Called by `ortflow init`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ortflow.workflow.data.augmented import augmented
from ortflow.workflow.data.documents import MASK
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.sources import open_samples, preparation_of, section_of, text_files
from ortflow.workflow.data.sources.audio import Audio
from ortflow.workflow.data.sources.images import Images
from ortflow.workflow.data.tables.files import is_table
from ortflow.workflow.data.tables.open import open_table
from ortflow.workflow.data.tables.samples import TableSamples
from ortflow.workflow.data.tables.summary import NUMERIC, Summary
from ortflow.workflow.data.tables.text_column import COLUMN
from ortflow.workflow.data.vocabulary import has_mask, transforms_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.planning.first_run import LABELS, Array, Guess, guess
from ortflow.workflow.spec.data import DataSet

MOST_ONE_HOT = 100
"""Classes of a column of text up to which it is guessed to be an input."""


def guess_for(path: Path, inputs: Sequence[Array], outputs: Sequence[Array]) -> tuple[Samples, Guess]:
    """The samples of a path, and the run of a model on them.

    Raises UserError, naming the file, if it cannot be read or if no run is found.
    """
    keys: dict[str, Any] = {}
    if sounds := preparation_of(path):
        keys = {"audio": sounds["audio"].model_dump()}
    elif pictures := [array for array in inputs if len(array.shape) == 3 and not array.is_integer]:
        keys = {"images": _images(pictures[0].shape)}
    elif text := _text(path, inputs):
        keys = {"text": text}
    try:
        samples = open_samples(DataSet.model_validate({"path": str(path), **keys}))
    except UserError as error:
        if "images" not in keys or error.where != str(path):
            raise
        samples, keys = open_samples(section_of(path)), {}
    if isinstance(samples, TableSamples) and (table_guess := _of_table(path, samples, inputs, outputs)) is not None:
        return samples, table_guess
    if "text" in keys:
        return samples, _of_text(samples, keys, inputs, outputs)
    preparation = keys if isinstance(samples, (Images, Audio)) else {}
    return samples, replace(guess(inputs, outputs, _arrays(samples)), preparation=preparation)


def _of_text(samples: Samples, keys: dict[str, Any], inputs: Sequence[Array], outputs: Sequence[Array]) -> Guess:
    """The run of a model on tokens, which are masked if it has an output for each and the tokenizer has a mask."""
    text = keys["text"]
    each_token = any(len(output.shape) == 2 and not output.is_integer for output in outputs)
    if each_token and "length" not in text and has_mask(text["tokenizer"]):
        keys = {**keys, "transforms": [{"mask_tokens": {}}]}
        section = DataSet.model_validate({"path": str(samples.path), **keys})
        samples = augmented(samples, transforms_of(section, "data.train"), 0, "data.train")
    names = {array.name for array in inputs}
    # A mask is no label, and neither is one number of a document where each token has an output.
    columns = [column for column in _arrays(samples) if column.name in names or column.name != MASK]
    columns = [column for column in columns if column.shape or not each_token]
    run_guess = guess(inputs, outputs, columns)
    unused = [*run_guess.unused, *samples.columns.keys() - {MASK, *(column.name for column in columns)}]
    return replace(run_guess, preparation=keys, unused=[name for name in unused if name != text.get("column", COLUMN)])


def _text(path: Path, inputs: Sequence[Array]) -> dict[str, Any]:
    """How text becomes the tokens of a model, if a tokenizer.json lies beside it; empty if it is none.

    Windows of packed documents for a model with positions, else one document a sample.
    """
    tokenizer = path.absolute().parent / "tokenizer.json"
    if not tokenizer.is_file() or not any(array.is_integer and len(array.shape) == 1 for array in inputs):
        return {}
    section: dict[str, Any] = {"tokenizer": str(tokenizer)}
    if is_table(path):
        columns = open_table(section_of(path), {}).summaries
        text = [name for name, summary in columns.items() if summary.kind == "text"]
        if not text:
            return {}
        column = COLUMN if COLUMN in text else text[0]
        section |= {} if column == COLUMN else {"column": column}
    elif not text_files.matches(path):
        return {}
    if "position_ids" in {array.name for array in inputs}:
        fixed = next((array.shape[0] for array in inputs if len(array.shape) == 1 and array.shape[0]), None)
        section |= {"length": fixed or 128, "pack": True}
    return section


def _arrays(samples: Samples) -> list[Array]:
    return [
        Array(name, c.dtype.name, (None,) if c.variable else tuple(c.shape), c.minimum, c.maximum)
        for name, c in samples.columns.items()
    ]


def _images(shape: Sequence[int | None]) -> dict[str, Any]:
    """How images become samples of a shape."""
    is_last = shape[0] not in (1, 3) and shape[2] in (1, 3)
    height, width = (shape[0], shape[1]) if is_last else (shape[1], shape[2])
    section: dict[str, Any] = {"resize": [height or 224, width or 224]}
    if is_last:
        section["layout"] = "hwc"
    if (shape[2] if is_last else shape[0]) == 1:
        section["channels"] = 1
    return section


def _of_table(path: Path, samples: TableSamples, inputs: Sequence[Array], outputs: Sequence[Array]) -> Guess | None:
    """The run of a model with one vector on a table whose columns make it; None if they do not."""
    summaries, (vector, *other_inputs) = samples.table.summaries, inputs
    if other_inputs or vector.name in samples.columns or vector.is_integer or len(vector.shape) != 1:
        return None
    usual = [name for name in summaries if name.lower() in LABELS]
    for label in usual or reversed(list(summaries)):
        names = [name for name in summaries if name != label and _is_input(summaries[name])]
        if sum(map(_width, (summaries[name] for name in names))) != vector.shape[0]:
            continue
        rules = _rules([(name, summaries[name]) for name in names])
        section = DataSet.model_validate({"path": str(path), "columns": {vector.name: names}, "fields": rules})
        prepared = open_samples(section)
        run_guess = guess(
            inputs, outputs, [column for column in _arrays(prepared) if column.name in (vector.name, label)]
        )
        unused = [name for name in summaries if name != label and name not in names]
        columns = {**run_guess.columns, vector.name: names}
        return replace(run_guess, columns=columns, unused=unused, preparation={"fields": rules} if rules else {})
    return None


def _is_input(summary: Summary) -> bool:
    if summary.kind in NUMERIC:
        return True
    return summary.kind == "text" and summary.classes is not None and len(summary.classes) <= MOST_ONE_HOT


def _width(summary: Summary) -> int:
    return 1 if summary.kind in NUMERIC else len(summary.classes or ())


def _rules(columns: Sequence[tuple[str, Summary]]) -> list[dict[str, Any]]:
    """Numbers are standardised, their missing values become the mean, and text becomes a 1 at its class."""
    numbers = [(name, summary) for name, summary in columns if summary.kind in ("integer", "number")]
    complete = [name for name, summary in numbers if not summary.missing]
    missing = [name for name, summary in numbers if summary.missing]
    # Without a mean and a deviation, which say nothing of 0 and 1.
    truths = [name for name, summary in columns if summary.kind == "boolean" and summary.missing]
    text = [name for name, summary in columns if summary.kind == "text"]
    rules: list[dict[str, Any]] = []
    if complete:
        rules.append({"columns": complete, "standardize": True})
    if missing:
        rules.append({"columns": missing, "standardize": True, "missing": "mean"})
    if truths:
        rules.append({"columns": truths, "missing": "mean"})
    if text:
        rules.append({"columns": text, "one_hot": True})
    return rules
