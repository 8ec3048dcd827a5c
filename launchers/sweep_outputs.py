"""Whether the runs of a sweep write to different paths. Pure; used before a sweep is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.file.paths import OUTPUTS
from ortflow.workflow.spec.run import RunSpec


def refuse_shared_outputs(specs: Sequence[RunSpec]) -> None:
    """Raise UserError if two runs of a sweep would write to one path: they would overwrite each other's files. Pure."""
    for keys in OUTPUTS:
        paths = set[Path]()
        for spec in specs:
            section = spec.model_dump(include={keys[0]})[keys[0]]
            if not section.get("enabled", True) or (keys[0] == "monitor" and not section["tensorboard"]):
                continue
            path = Path(str(spec.run_dir), section[keys[1]])
            if path in paths:
                raise UserError(
                    f"is {path} for several runs of the sweep", where=".".join(keys),
                    fix=f"give a path relative to the run directory, or vary it: --set {'.'.join(keys)}=…",
                )  # fmt: skip
            paths.add(path)
