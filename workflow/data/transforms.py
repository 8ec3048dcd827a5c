"""The transforms of a set, one class each: a pure function of a sample, of others by number, and of random draws."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import xxhash

from ortflow.workflow.data.draws import Draws
from ortflow.workflow.data.schema import Array, Column
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.transforms import ColorJitter, MaskTokens

IGNORED = -100
"""Label of a token that is not to be predicted; the default of model.loss.ignore_index, and of PyTorch."""
Before = Callable[[str, int], Array]
"""The value of a column of a sample, by the sample's number, before a transform."""
Columns = Mapping[str, Column]


class Step(Protocol):
    """One transform."""

    def changed(self, columns: Columns) -> dict[str, Column]:
        """The columns that it changes or adds, as they are afterwards. Raises UserError if it does not fit."""
        ...

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        """The value of one of these columns; the same draws are given for each."""
        ...


@dataclass(frozen=True)
class Axes:
    """Where an image's values are."""

    first: bool
    """Whether the axis of the channels is the first, not the last."""
    black: Array
    """Value of black in each channel."""
    white: Array
    """Value of white in each channel."""

    def of(self, image: Array) -> Array:
        """A view with the channels first."""
        return image if self.first else np.moveaxis(image, -1, 0)

    def back(self, image: Array) -> Array:
        """The inverse of `of`."""
        return image if self.first else np.moveaxis(image, 0, -1)


@dataclass(frozen=True)
class Flip:
    """Mirrors every second image."""

    column: str
    axes: Axes
    vertical: bool

    def changed(self, columns: Columns) -> dict[str, Column]:
        return {self.column: _image(columns, self.column, numbers=False)}

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        image = before(name, number)
        if draws.word() >> 63:
            return image
        channels = self.axes.of(image)
        return self.axes.back(channels[:, ::-1] if self.vertical else channels[:, :, ::-1])


@dataclass(frozen=True)
class PaddedCrop:
    """A part of the image's size of the image with an edge of black."""

    column: str
    axes: Axes
    padding: int

    def changed(self, columns: Columns) -> dict[str, Column]:
        return {self.column: _image(columns, self.column, numbers=False)}

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        channels, edge = self.axes.of(before(name, number)), self.padding
        depth, height, width = channels.shape
        padded = np.empty((depth, height + 2 * edge, width + 2 * edge), channels.dtype)
        padded[:] = self.axes.black.astype(channels.dtype)[:, None, None]
        padded[:, edge : edge + height, edge : edge + width] = channels
        top, left = draws.below(2 * edge + 1), draws.below(2 * edge + 1)
        return self.axes.back(padded[:, top : top + height, left : left + width])


@dataclass(frozen=True)
class Jitter:
    """Brightness, contrast and saturation, in this order."""

    column: str
    axes: Axes
    section: ColorJitter

    def changed(self, columns: Columns) -> dict[str, Column]:
        return {self.column: _image(columns, self.column, numbers=True)}

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        black = self.axes.black[:, None, None]
        span = self.axes.white[:, None, None] - black
        image = (self.axes.of(before(name, number)) - black) / span
        for key in ("brightness", "contrast", "saturation"):
            strength = getattr(self.section, key)
            factor = np.float32(draws.uniform(max(0.0, 1 - strength), 1 + strength))
            if strength:
                image = np.clip(image * factor + _centre(image, key) * (1 - factor), 0, 1)
        return self.axes.back((image * span + black).astype(np.float32))


@dataclass(frozen=True)
class Noise:
    """Adds normal noise."""

    column: str
    deviation: float

    def changed(self, columns: Columns) -> dict[str, Column]:
        column = _numbers(columns, self.column)
        if column.minimum is None or column.maximum is None:
            return {self.column: column}
        return {
            self.column: column.with_range((column.minimum - 6 * self.deviation, column.maximum + 6 * self.deviation))
        }

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        value = before(name, number)
        noise = draws.normals(value.size).reshape(value.shape) * np.float32(self.deviation)
        noisy: Array = (value + noise).astype(value.dtype)
        return noisy


