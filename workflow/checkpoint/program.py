"""The description of a training program's checkpoint: any files, in any folders, each with its size and hash. Pure.

Its folder, its marker and its commit are those of other checkpoints; only the program can load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ortflow.workflow.checkpoint.manifest import FileRecord, check_record, is_count, seal, unseal

FORMAT = "ortflow-program-checkpoint"
VERSION = 1


@dataclass(frozen=True)
class ProgramManifest:
    """A checkpoint of a program."""

    step: int
    world_size: int
    files: tuple[FileRecord, ...]
    """Their names are paths in the folder."""
    time: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """Code and packages that saved it, see `ortflow.workflow.program.record`."""
    run: Mapping[str, str] = field(default_factory=dict)
    """The run that saved it, see `identity`."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """JSON with a hash of itself at its end."""
        return seal(
            {
                "format": FORMAT, "version": VERSION, "step": self.step, "time": self.time,
                "world_size": self.world_size, "files": [vars(file) for file in self.files],
                "environment": dict(self.environment), "run": dict(self.run),
            }
        )  # fmt: skip


def decode_program(data: bytes) -> ProgramManifest:
    """The manifest in `data`; ValueError with the reason if it is not exactly what `encode` wrote."""
    body = unseal(data, FORMAT, VERSION)
    try:
        manifest = ProgramManifest(
            body["step"], body["world_size"], tuple(FileRecord(**file) for file in body["files"]), body["time"],
            body["environment"], body["run"],
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(f"lacks keys: {error}") from None
    check_record(body)
    for file in manifest.files:
        if not isinstance(file.name, str) or not is_inside(file.name) or not is_count(file.size):
            raise ValueError(f"has {str(file.name)[:40]!r} for a file")
    return manifest


def is_inside(name: str) -> bool:
    """Whether a name is a path inside its folder, without `.` and `..`."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name
