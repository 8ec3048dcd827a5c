"""Samples with transforms: each depends on seed, epoch and the sample's number alone.

Resumed runs, other numbers of ranks and other micro-batches therefore see the same bits. Called by the shard step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ortflow.workflow.data.documents import MASK
from ortflow.workflow.data.draws import Draws
from ortflow.workflow.data.graph_step import GraphStep, graph_step
from ortflow.workflow.data.samples import Around, Classified, Indices, Samples
from ortflow.workflow.data.schema import Array, Column, Ragged
from ortflow.workflow.data.sources.images import IMAGE, LABEL, Images
from ortflow.workflow.data.sources.pictures import Box
from ortflow.workflow.data.transforms import Axes, Flip, Function, Jitter, Mask, Mix, Noise, OneHot, PaddedCrop, Step
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.transforms import RandomCrop, Transform

_SCANNED = 256
"""Samples made at a time by a scan."""


@dataclass(frozen=True)
class Augmented(Around):
    """The samples of an epoch."""

    dataset: Samples
    steps: Sequence[Step]
    seed: int
    columns: dict[str, Column]
    changed: Sequence[frozenset[str]]
    """The columns that each of `steps` changes."""
    crop: RandomCrop | None
    """The part of the file's image that is decoded."""
    epoch: int = 0

    @property
    def has_ranges(self) -> bool:
        """Whether those of all columns are known."""
        return all(column.minimum is not None for column in self.columns.values())

    def fault_of(self, name: str) -> UserError | None:
        """Why a column cannot fill an input; what a graph makes does not depend on the set's column of that name."""
        from_graph = any(isinstance(step, GraphStep) and name in step.outputs for step in self.steps)
        return None if from_graph else super().fault_of(name)

    def at(self, epoch: int) -> Augmented:
        """The samples of another epoch."""
        return replace(self, epoch=epoch)

    def read(self, name: str, indices: Indices) -> Array:
        """Samples, [len(indices), *shape]."""
        if not self._changes(name):
            return self.dataset.read(name, indices)
        column = self.columns[name]
        samples = np.empty((len(indices), *column.shape), column.dtype)
        for place, number in enumerate(indices.tolist()):
            samples[place] = self._value(name, number, len(self.steps))
        return samples

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """Samples of a column of variable length."""
        if not self._changes(name):
            return self.dataset.read_ragged(name, indices)
        return [self._value(name, number, len(self.steps)) for number in indices.tolist()]

    def lengths(self, name: str) -> Indices:
        """Those of the set: no transform changes a length."""
        return self.dataset.lengths(self._origin(name))

    def scan(self, name: str) -> Iterator[tuple[int, Array | Ragged]]:
        """The samples before the transforms, and the largest and smallest values that transforms add.

        What a function or a graph makes is computed for every sample, in this epoch: nothing else says its values.
        """
        masks = [step for step in self.steps if isinstance(step, Mask) and name in (step.column, step.section.labels)]
        for mask in masks:
            values = mask.extremes(name)
            yield 0, Ragged(values, np.array([0, len(values)]))
        origin = self._origin(name)
        # Labels of masked tokens are the tokens before.
        steps = self.steps if origin == name else self.steps[: self.steps.index(masks[0])]
        computed = [
            stage
            for stage, (step, changed) in enumerate(zip(steps, self.changed, strict=False), 1)
            if isinstance(step, (Function, GraphStep)) and origin in changed
        ]
        if computed:
            stage = computed[-1] if masks else len(self.steps)
            yield from self._made(origin, stage)
        elif any(isinstance(step, (OneHot, Mix)) and name == step.label for step in self.steps):
            yield 0, np.eye(*self.columns[name].shape, dtype=np.float32)
        else:
            yield from self.dataset.scan(origin)

    def _made(self, name: str, stage: int) -> Iterator[tuple[int, Array | Ragged]]:
        """A column after the first `stage` transforms, in this epoch."""
        column = self.columns[name]
        for first in range(0, len(self), _SCANNED):
            numbers = range(first, min(first + _SCANNED, len(self)))
            values = [self._value(name, number, stage) for number in numbers]
            yield first, Ragged.of(values, column.dtype) if column.variable else np.stack(values)

    def _origin(self, name: str) -> str:
        """The column of the set that one is made from."""
        sources = {step.section.labels: step.column for step in self.steps if isinstance(step, Mask)}
        return sources.get(name, name)

    def _changes(self, name: str) -> bool:
        return (name == IMAGE and self.crop is not None) or any(name in changed for changed in self.changed)

    def _value(self, name: str, number: int, stage: int) -> Array:
        """A sample's value after the first `stage` transforms."""
        while stage and name not in self.changed[stage - 1]:
            stage -= 1
        if not stage:
            return self._original(name, number)
        draws = Draws(self.seed, self.epoch, number, stage)
        return self.steps[stage - 1].apply(name, number, lambda of, at: self._value(of, at, stage - 1), draws)

    def _original(self, name: str, number: int) -> Array:
        if name == IMAGE and self.crop is not None and isinstance(self.dataset, Images):
            return self.dataset.decode(number, part(self.crop, Draws(self.seed, self.epoch, number, 0)))
        indices = np.array([number], np.int64)
        if self.dataset.columns[name].variable:
            return self.dataset.read_ragged(name, indices)[0]
        sample: Array = self.dataset.read(name, indices)[0]
        return sample


