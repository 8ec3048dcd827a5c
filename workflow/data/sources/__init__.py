"""Opens a set of samples by what it is stored as: one entry of `FORMATS` each, the first that matches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.sources import image_folder, numpy_files, tar_shards, text_files, token_files
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet


@dataclass(frozen=True)
class Format:
    """A way in which samples are stored."""

    name: str
    """The name that people know it by."""
    matches: Callable[[Path], bool]
    """Whether a file or folder is stored so, by its name and its content's names."""
    open: Callable[[DataSet], Samples]
    """The samples of a section. Raises UserError, naming the file."""
    takes: tuple[str, ...] = ()
    """Keys of `PREPARATIONS` that such a set can have."""


def _arrow(section: DataSet) -> Samples:
    return Dataset.open(Path(section.path))


FORMATS: tuple[Format, ...] = (
    Format("NumPy", numpy_files.matches, numpy_files.open_numpy, ("tokens",)),
    Format("tokens", token_files.matches, token_files.open_tokens, ("tokens",)),
    Format("tar shards", tar_shards.matches, tar_shards.open_shards, ("images",)),
    Format("a folder of images", image_folder.matches, image_folder.open_folder, ("images",)),
    Format("text", text_files.matches, text_files.open_text, ("text",)),
    Format("Arrow IPC", lambda path: True, _arrow),
)
"""The last one takes what no other does."""


PREPARATIONS = ("tokens", "images", "text")
"""Keys of a set that say how files of certain formats become samples."""


def open_samples(section: DataSet) -> Samples:
    """The samples of a `data.train` or `data.eval` section.

    Raises UserError, naming the file, if they cannot be read.
    """
    form = next(form for form in FORMATS if form.matches(Path(section.path)))
    for key in PREPARATIONS:
        if getattr(section, key) is not None and key not in form.takes:
            raise UserError(f"is read as {form.name}, which has no {key}", where=section.path, fix=f"remove {key}")
    return form.open(section)