@dataclass(frozen=True)
class OneHot:
    """Numbers of classes as probabilities."""

    label: str
    classes: int

    def changed(self, columns: Columns) -> dict[str, Column]:
        return {self.label: Column(np.dtype(np.float32), (self.classes,), False, 0, 1)}

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        probabilities = np.zeros(self.classes, np.float32)
        probabilities[int(before(name, number))] = 1
        return probabilities


@dataclass(frozen=True)
class Mix:
    """Mixup (Zhang et al. 2018) or, with `cut`, CutMix (Yun et al. 2019), with one partner from the whole set.

    The partner is drawn by the sample's own number, so that batches, ranks and the position of a resume do not matter.
    Labels are probabilities: see `OneHot`.
    """

    column: str
    label: str
    axes: Axes
    parameter: float
    cut: bool
    count: int
    size: tuple[int, int]
    """Height and width of an image."""

    def changed(self, columns: Columns) -> dict[str, Column]:
        return {self.column: _image(columns, self.column, numbers=True), self.label: columns[self.label]}

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        partner, share = draws.below(self.count), draws.beta(self.parameter)
        sample, other = before(name, number), before(name, partner)
        if self.cut:
            return self._cut(name, sample, other, share, draws)
        mixed: Array = (sample * np.float32(share) + other * np.float32(1 - share)).astype(sample.dtype)
        return mixed

    def _cut(self, name: str, sample: Array, other: Array, share: float, draws: Draws) -> Array:
        height, width = self.size
        side = math.sqrt(1 - share)
        across, down = int(width * side), int(height * side)
        x, y = draws.below(width), draws.below(height)
        left, right = max(0, x - across // 2), min(width, x + across // 2)
        top, bottom = max(0, y - down // 2), min(height, y + down // 2)
        if name == self.column:
            mixed = self.axes.of(sample).copy()
            mixed[:, top:bottom, left:right] = self.axes.of(other)[:, top:bottom, left:right]
            return self.axes.back(mixed)
        partner_share = np.float32((right - left) * (bottom - top) / (height * width))
        label: Array = (sample * (1 - partner_share) + other * partner_share).astype(sample.dtype)
        return label


@dataclass(frozen=True)
class Mask:
    """Masking of tokens (Devlin et al. 2019)."""

    column: str
    section: MaskTokens
    mask_id: int
    vocabulary: int
    padding: str | None = None
    """Column that is 0 where a sample has no token."""

    def changed(self, columns: Columns) -> dict[str, Column]:
        column = columns.get(self.column)
        if column is None or column.dtype.kind not in "iu" or not (column.variable or len(column.shape) == 1):
            raise _misfit(columns, self.column, "tokens")
        if self.mask_id > np.iinfo(column.dtype).max or self.vocabulary - 1 > np.iinfo(column.dtype).max:
            raise UserError(f"column {self.column!r} is {column}, too small for these tokens", where="mask_tokens")
        if self.section.labels in columns:
            raise UserError(
                f"the set has a column {self.section.labels!r}", fix="give another name in mask_tokens.labels"
            )
        tokens = labels = column
        if column.minimum is not None and column.maximum is not None:
            largest = max(column.maximum, self.mask_id, self.vocabulary - 1)
            tokens = column.with_range((min(column.minimum, 0), largest))
            labels = column.with_range((min(column.minimum, IGNORED), column.maximum))
        return {self.column: tokens, self.section.labels: replace(labels, dtype=np.dtype(np.int64))}

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        section, tokens = self.section, before(self.column, number)
        selection = draws.uniforms(len(tokens)) < section.probability
        if section.special:
            selection &= ~np.isin(tokens, section.special)
        if self.padding is not None:
            selection &= before(self.padding, number) != 0
        if name == section.labels:
            # Widened first: numpy 2 keeps uint16 and wraps the negative number.
            return np.where(selection, tokens.astype(np.int64), IGNORED)
        kind, random = draws.uniforms(len(tokens)), draws.uniforms(len(tokens)) * self.vocabulary
        masked = np.where(selection & (kind < 0.8), self.mask_id, tokens.astype(np.int64))
        return np.where(selection & (kind >= 0.9), random.astype(np.int64), masked).astype(tokens.dtype)

    def extremes(self, name: str) -> Array:
        """The values that it may add to a column, for the checks."""
        if name == self.section.labels:
            return np.array([IGNORED])
        return np.array([self.mask_id, self.vocabulary - 1])


@dataclass(frozen=True)
class Function:
    """A function of the user."""

    column: str
    name: str

    def changed(self, columns: Columns) -> dict[str, Column]:
        if self.column not in columns:
            raise _misfit(columns, self.column, "samples")
        function_of(self.name)
        return {self.column: replace(columns[self.column], minimum=None, maximum=None)}

    def apply(self, name: str, number: int, before: Before, draws: Draws) -> Array:
        value, function = before(name, number), function_of(self.name)
        # numpy keeps the stream of a bit generator in all versions (NEP 19); Generator's methods may change.
        random = np.random.Generator(np.random.Philox(draws.word()))
        try:
            # A function may write to its argument, which may be a read-only view of a mapped file.
            result = np.asarray(function(value.copy(), random))
        except Exception as error:  # whatever a user's function raises
            reason = f"raised {type(error).__name__} for sample {number}: {error}"
            raise UserError(reason, where=self.name, fix="correct it") from error
        if result.dtype != value.dtype or result.shape != value.shape:
            message = (
                f"returned {result.dtype} {list(result.shape)} for sample {number}, a {value.dtype} {list(value.shape)}"
            )
            raise UserError(message, where=self.name, fix="return the type and shape of the argument")
        return result


def function_of(name: str) -> Callable[[Array, np.random.Generator], Any]:
    """The function `file.py:function` or `module:function`. Raises UserError."""
    module, _, attribute = name.rpartition(":")
    try:
        function = getattr(_of_file(module) if module.endswith(".py") else importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError, OSError) as error:
        fix = "name file.py:function, relative to the run file, or module:function on PYTHONPATH"
        raise UserError(f"cannot be imported ({error})", where=name, fix=fix) from None
    if not callable(function):
        raise UserError("is not a function", where=name)
    return function  # type: ignore[no-any-return]


@cache
def _of_file(path: str) -> ModuleType:
    """The module in a file, loaded once."""
    # Files of several folders may have one name.
    name = f"ortflow_function_{Path(path).stem}_{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.abspath(path)))}"
    description = importlib.util.spec_from_file_location(name, path)
    if description is None or description.loader is None:
        raise ImportError(f"{path} is not a module")
    module = importlib.util.module_from_spec(description)
    # Dataclasses, pickle and others look a class's module up.
    sys.modules[name] = module
    try:
        description.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _centre(image: Array, key: str) -> Array:
    """What a factor of 0 makes of an image [channels, height, width]."""
    if key == "brightness":
        return np.zeros((), np.float32)
    # Weights of ITU-R BT.601, as Pillow and torchvision have them.
    weights = np.array([0.299, 0.587, 0.114], np.float32)[:, None, None]
    grey: Array = (image * weights).sum(axis=0) if len(image) == 3 else image.mean(axis=0)
    return np.asarray(grey.mean()) if key == "contrast" else grey


def _image(columns: Columns, name: str, *, numbers: bool) -> Column:
    column = _numbers(columns, name) if numbers else columns.get(name)
    if column is None or len(column.shape) != 3 or column.variable:
        raise _misfit(columns, name, "images")
    return column


def _numbers(columns: Columns, name: str) -> Column:
    column = columns.get(name)
    if column is None or column.variable or column.dtype.kind != "f":
        raise _misfit(columns, name, "floats")
    return column


def _misfit(columns: Columns, name: str, expectation: str) -> UserError:
    if name not in columns:
        names = ", ".join(columns)
        return UserError(f"there is no column {name!r}", where="transforms", fix=f"set column to one of: {names}")
    return UserError(f"column {name!r} is {columns[name]}, not {expectation}", where="transforms", fix="set column")
