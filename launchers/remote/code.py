"""The code that is copied: this ortflow, packed so that the same files always give the same name.

The imported packages are packed, from a wheel or a working tree, with the launchers of the installation's
metadata, so that they are found there without an installation.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import ortflow

MAPPED = ("workflow", "launchers", "manifests")
"""Packages of ortflow that are elsewhere in a working tree."""
SOURCES = (".py", ".c", ".h")
"""File types to pack: modules, and the kernels that ranks compile."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(.*)")
_BOUND = re.compile(r"(>=|==|<)\s*([\d.]+)")


@dataclass(frozen=True)
class Code:
    """Files, by their path below a folder of PYTHONPATH."""

    files: dict[str, bytes]

    @cached_property
    def hash(self) -> str:
        """sha256 over names and contents."""
        summary = hashlib.sha256()
        for name, data in sorted(self.files.items()):
            summary.update(f"{name}\0{len(data)}\0".encode() + data)
        return summary.hexdigest()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return {name: len(data) for name, data in self.files.items()}

    def archive(self) -> bytes:
        """All of it as a compressed tar, the same bytes for the same files."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for name, data in sorted(self.files.items()):
                about = tarfile.TarInfo(name)
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
        return gzip.compress(packed.getvalue(), 6, mtime=0)


def own_code() -> Code:
    """Return this ortflow."""
    files = {name: path.read_bytes() for name, path in _sources()}
    about = f"ortflow-{ortflow.__version__}.dist-info"
    try:
        installed = metadata.distribution("ortflow")
        points, needs = installed.read_text("entry_points.txt") or "", installed.requires or []
    except metadata.PackageNotFoundError:
        points, needs = "", []
    lines = ["Metadata-Version: 2.1", "Name: ortflow", f"Version: {ortflow.__version__}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in needs]
    files[f"{about}/METADATA"] = ("\n".join(lines) + "\n").encode()
    files[f"{about}/entry_points.txt"] = points.encode()
    return Code(files)


def _sources() -> Iterator[tuple[str, Path]]:
    packages = [ortflow, *(importlib.import_module(f"ortflow.{name}") for name in MAPPED)]
    for package in packages:
        for folder in map(Path, package.__path__):
            for path in folder.rglob("*"):
                if path.suffix in SOURCES and path.stem.isidentifier():
                    yield "/".join([*package.__name__.split("."), *path.relative_to(folder).parts]), path


@dataclass(frozen=True)
class Requirement:
    """A package that ortflow needs, and its allowed versions."""

    text: str
    """As a requirement for pip."""
    name: str
    low: tuple[int, ...] = ()
    high: tuple[int, ...] = ()
    """The first version that is too new; empty if there is none."""


def requirements(extra: str | None = None) -> list[Requirement]:
    """The plain dependencies and those of an extra, from the installation here."""
    try:
        listed = metadata.requires("ortflow") or []
    except metadata.PackageNotFoundError:
        listed = []
    return read_requirements(listed, extra)


def read_requirements(listed: Sequence[str], extra: str | None) -> list[Requirement]:
    """The dependencies from lines of a distribution's metadata; those with other markers are left out. Pure."""
    requirements = []
    for line in listed:
        text, _, marker = (part.strip() for part in line.partition(";"))
        if marker and (extra is None or marker.replace("'", '"') != f'extra == "{extra}"'):
            continue
        match = _REQUIREMENT.fullmatch(text)
        if match is None:
            continue
        bounds = {sign: tuple(map(int, number.strip(".").split("."))) for sign, number in _BOUND.findall(match[2])}
        # A pinned version need not match exactly there, but must not be older.
        low = bounds.get(">=", bounds.get("==", ()))
        requirements.append(Requirement(text, match[1], low, bounds.get("<", ())))
    return requirements
