"""Whether the runs of a sweep write to different paths. Pure; used before a sweep is submitted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.file.paths import OUTPUTS
from ortflow.workflow.spec.run import RunSpec


def refuse_shared_outputs(specs: Sequence[RunSpec]) -> None:
    """Raise UserError if two runs of a sweep would write to one path: they would overwrite each other's files. Pure."""
    for keys in OUTPUTS:
        paths = set[Path]()
        for spec in specs:
            for output in _written(spec, keys):
                path = Path(str(spec.run_dir), output)
                if path in paths:
                    raise UserError(
                        f"is {path} for several runs of the sweep", where=".".join(keys),
                        fix=f"give a path relative to the run directory, or vary it: --set {'.'.join(keys)}=…",
                    )  # fmt: skip
                paths.add(path)


def refuse_absolute_outputs(spec: RunSpec, varied: Collection[str]) -> None:
    """Raise UserError if all trials of a search would write to one path. `varied` are the keys of its space. Pure."""
    for keys in OUTPUTS:
        key = ".".join(keys)
        if any(f"{key}.".startswith(f"{other}.") for other in varied):
            continue
        for path in _written(spec, keys):
            if path.startswith(("/", "~")):
                raise UserError(
                    f"is {path} for all trials of the search",
                    where=key,
                    fix="give a path relative to the run directory",
                )


def _written(spec: RunSpec, keys: Sequence[str]) -> Iterator[str]:
    """The path of an output, if the run writes it."""
    section = spec.model_dump(include={keys[0]})[keys[0]]
    if section.get("enabled", True) and (keys[0] != "monitor" or section["tensorboard"]):
        yield str(section[keys[1]])
