"""What must be known of a model's samples to apply it, as JSON files beside the exported model.

`classes.json` has the names of classes in the order of their numbers; `inputs.json` how inputs were made from a table's
columns. A file of the same name that is something else is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.files import read_whole

CLASSES, INPUTS = "classes.json", "inputs.json"


def write_notes(folder: Path, classes: Mapping[str, str], inputs: Mapping[str, Any]) -> list[str]:
    """Write those that are not empty.

    Returns what prevents it: a file of the same name that is something else, or an error of the disk.

    Parameters
    ----------
    folder
        That of the model.
    classes
        Number -> name, as the plan records them.
    inputs
        Input -> how it is made, as plain data.
    """
    names = [classes[str(number)] for number in range(len(classes))]
    return [*_written(folder / CLASSES, names, _is_names), *_written(folder / INPUTS, dict(inputs), _is_inputs)]


def _written(path: Path, content: Any, is_own: Callable[[Any], bool]) -> Iterator[str]:
    if not content:
        return
    try:
        if path.exists() and not is_own(_read(path)):
            yield f"{path} was not written by ortflow and is kept; write the model to another folder for it"
            return
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        yield f"{path} was not written ({error.strerror})"


def _read(path: Path) -> Any:
    """The content of a JSON file; None if it is none."""
    try:
        return json.loads(read_whole(path))
    except (ValueError, RecursionError):
        return None


def _is_names(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(name, str) for name in content)


def _is_inputs(content: Any) -> bool:
    return isinstance(content, dict) and all(isinstance(entry, dict) and "parts" in entry for entry in content.values())
