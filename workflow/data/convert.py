"""Converts arrays and text to sets of samples, optionally split into training and evaluation.

Called by `ortflow data convert` and by programs that prepare an example. Reading is in `arrays` and `text`, writing in
`write`. The split depends only on the sources, so a repeated conversion gives the same sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ortflow.workflow.data import text
from ortflow.workflow.data.arrays import ArrayFiles
from ortflow.workflow.data.order import Indices, permute
from ortflow.workflow.data.schema import Array, Ragged
from ortflow.workflow.data.source_formats import NOT_LINES, NOT_TEXT, way_to_lines
from ortflow.workflow.data.write import record_batch, whole_or_nothing, write_set
from ortflow.workflow.errors import UserError

Chunk = Mapping[str, Array | Ragged]
Mask = npt.NDArray[np.bool_]
Parts = Mapping[str, Callable[[], Iterator[Chunk]]]
"""Sets by name; a single set has the empty name."""


def convert_arrays(
    files: Sequence[Path],
    output: Path,
    *,
    column: str | None = None,
    eval_fraction: float = 0.0,
    shard_samples: int | None = None,
    replace: bool = False,
) -> dict[Path, int]:
    """Convert the samples of .npz or .npy files.

    Parameters
    ----------
    files
        Paths of the files.
    output
        File or folder to write; with `eval_fraction` a folder with two sets.
    column
        Name of the column of a single .npy file.
    eval_fraction
        Share of the samples, scattered over the set, to use for evaluation.
    shard_samples
        Samples per file; one file if None.
    replace
        Replace an existing set.

    Returns
    -------
    dict
        Number of samples by path of the set.

    Raises
    ------
    UserError
        Naming the file, if it cannot be converted.
    """
    arrays = ArrayFiles(files, column)
    parts: Parts = {"": arrays.chunks}
    if eval_fraction:
        parts = _scattered(arrays.chunks, arrays.count, eval_fraction)
    return _write(output, parts, shard_samples, replace)


def convert_text(
    files: Sequence[Path],
    output: Path,
    *,
    length: int | None,
    column: str = "tokens",
    eval_fraction: float = 0.0,
    shard_samples: int | None = None,
    replace: bool = False,
) -> dict[Path, int]:
    """Convert the bytes of text files to uint8 tokens.

    Samples are windows of `length` + 1 tokens or, if `length` is None, lines. With `eval_fraction`, whole files are
    used for evaluation up to that share of the bytes; for a single file, the last windows, or that share of the lines,
    scattered. Other parameters, returns and raises: see `convert_arrays`.
    """

    for file in files:
        if file.suffix.lower() in (NOT_LINES if length is None else NOT_TEXT):
            raise UserError("is no text: its bytes would be the tokens", where=str(file), fix=way_to_lines(file))

    def chunks(part_files: Sequence[Path]) -> Iterator[Chunk]:
        samples = text.line_chunks(part_files) if length is None else text.windows(part_files, length)
        return ({column: part} for part in samples)

    parts: Parts = {"": lambda: chunks(files)}
    if eval_fraction and len(files) > 1:
        train, evaluation = _divide_files(files, eval_fraction)
        parts = {"train": lambda: chunks(train), "eval": lambda: chunks(evaluation)}
    elif eval_fraction and length is None:
        parts = _scattered(lambda: chunks(files), text.count_lines(files), eval_fraction)
    elif eval_fraction and length is not None:
        first = text.count_windows(files, length)
        first -= _share(first, eval_fraction)
        parts = {
            "train": lambda: _select(chunks(files), lambda numbers: numbers < first),
            "eval": lambda: _select(chunks(files), lambda numbers: numbers >= first),
        }
    return _write(output, parts, shard_samples, replace)


def _write(output: Path, parts: Parts, shard_samples: int | None, replace: bool) -> dict[Path, int]:
    def write(path: Path, name: str) -> int:
        batches = (record_batch(chunk) for chunk in parts[name]())
        return write_set(path, batches, shard_samples=shard_samples, replace=replace)

    if "" in parts:
        return {output: write(output, "")}
    suffix = "" if shard_samples else ".arrow"
    with whole_or_nothing(output, replace=replace) as partial:
        partial.mkdir()
        return {output / f"{name}{suffix}": write(partial / f"{name}{suffix}", name) for name in parts}


def _share(count: int, fraction: float) -> int:
    share = round(count * fraction)
    if not 0 < share < count:
        raise UserError(
            f"{fraction:g} of {count} samples leaves none for training or none for evaluation",
            where="--eval-fraction",
            fix="choose another fraction, or convert more data",
        )
    return share


def _scattered(chunks: Callable[[], Iterator[Chunk]], count: int, fraction: float) -> Parts:
    share = _share(count, fraction)
    return {
        "train": lambda: _select(chunks(), lambda numbers: permute(numbers, count, 0) >= share),
        "eval": lambda: _select(chunks(), lambda numbers: permute(numbers, count, 0) < share),
    }


def _select(chunks: Iterable[Chunk], mask_of: Callable[[Indices], Mask]) -> Iterator[Chunk]:
    """The samples whose number in the stream `mask_of` selects."""
    first = 0
    for chunk in chunks:
        count = len(next(iter(chunk.values())))
        mask = mask_of(np.arange(first, first + count))
        first += count
        if mask.any():
            yield {name: _masked(samples, mask) for name, samples in chunk.items()}


def _masked(samples: Array | Ragged, mask: Mask) -> Array | Ragged:
    if not isinstance(samples, Ragged):
        return samples[mask]
    lengths = samples.lengths
    return Ragged(samples.values[np.repeat(mask, lengths)], np.concatenate([[0], np.cumsum(lengths[mask])]))


def _divide_files(files: Sequence[Path], fraction: float) -> tuple[list[Path], list[Path]]:
    sizes = [file.stat().st_size for file in files]
    eval_bytes = fraction * sum(sizes)
    evaluation: set[int] = set()
    for number in permute(np.arange(len(files)), len(files), 0).tolist()[:-1]:
        if sum(sizes[index] for index in evaluation) >= eval_bytes:
            break
        evaluation.add(number)
    train = [file for number, file in enumerate(files) if number not in evaluation]
    return train, [files[number] for number in sorted(evaluation)]
