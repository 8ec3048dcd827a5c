"""The run files of a job array in one script: the first in full, of each other only the values that differ. Pure.

A thousand whole run files would exceed what sbatch accepts as a script (4 MiB).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortflow.workflow.spec.file.document import parse_document
from ortflow.workflow.spec.file.dump import dump_values

DIFFERENCES = "# As the first, except:"
"""First line of a document with differences only; scripts of earlier versions have none."""
_SEPARATOR = re.compile(r"^---\n", re.MULTILINE)


def run_files(runs: Sequence[Mapping[str, Any]]) -> str:
    """The documents of all tasks, from the content of their run files, in order."""
    first = runs[0]
    differences = (dump_values(dict(_differences(first, run))) for run in runs[1:])
    return "---\n".join([dump_values(first), *(f"{DIFFERENCES}\n{other}" for other in differences)])


def run_file(text: str, task: int) -> str:
    """The run file of a task, in full. Raises IndexError if there is none."""
    documents = _SEPARATOR.split(text)
    document = documents[task]
    if not document.startswith(DIFFERENCES):
        return document
    values = parse_document(documents[0], "the first run file").values
    for name, value in parse_document(document, f"the run file of task {task}").values.items():
        *path, last = name.split(".")
        holder = values
        for key in path:
            holder = holder[key]
        holder[last] = value
    return dump_values(values)


def _differences(first: Any, other: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(key path, value) of what differs; of sections with other keys, or keys that contain dots, the whole section."""
    if isinstance(first, Mapping) and isinstance(other, Mapping) and [*first] == [*other] and not _has_dots(first):
        for key in first:
            yield from _differences(first[key], other[key], (*path, key))
    elif repr(first) != repr(other):  # 1, 1.0 and True are equal
        yield ".".join(path), other


def _has_dots(section: Mapping[Any, Any]) -> bool:
    return any(not isinstance(key, str) or "." in key for key in section)
