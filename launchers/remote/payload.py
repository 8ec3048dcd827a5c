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
    preparation: list[Parcel]
    """The run file with what `prepare` needs, for an existing folder: inputs are made beside it."""

    def overrides(self) -> list[str]:
        """KEY=VALUE for every path that differs there."""
        return [f"{parcel.key}={json.dumps(parcel.path)}" for parcel in self.parcels if parcel.key]


def cluster_own(paths: Sequence[Named]) -> list[Named]:
    """The paths that may exist on the cluster already: absolute ones. Pure."""
    return [path for path in paths if not path.relative]


def pack(spec: RunSpec, file: Path, login: Login, remote_paths: Sequence[str]) -> Payload:
    """What to copy with a run file; `remote_paths` are the texts of paths that exist on the cluster.

    Raises UserError for a path that exists neither here nor there.
    """
    folder = file.absolute().parent
    parcels, missing = [], []
    for named_input in named(spec, folder):
        if named_input.text in remote_paths and not named_input.relative:
            continue
        if named_input.local_path.exists():
            input_item = item(named_input)
            parcels.append(Parcel(named_input.key, input_item, login.input_folder(input_item.digest())))
        elif named_input.relative and spec.prepare:
            missing.append(named_input)
        else:
            raise UserError(
                f"there is no file {named_input.text} here"
                + ("" if named_input.relative else f", and none on {login.host}")
                + (f" (searched {named_input.local_path})" if named_input.relative else ""),
                where=named_input.key,
                fix="correct the path; write the path of a file on the cluster from / or ~",
            )
    if not missing:
        run_file_item = Item({file.name: file}, file.name)
        run_file_parcel = Parcel("", run_file_item, login.input_folder(run_file_item.digest()))
        return Payload(_inside(run_file_parcel, login), [*parcels, run_file_parcel], [])
    helpers = prepare_files(spec.prepare, folder)
    recipe = Item(helpers).digest() if helpers else spec.name
    prepare_parcel = Parcel("", Item({**helpers, file.name: file}, file.name), login.input_folder(f"prepare-{recipe}"))
    print(
        f"{', '.join(absent.text for absent in missing)} is not here: `prepare` makes it on {login.host}, from "
        f"{', '.join(sorted(helpers)) or 'nothing of this folder'}",
        file=sys.stderr,
    )
    return Payload(_inside(prepare_parcel, login), parcels, [prepare_parcel])


def _inside(parcel: Parcel, login: Login) -> str:
    return parcel.path.removeprefix(f"{login.folder}/")


def send(payload: Payload, login: Login, *, only_run_file: bool = False) -> None:
    """Copy what is missing there."""
    parcels = [parcel for parcel in payload.parcels if not (only_run_file and parcel.key)]
    state = login.probe(folders=[(parcel.folder, parcel.item.sizes) for parcel in parcels])
    for parcel in {
        parcel.folder: parcel
        for parcel, is_complete in zip(parcels, state.folders_complete, strict=True)
        if not is_complete
    }.values():
        size = sum(parcel.item.sizes.values())
        if size >= TELL:
            print(f"copying {parcel.key}, {size / 2**20:,.0f} MiB, to {login.host}", file=sys.stderr)
        login.take(parcel.folder, parcel.item.sizes, parcel.item.write_tar)
    for parcel in payload.preparation:
        login.take(parcel.folder, parcel.item.sizes, parcel.item.write_tar, into=True)