def augmented(dataset: Samples, transforms: Sequence[Transform], seed: int, key_path: str) -> Augmented:
    """The samples with the transforms of a run file's section `key_path`. Raises UserError if one does not fit."""
    steps: list[Step] = []
    columns = dict(dataset.columns)
    changed: list[frozenset[str]] = []
    crop = None
    for number, transform in enumerate(transforms):
        place = f"{key_path}.transforms[{number}].{transform.kinds[0]}"
        try:
            if transform.random_crop is not None and transform.random_crop.scale:
                crop = _checked(transform.random_crop, dataset, number)
                continue
            for step in _steps(transform, dataset, columns):
                new_columns = step.changed(columns)
                columns |= new_columns
                changed.append(frozenset(new_columns))
                steps.append(step)
        except UserError as error:
            message = error.what if transform.onnx is None else f"{transform.onnx} {error.what}"
            raise UserError(message, where=place, fix=error.fix) from None
    return Augmented(dataset, steps, seed, columns, changed, crop)


def like_training(dataset: Samples, training: Samples | None, key_path: str) -> Samples:
    """An evaluation set with the training set's numbers of classes, as probabilities if its labels are.

    Raises UserError for a class that the training set lacks.
    """
    steps = training.steps if isinstance(training, Augmented) else ()
    plain = training.dataset if isinstance(training, Augmented) else training
    table = _table(plain)
    if table is not None and isinstance(dataset, Classified):
        dataset = dataset.with_classes(table, f"{key_path}.path")
    mixed = next((step for step in steps if isinstance(step, OneHot)), None)
    if mixed is None or mixed.label not in dataset.columns:
        return dataset
    label_columns = mixed.changed(dataset.columns)
    return Augmented(dataset, [mixed], 0, {**dataset.columns, **label_columns}, [frozenset(label_columns)], None)


def _table(dataset: Samples | None) -> tuple[str, ...] | None:
    return dataset.classes if isinstance(dataset, Classified) else None


def part(section: RandomCrop, draws: Draws) -> Callable[[int, int], Box]:
    """Chooses a random part of an image (Szegedy et al. 2015): ten attempts, then the centre."""
    low, high = section.scale
    ratios = section.ratio or [3 / 4, 4 / 3]

    def choose(width: int, height: int) -> Box:
        for _ in range(10):
            area = width * height * draws.uniform(low, high)
            ratio = math.exp(draws.uniform(math.log(ratios[0]), math.log(ratios[1])))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                left, top = draws.below(width - across + 1), draws.below(height - down + 1)
                return left, top, left + across, top + down
        across = min(width, round(height * ratios[1]))
        down = min(height, round(width / ratios[0]))
        left, top = (width - across) // 2, (height - down) // 2
        return left, top, left + across, top + down

    return choose


