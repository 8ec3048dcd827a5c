"""The table of classes: the name of each label's number, recorded in the plan and beside the exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ortflow.workflow.data.samples import Classified, Samples
from ortflow.workflow.files import read_whole
from ortflow.workflow.rundir import write_atomically

FILE = "classes.json"


def classes_of(samples: Samples) -> dict[str, str]:
    """Number -> name, as the plan records it; empty if the labels have no names."""
    names = samples.classes if isinstance(samples, Classified) else ()
    return {str(number): name for number, name in enumerate(names)}


def write_classes(folder: Path, classes: Mapping[str, str]) -> str | None:
    """Write the names in the order of their numbers beside an exported model.

    Returns what prevents it: a file of this name that is no such table, or an error of the disk. None if it is written
    or if there are no names.
    """
    path = folder / FILE
    if not classes:
        return None
    try:
        if path.exists() and not _is_table(path):
            return f"{path} is no table of classes and was kept: the classes are in plan.json"
        names = [classes[str(number)] for number in range(len(classes))]
        write_atomically(path, (json.dumps(names, indent=1) + "\n").encode())
    except OSError as error:
        return f"{path} was not written ({error.strerror}): the classes are in plan.json"
    return None


def _is_table(path: Path) -> bool:
    try:
        names = json.loads(read_whole(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(names, list) and all(isinstance(name, str) for name in names)
