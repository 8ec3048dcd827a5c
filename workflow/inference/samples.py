"""Opens the samples that a model is applied to, read as the run reads its evaluation set.

So classes have the numbers of the training set, columns its means and deviations, and images its preparation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ortflow.workflow.data.classes import classes_of
from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.samples import Samples, reading_of
from ortflow.workflow.data.sources import is_fitted, open_other, open_samples, open_training, section_of
from ortflow.workflow.data.sources.audio import Audio
from ortflow.workflow.data.sources.images import LABEL, Images
from ortflow.workflow.errors import UserError
from ortflow.workflow.inference.models import SampleOptions
from ortflow.workflow.spec.data import DataSection, DataSet

KEPT = ("tokens", "images", "audio", "text")
"""Keys of a set that say how its files are read."""


@dataclass(frozen=True)
class Opened:
    """The samples, and what the names of labels are."""

    samples: Samples
    references: Mapping[str, str]
    """Input -> column, where the names differ."""
    classes: Mapping[str, tuple[str, ...]]
    """Column -> name of each class."""


def opened(
    options: SampleOptions, data: DataSection | None, seed: int, digest: str = "", inputs: set[str] | None = None
) -> Opened:
    """Open the samples.

    Parameters
    ----------
    options
        What the command line says.
    data
        `data` of the run; None for a model without one.
    seed
        The run's.
    digest
        Hash of the samples that the run was trained on; empty if it is not known.
    inputs
        The inputs that are filled; None for all that the run file names: a model is applied without labels.

    Raises
    ------
    UserError
        Naming the file; also if the training set, from which a table's classes and means are taken, is gone or has
        changed.
    """
    of_run: DataSet | None = None if data is None else data.eval or data.train
    before = {} if of_run is None else of_run.columns
    if inputs is not None and (unknown := sorted(options.columns.keys() - inputs - before.keys())):
        names = ", ".join(sorted(inputs))
        raise UserError(f"the model has no input {unknown[0]!r}", where="--column", fix=f"name one of {names}")
    columns = {k: v for k, v in {**before, **options.columns}.items() if inputs is None or k in inputs}
    if data is None or of_run is None:
        section = section_of(options.data, columns=columns)
        return Opened(open_samples(section), section.references, {})
    preparation = {key: getattr(of_run, key) for key in KEPT}
    skipped = of_run.bad_rows if inputs is None else 0.0  # a prediction belongs to a row of the file
    section = DataSet(path=str(options.data), columns=columns, bad_rows=skipped, **preparation)
    samples = open_other(section, data, seed, "--data")
    if not isinstance(samples, (Images, Audio)) and not reading_of(samples).fields:
        return Opened(samples, section.references, {})
    classes = _classes_of(_training(data, seed, digest))
    if isinstance(samples, (Images, Audio)) and inputs is None and classes:
        samples = samples.with_classes(classes[LABEL], "--data")
    return Opened(samples, section.references, classes)


def refuse_other_training(data: DataSection, seed: int, digest: str) -> None:
    """Raise UserError if other sets are read as the training set is, and it is gone or has changed."""
    if is_fitted(data.train):
        _training(data, seed, digest)


def _training(data: DataSection, seed: int, digest: str) -> Samples:
    try:
        samples = open_training(data, seed)
    except UserError as error:
        raise UserError(
            f"the run's training set, whose classes count, cannot be opened ({error})", fix="restore it"
        ) from None
    if digest and digest_of(samples) != digest:
        raise UserError(
            "has changed since the run was trained, so its classes and means are not those of the model",
            where=str(samples.path),
            fix="restore the file",
        )
    return samples


def _classes_of(samples: Samples) -> dict[str, tuple[str, ...]]:
    """Names of the classes of each column that has them."""
    class_names = {LABEL: names} if (names := tuple(classes_of(samples).values())) else {}
    for name, source in reading_of(samples).fields.items():
        parts = list(source.get("parts", [])) if isinstance(source, Mapping) else []
        if len(parts) == 1 and parts[0].get("classes") and not parts[0].get("one_hot"):
            class_names[name] = tuple(map(str, parts[0]["classes"]))
    return class_names
