"""A run's local inputs: found by the run file's paths, named by their content, so that each is copied once.

A file keeps its name in a folder that is named by the hash of its content. So nothing that a remote run reads
ever changes during the run, runs share equal files, and another model under an old name is another run.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.file.paths import input_keys, value_at
from ortflow.workflow.spec.locations import url_of
from ortflow.workflow.spec.run import RunSpec

_LOCATION = re.compile(rb"\x0a\x08location\x12([\x80-\xff]?[\x01-\x7f])")
"""How an ONNX file names a file beside it with weights: an entry of `external_data`, followed by its length."""
_SCRIPTS = (".py", ".sh")


@dataclass(frozen=True)
class Named:
    """A path of the run file."""

    key: str
    """Dotted."""
    text: str
    """As written there."""
    local_path: Path
    """Resolved from the run file's folder."""

    @property
    def relative(self) -> bool:
        """Whether it is relative to the run file's folder; otherwise it may exist only on the cluster."""
        return not self.text.startswith(("/", "~"))


@dataclass(frozen=True)
class Item:
    """Files to copy, in their own folder."""

    files: dict[str, Path]
    """The files, by name in that folder."""
    main: str = ""
    """The file that the run file names; empty for the folder itself."""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return {name: path.stat().st_size for name, path in self.files.items()}

    def digest(self) -> str:
        """Hash of names, sizes and contents."""
        import xxhash

        summary = xxhash.xxh3_128()
        for name, path in sorted(self.files.items()):
            summary.update(f"{name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while part := file.read(1 << 22):
                    summary.update(part)
        return summary.hexdigest()

    def write_tar(self, pipe: IO[bytes]) -> None:
        """Write all files, one after the other."""
        # ustar takes neither files above 8 GiB nor long names.
        with tarfile.open(fileobj=pipe, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as archive:
            for name, path in sorted(self.files.items()):
                about = tarfile.TarInfo(name)
                about.size = path.stat().st_size
                about.mode = 0o755 if os.access(path, os.X_OK) else 0o644
                with path.open("rb") as file:
                    archive.addfile(about, file)


def named(spec: RunSpec, folder: Path) -> list[Named]:
    """The paths that a run file in `folder` reads."""
    values = spec.model_dump()
    inputs = []
    for keys in input_keys(spec):
        text = value_at(values, keys)
        if isinstance(text, list) and any(not name.startswith(("/", "~")) and url_of(name) is None for name in text):
            fix = "put the files into one folder, or give their absolute paths on the cluster"
            raise UserError("is a list of files here, and one path is copied", where=".".join(keys), fix=fix)
        if isinstance(text, str) and url_of(text) is None:
            path = Path(os.path.abspath(folder / os.path.expanduser(text)))
            inputs.append(Named(".".join(keys), text, path))
    return inputs


def item(named_input: Named) -> Item:
    """The files at a path: a file, with the weights that an ONNX file keeps beside it; or all files of a folder."""
    try:
        if named_input.local_path.is_dir():
            files = dict(_in_folder(named_input.local_path))
            if not files:
                raise UserError(f"the folder {named_input.local_path} is empty", where=named_input.key)
            return Item(files)
        data_files = external_data(named_input.local_path) if named_input.key.startswith("model.") else []
        return Item(
            {name: named_input.local_path.parent / name for name in (named_input.local_path.name, *data_files)},
            named_input.local_path.name,
        )
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}", where=named_input.key) from error


def external_data(model: Path) -> list[str]:
    """Files beside an ONNX file that hold its weights, relative to its folder. Needs no ONNX."""
    with model.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return []
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            texts = {
                data[match.end() : match.end() + _length(match[1])].decode(errors="replace")
                for match in _LOCATION.finditer(data)
            }
    inside = [text for text in texts if not text.startswith("/") and ".." not in text.split("/")]
    return sorted(os.path.normpath(text) for text in inside if "\0" not in text and (model.parent / text).is_file())


def _length(varint: bytes) -> int:
    return sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(varint))


def prepare_files(command: Sequence[str], folder: Path) -> dict[str, Path]:
    """The files that `prepare` needs: those that its arguments name, and Python files beside a script."""
    files: dict[str, Path] = {}
    for word in command:
        path = Path(os.path.normpath(folder / word))
        if not path.is_file() or not path.is_relative_to(folder):
            continue
        neighbours = sorted(path.parent.glob("*.py")) if path.suffix in _SCRIPTS else []
        files |= {file.relative_to(folder).as_posix(): file for file in (path, *neighbours)}
    return files


def _in_folder(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix(), path