def _checked(section: RandomCrop, dataset: Samples, number: int) -> RandomCrop:
    if section.padding is not None:
        raise UserError("has scale and padding", fix="give one of them")
    if number or not isinstance(dataset, Images):
        raise UserError("scale is for files of images, before other transforms", fix="put it first, or give padding")
    for key, pair in (("scale", section.scale), ("ratio", section.ratio or [1, 1])):
        if len(pair) != 2 or pair[0] > pair[1]:
            raise UserError(f"{key} is {pair}", fix="give the smallest and the largest")
    return section


def _steps(transform: Transform, dataset: Samples, columns: dict[str, Column]) -> list[Step]:
    if transform.mask_tokens is not None:
        mask = transform.mask_tokens
        if mask.mask_id is None or mask.vocabulary is None:
            raise UserError("needs mask_id and vocabulary", fix="add them")
        column = transform.column or "tokens"
        attention_mask, masked = columns.get(MASK), columns.get(column)
        # Packed windows and padded arrays; lists are padded later.
        padded = attention_mask is not None and masked is not None and masked.shape == attention_mask.shape != ()
        return [Mask(column, mask, mask.mask_id, mask.vocabulary, MASK if padded else None)]
    if transform.onnx is not None:
        return [graph_step(transform, columns)]
    column = transform.column or IMAGE
    if transform.function is not None:
        return [Function(column, transform.function)]
    if transform.noise is not None:
        return [Noise(column, transform.noise)]
    axes = _axes(dataset, columns, column)
    if transform.flip is not None:
        return [Flip(column, axes, transform.flip == "vertical")]
    if transform.color_jitter is not None:
        return [Jitter(column, axes, transform.color_jitter)]
    if transform.random_crop is not None:
        if transform.random_crop.padding is None:
            raise UserError("has neither scale nor padding", fix="give one of them")
        return [PaddedCrop(column, axes, transform.random_crop.padding)]
    parameter = transform.mixup or transform.cutmix
    assert parameter is not None
    label = columns.get(LABEL)
    if label is None:
        raise UserError(f"needs the classes in a column {LABEL!r}", fix=f"name it {LABEL}")
    shape = columns[column].shape if column in columns else ()
    size = (shape[-2:] if axes.first else shape[:2]) if len(shape) == 3 else (0, 0)
    steps: list[Step] = [Mix(column, LABEL, axes, parameter, transform.cutmix is not None, len(dataset), size)]
    if label.dtype.kind in "iu" and not label.shape:
        steps.insert(0, OneHot(LABEL, _classes(dataset, label)))
    return steps


def _classes(dataset: Samples, label: Column) -> int:
    names = dataset.classes if isinstance(dataset, Classified) else ()
    if not names and label.maximum is None:
        raise UserError("needs the number of classes, which the set does not record", fix="use `ortflow data convert`")
    if label.minimum is None or label.minimum < 0:
        raise UserError(
            f"column {LABEL!r} holds {label.minimum}, not the number of a class", fix="leave these samples out"
        )
    return len(names) or int(label.maximum or 0) + 1


def _axes(dataset: Samples, columns: dict[str, Column], name: str) -> Axes:
    if isinstance(dataset, Images) and name == IMAGE:
        table = dataset.preparation.table
        return Axes(dataset.preparation.section.layout == "chw", table[:, 0], table[:, 255])
    shape = columns[name].shape if name in columns else ()
    first = len(shape) != 3 or shape[0] <= 4 or shape[-1] > 4
    channels = shape[0 if first else -1] if shape else 1
    return Axes(first, np.zeros(channels, np.float32), np.ones(channels, np.float32))
