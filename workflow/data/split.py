"""Which samples of a training set are held out for evaluation: decided by the seed and the samples' content. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import assert_never

from ortflow.workflow.data.order import permute
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.split import HeldOut

Mask = npt.NDArray[np.bool_]
By = Literal["group", "time", "stratify"]
"""Keys of `data.eval` that name the column that decides."""


@dataclass(frozen=True)
class Values:
    """A column with few different values: of each sample the number of its value, and the values in ascending order."""

    codes: npt.NDArray[np.int64]
    names: Sequence[str]


def column_of(section: HeldOut) -> tuple[By, str] | None:
    """The key and the column that decide; None if only the samples' numbers do."""
    keys: tuple[By, ...] = get_args(By)
    return next(((key, name) for key in keys if (name := getattr(section, key)) is not None), None)


def held_out(count: int, section: HeldOut, seed: int, values: Values | None = None) -> Mask:
    """Whether each sample is held out, [count].

    Parameters
    ----------
    count
        Number of samples.
    section
        The share, and by which column.
    seed
        The run's seed.
    values
        The column's values.

    Raises
    ------
    UserError
        If the share leaves no sample for training or none for evaluation.
    """
    share, by = round(count * (section.fraction or 0)), column_of(section)
    if by is None or values is None:
        mask = permute(np.arange(count, dtype=np.int64), count, _key(seed)) < share
    elif by[0] == "group":
        mask = _groups(values, share, seed)
    elif by[0] == "time":
        mask = _latest(values, share)
    elif by[0] == "stratify":
        mask = _strata(values, section.fraction or 0, seed)
    else:
        assert_never(by[0])
    if mask.all() or not mask.any():
        rest = "for training" if mask.any() else "for evaluation"
        raise UserError(
            f"{section.fraction:g} of {count} samples leaves none {rest}",
            where="data.eval.fraction",
            fix="choose another fraction, or give a separate set",
        )
    return mask


def _key(seed: int, name: str = "") -> int:
    return xxhash.xxh3_64_intdigest(f"held out {seed} {name}".encode())


def _groups(values: Values, share: int, seed: int) -> Mask:
    """Whole groups, in an order that depends on their names, until the share is reached; at least one remains."""
    sizes = np.bincount(values.codes, minlength=len(values.names))
    order = sorted(range(len(values.names)), key=lambda code: _key(seed, values.names[code]))
    before = np.cumsum([0, *sizes[order].tolist()])[:-1]
    held_out_codes = [
        code for code, samples_before in zip(order[:-1], before.tolist(), strict=False) if samples_before < share
    ]
    return np.isin(values.codes, held_out_codes)


def _latest(values: Values, share: int) -> Mask:
    """The largest values, at most the share: samples of the same time stay together."""
    sizes = np.bincount(values.codes, minlength=len(values.names))
    following = np.cumsum(sizes[::-1])[::-1]
    first = int(np.argmax(following <= share)) if (following <= share).any() else len(sizes)
    return values.codes >= first


def _strata(values: Values, fraction: float, seed: int) -> Mask:
    """Of each value the same share of its samples."""
    mask = np.zeros(len(values.codes), np.bool_)
    order = np.argsort(values.codes, kind="stable")
    ends = np.cumsum(np.bincount(values.codes, minlength=len(values.names)))
    for name, start, end in zip(values.names, [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        size = end - start
        if size:
            places = permute(np.arange(size, dtype=np.int64), size, _key(seed, name))
            mask[order[start:end]] = places < round(size * fraction)
    return mask
