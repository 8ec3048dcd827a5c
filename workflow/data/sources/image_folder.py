"""Folders of images, and single images, as a set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortflow.workflow.data.sources import class_folders
from ortflow.workflow.data.sources.class_folders import Kind, files_of_kind
from ortflow.workflow.data.sources.images import Images
from ortflow.workflow.data.sources.pictures import ENDS
from ortflow.workflow.spec.data import DataSet

KIND = Kind("an image", "images", ENDS)


def matches(path: Path) -> bool:
    """Whether it is an image, or a folder with images or with folders of images."""
    return class_folders.matches(path, KIND)


def open_folder(section: DataSet, places: Sequence[Path]) -> Images:
    """The images with their labels, if they have any. Raises UserError, naming the file or folder."""
    files = files_of_kind(places, KIND)
    return Images(Path(section.title), files.blobs, files.numbers, section.images, files.counts, files.classes)
