"""Runs on the login node before ortflow's code is there: one file, sent as text, with the standard library only.

Reads a line of JSON from its standard input and, to receive files, a tar after it; answers with a line of JSON after
MARK, because a login may print other lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib import metadata
from typing import Any

MARK = "ortflow-answer:"
BROUGHT = ".ortflow-brought.json"
_NUMBERS = re.compile(r"\d+")


def main() -> None:
    """Carry out the request in the first line."""
    wish = json.loads(sys.stdin.buffer.readline())
    try:
        answer = take(wish) if wish["do"] == "take" else ask(wish)
    except OSError as error:
        answer = {"error": error.strerror or str(error), "file": error.filename, "errno": error.errno}
    print("\n" + MARK + json.dumps(answer), flush=True)


def ask(wish: dict[str, Any]) -> dict[str, Any]:
    """What exists here: packages, complete folders, files."""
    return {
        "python": sys.executable,
        "version": sys.version_info[:2],
        "lacking": [name for name, low, high in wish["packages"] if not _fits(name, low, high)],
        "whole": [is_complete(folder, files) for folder, files in wish["folders"]],
        "there": [os.path.exists(os.path.expanduser(path)) for path in wish["paths"]],
    }


def take(wish: dict[str, Any]) -> dict[str, Any]:
    """Unpack a tar into a folder, all or nothing; with `into`, file by file into an existing folder."""
    final = os.path.expanduser(wish["folder"])
    parent = os.path.dirname(final)
    os.makedirs(parent, exist_ok=True)
    box = tempfile.mkdtemp(prefix=".incoming-", dir=parent)
    try:
        new = os.path.join(box, "new")
        os.mkdir(new)
        unpack(new)
        if not is_complete(new, wish["files"]):
            return {"error": "the connection broke while files were copied", "file": final, "errno": None}
        if wish.get("into") and os.path.isdir(final):
            place_files(new, final, wish["files"])
        else:
            if os.path.lexists(final) and not is_complete(final, wish["files"]):
                other = foreign_file(final, wish["files"])
                if other is not None:
                    return {"error": "was not copied there by ortflow, so it is not replaced", "file": other}
                os.rename(final, os.path.join(box, "old"))
            try:
                os.rename(new, final)
            except OSError:  # another process was faster
                if not is_complete(final, wish["files"]):
                    raise
    finally:
        shutil.rmtree(box, ignore_errors=True)
    return {}


def foreign_file(folder: str, files: dict[str, int]) -> str | None:
    """A file in a folder that is neither one of these nor Python's cache of them; None if there is none."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        return folder
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(place, name)
            compiled = os.path.basename(place) == "__pycache__" and name.endswith(".pyc")
            is_own = name in folders or compiled or os.path.relpath(path, folder) in files
            if os.path.islink(path) or not is_own:
                return path
    return None


def place_files(new: str, final: str, names: Iterable[str]) -> None:
    """Move files into an existing folder; other files in their place are kept as NAME.1, NAME.2, …

    BROUGHT, in the folder, holds the hashes of files copied before. Raises OSError.
    """
    try:
        with open(os.path.join(final, BROUGHT)) as file:
            brought = dict(json.load(file))
    except (OSError, ValueError, TypeError, RecursionError):
        brought = {}
    for name in names:
        target = final
        for part in name.split("/"):
            if os.path.islink(target) and target != final:
                raise OSError(None, "is a link, which is not followed", target)
            target = os.path.join(target, part)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        summary = digest(os.path.join(new, name))
        if os.path.lexists(target) and digest(target) not in (summary, brought.get(name)):
            number = 1
            while os.path.lexists(f"{target}.{number}"):
                number += 1
            os.rename(target, f"{target}.{number}")
        os.replace(os.path.join(new, name), target)
        brought[name] = summary
    with open(os.path.join(new, BROUGHT), "w") as file:
        json.dump(brought, file)
    os.replace(os.path.join(new, BROUGHT), os.path.join(final, BROUGHT))


def digest(path: str) -> str:
    """A file's hash; empty if it is not a file."""
    if os.path.islink(path) or not os.path.isfile(path):
        return ""
    summary = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            summary.update(part)
    return summary.hexdigest()


def unpack(folder: str) -> None:
    """The regular files of the tar after the request, each below the folder."""
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*") as files:
            for member in files:
                parts = member.name.split("/")
                source = files.extractfile(member) if member.isfile() else None
                if source is None or ".." in parts or "" in parts:
                    raise OSError(None, "the archive holds something that is not a plain file", member.name)
                path = os.path.join(folder, *parts)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                if member.mode & 0o100:
                    os.chmod(path, os.stat(path).st_mode | 0o111)
    except (tarfile.TarError, EOFError):  # incomplete: the files are counted next
        pass


def is_complete(folder: str, files: dict[str, int]) -> bool:
    """Whether a folder holds these files, compared by size."""
    folder = os.path.expanduser(folder)
    try:
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in files.items())
    except OSError:
        return False


def _fits(name: str, low: list[int], high: list[int]) -> bool:
    try:
        numbers = [int(number) for number in _NUMBERS.findall(metadata.version(name))[:3]]
    except metadata.PackageNotFoundError:
        return False
    return low <= numbers and (not high or numbers < high)


if __name__ == "__main__":
    main()
