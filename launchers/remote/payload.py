"""Prepares a run file for submission there: the files to copy, and the changed paths."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortflow.launchers.remote.inputs import Item, Named, item, named, prepare_files
from ortflow.launchers.remote.login import Login
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.run import RunSpec

TELL = 64 << 20
"""Size in bytes from which copying is announced to the user."""


@dataclass(frozen=True)
class Parcel:
    """An item and its place there."""

    key: str
    item: Item
    folder: str

    @property
    def path(self) -> str:
        """The path there of what the run file names."""
        return f"{self.folder}/{self.item.main}" if self.item.main else self.folder


@dataclass(frozen=True)
class Payload:
    """A run file and its inputs, sorted by what to do with them."""

    run_file: str
    """Its path there, relative to the login's folder."""
    parcels: list[Parcel]
    """What is copied from here; the run file is the last."""
    kept: list[Parcel]
    """The run file with what `prepare` needs, for an existing folder: inputs are made beside it."""

    def overrides(self) -> list[str]:
        """KEY=VALUE for every path that differs there."""
        return [f"{one.key}={json.dumps(one.path)}" for one in self.parcels if one.key]


def cluster_own(paths: Sequence[Named]) -> list[Named]:
    """The paths that may exist on the cluster already: absolute ones. Pure."""
    return [one for one in paths if not one.relative]


def pack(spec: RunSpec, file: Path, login: Login, there: Sequence[str]) -> Payload:
    """What to copy with a run file; `there` are the texts of paths that exist on the cluster.

    Raises UserError for a path that exists neither here nor there.
    """
    folder = file.absolute().parent
    parcels, missing = [], []
    for one in named(spec, folder):
        if one.text in there and not one.relative:
            continue
        if one.here.exists():
            found = item(one)
            parcels.append(Parcel(one.key, found, login.input_folder(found.digest())))
        elif one.relative and spec.prepare:
            missing.append(one)
        else:
            raise UserError(
                f"there is no file {one.text} here"
                + ("" if one.relative else f", and none on {login.host}")
                + (f" (searched {one.here})" if one.relative else ""),
                where=one.key,
                fix="correct the path; write the path of a file on the cluster from / or ~",
            )
    if not missing:
        alone = Item({file.name: file}, file.name)
        own = Parcel("", alone, login.input_folder(alone.digest()))
        return Payload(_inside(own, login), [*parcels, own], [])
    helpers = prepare_files(spec.prepare, folder)
    recipe = Item(helpers).digest() if helpers else spec.name
    kept = Parcel("", Item({**helpers, file.name: file}, file.name), login.input_folder(f"prepare-{recipe}"))
    print(
        f"{', '.join(one.text for one in missing)} is not here: `prepare` makes it on {login.host}, from "
        f"{', '.join(sorted(helpers)) or 'nothing of this folder'}",
        file=sys.stderr,
    )
    return Payload(_inside(kept, login), parcels, [kept])


def _inside(parcel: Parcel, login: Login) -> str:
    return parcel.path.removeprefix(f"{login.folder}/")


def send(payload: Payload, login: Login, *, only_run_file: bool = False) -> None:
    """Copy what is missing there."""
    parcels = [one for one in payload.parcels if not (only_run_file and one.key)]
    found = login.probe(folders=[(one.folder, one.item.sizes) for one in parcels])
    for one in {one.folder: one for one, whole in zip(parcels, found.whole, strict=True) if not whole}.values():
        size = sum(one.item.sizes.values())
        if size >= TELL:
            print(f"copying {one.key}, {size / 2**20:,.0f} MiB, to {login.host}", file=sys.stderr)
        login.take(one.folder, one.item.sizes, one.item.write_tar)
    for one in payload.kept:
        login.take(one.folder, one.item.sizes, one.item.write_tar, into=True)
