"""Samples whose slow columns are made by worker processes. Called by the shard step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ortflow.workflow.data.augmented import Augmented, augmented
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.documents import Documents, Packed
from ortflow.workflow.data.graph_step import GraphStep
from ortflow.workflow.data.mapped_arrays import MappedArrays
from ortflow.workflow.data.samples import Around, Epochs, Indices, Samples
from ortflow.workflow.data.schema import Array, Column, Ragged
from ortflow.workflow.data.sources import open_evaluation, open_training
from ortflow.workflow.data.sources.audio import Audio
from ortflow.workflow.data.sources.images import Images
from ortflow.workflow.data.transforms import Function, Mask, OneHot
from ortflow.workflow.data.vocabulary import transforms_of
from ortflow.workflow.data.workers import Workers
from ortflow.workflow.spec.data import DataSection


@dataclass(frozen=True)
class OpenSet:
    """How a worker opens a set: sets of files are given, since to list these takes long; others are opened again."""

    section: DataSection
    seed: int
    key_path: str
    files: Images | Audio | None

    def make(self) -> Samples:
        """The samples, with their transforms."""
        evaluating, section = self.key_path != "data.train", self.section
        dataset: Samples | None = self.files
        if dataset is None:
            dataset = (open_evaluation if evaluating else open_training)(section, self.seed)
        assert dataset is not None
        set_section = section.eval if evaluating and section.eval else section.train
        transforms = transforms_of(set_section, self.key_path)
        return augmented(dataset, transforms, self.seed, self.key_path) if transforms else dataset


@dataclass(frozen=True)
class Pooled(Around):
    """A set, some columns of which `workers` make."""

    dataset: Samples
    workers: Workers
    key: int
    slow: frozenset[str]
    epoch: int = 0

    @property
    def columns(self) -> dict[str, Column]:
        """Those of the set."""
        return self.dataset.columns

    @property
    def has_ranges(self) -> bool:
        """That of the set."""
        return self.dataset.has_ranges

    def at(self, epoch: int) -> Pooled:
        """The samples of another epoch."""
        dataset = self.dataset.at(epoch) if isinstance(self.dataset, Epochs) else self.dataset
        return replace(self, dataset=dataset, epoch=epoch)

    def read(self, name: str, indices: Indices) -> Array:
        """Samples, [len(indices), *shape]."""
        if name not in self.slow or not self.workers.count or not len(indices):
            return self.dataset.read(name, indices)
        column = self.columns[name]
        samples = np.empty((len(indices), *column.shape), column.dtype)
        self.workers.read(self.key, self.epoch, name, indices, samples)
        return samples

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """Samples of a column of variable length."""
        if name not in self.slow or not self.workers.count or not len(indices):
            return self.dataset.read_ragged(name, indices)
        return self.workers.read(self.key, self.epoch, name, indices, None)

    def lengths(self, name: str) -> Indices:
        """Those of the set."""
        return self.dataset.lengths(name)

    def scan(self, name: str) -> Iterator[tuple[int, Array | Ragged]]:
        """That of the set."""
        return self.dataset.scan(name)


def pooled(dataset: Samples, section: DataSection, seed: int, key_path: str, workers: Workers) -> Samples:
    """The set of a section with its slow columns made by `workers`; the set itself if it has none."""
    slow = _slow_columns(dataset)
    inner = dataset.dataset if isinstance(dataset, Augmented) else dataset
    # A worker opens these again by their section; of another set, it would have other samples.
    if (
        not slow
        or not workers.count
        or not isinstance(inner, (Images, Audio, Dataset, MappedArrays, Documents, Packed))
    ):
        return dataset
    recipe = OpenSet(section, seed, key_path, inner if isinstance(inner, (Images, Audio)) else None)
    return Pooled(dataset, workers, workers.add(recipe, str(dataset.path)), slow)


def _slow_columns(dataset: Samples) -> frozenset[str]:
    """Columns whose samples take a tenth of a millisecond or more: files, and what a function or a graph makes."""
    if isinstance(dataset, Augmented):
        slow = _slow_columns(dataset.dataset)
        for step, changed in zip(dataset.steps, dataset.changed, strict=True):
            if isinstance(step, (Function, GraphStep)):
                slow |= changed
            elif not isinstance(step, (Mask, OneHot)):
                slow |= {name for name in changed if len(dataset.columns[name].shape) == 3}
        return slow
    return frozenset(dataset.decoded) if isinstance(dataset, (Images, Audio)) else frozenset()
