"""Files at URLs, fetched once into the user's cache by fsspec, then read there like any other.

Of the processes of a machine one fetches and the others wait. A version is known by what its server says of it: ETag,
checksum, time of change and size. Called by `locations`, and for the identity of sets of many files.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import logging
import os
import posixpath
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import xxhash

from ortflow.workflow.data.cache_lock import held, partial_folder
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.graph_hashes import hash_of
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.spec.locations import without_secrets
from ortflow.workflow.system.cache_folders import cache_folders

_HTTP = ("http", "https")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\")<>]+")
_INSTALL = "install it with: pip install 'ortflow[remote]'"
_CREDENTIALS = "give credentials by the variables or files of its package, such as AWS_ACCESS_KEY_ID"
_PURPOSE = "remote"
_QUIET = 2.0
"""Seconds between lines of progress."""
_VERSION_KEYS = ("etag", "content-md5", "digest", "last-modified", "lastmodified", "mtime", "md5hash", "created",
                 "generation", "updated")  # fmt: skip


@dataclass(frozen=True)
class _Remote:
    """Files of one path or pattern."""

    names: Sequence[str]
    """Their paths relative to the folder that they are fetched into."""
    sources: Sequence[str]
    """Their paths on the server."""
    sizes: Sequence[int | None]
    """Bytes, where the server says how many."""
    version: str
    main: str | None
    """The folder among them that the URL names; None if it names files."""


@functools.cache  # a process sees one version
def fetched(url: str) -> tuple[Path, ...]:
    """The files, or the folder, of a URL as local paths; those of a pattern in the order of their names.

    Raises UserError if there is none, it cannot be reached, or the package for such URLs is missing.
    """
    scheme = url.partition("://")[0]
    if scheme == "file":
        return (Path(unquote(url.removeprefix("file://"))),)
    root = next(cache_folders(_PURPOSE), None)
    if root is None:
        fix = "set ORTFLOW_CACHE to a folder that only you may write to"
        raise UserError("cannot be kept: there is no folder for it", where=without_secrets(url), fix=fix)
    with _explained(url):
        system, path = _system(url, scheme)
        # In a URL of http, `?` begins the query and stands for no character.
        remote = _listed(system, path, patterns=scheme not in _HTTP)
    key = hashlib.blake2b(json.dumps([url, remote.version]).encode(), digest_size=16).hexdigest()
    folder = root / key
    with held(root / f"{key}.lock") as locked:
        if not folder.is_dir():
            partial = partial_folder(root, key, locked)
            for leftover in partial.iterdir():  # by a process that was killed
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            _fetch(system, url, path, remote, folder, partial, patterns=scheme not in _HTTP)
    return (folder / remote.main,) if remote.main is not None else tuple(folder / name for name in remote.names)


def version_of(place: Path) -> str:
    """Hash of the content of the fetched files among which a file or folder is; empty if it was not fetched.

    Sets whose files are known by their names and sizes would else be taken for an earlier version of the same URL.
    """
    for folder in (place, *place.parents):
        if folder.parent.name == _PURPOSE:
            with contextlib.suppress(OSError):
                return _record_of(folder).read_text()
    return ""


def _record_of(folder: Path) -> Path:
    """The file beside an entry that holds the hash of its content."""
    return folder.with_name(f"{folder.name}.content-hash")


def _hash(folder: Path) -> str:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    lines = [f"{file.relative_to(folder)} {hash_of(file)}\n" for file in files]
    return xxhash.xxh3_128_hexdigest(os.fsencode("".join(lines)))


def _system(url: str, scheme: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise UserError("is a URL, which needs fsspec", where=without_secrets(url), fix=_INSTALL) from None
    options: dict[str, Any] = {}
    if scheme in _HTTP:
        try:
            import aiohttp
        except ImportError:
            raise UserError("needs aiohttp", where=without_secrets(url), fix=_INSTALL) from None
        # aiohttp's own limit is five minutes a file.
        options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)}
    for package in ("gcsfs", "s3fs"):
        # What they log before they raise would be printed, with tracebacks, where nobody has set up logging.
        logging.getLogger(package).addHandler(logging.NullHandler())
    system, path = fsspec.url_to_fs(url, **options)
    return system, path


def _listed(system: Any, path: str, *, patterns: bool) -> _Remote:
    main = None
    if patterns and glob.has_magic(path) and not system.exists(path):
        infos = {name: info for name, info in system.glob(path, detail=True).items() if info["type"] == "file"}
        parent = posixpath.commonpath([posixpath.dirname(name) for name in infos]) if infos else ""
    elif (info := system.info(path))["type"] == "directory":
        infos, parent = system.find(path, detail=True), posixpath.dirname(path.rstrip("/"))
        main = posixpath.basename(path.rstrip("/")) or "root"
        parent = parent if main != "root" else path
    else:
        infos, parent = {path: info}, posixpath.dirname(path)
    if not infos:
        raise FileNotFoundError(path)
    sources = sorted(infos)
    # A URL may have a query, which says nothing of the format.
    names = [posixpath.relpath(source, parent).partition("?")[0] for source in sources]
    if any(name.startswith("../") for name in names):
        raise ValueError(f"its listing names {names[0]}, outside of it")
    states = [_state(infos[source]) for source in sources]
    version = json.dumps([names, states], sort_keys=True, default=str)
    return _Remote(names, sources, [infos[source].get("size") for source in sources], version, main)


def _state(info: Mapping[str, Any]) -> dict[str, str]:
    """What says whether a file has changed."""
    fields = {key.lower(): str(value) for key, value in info.items() if value is not None}
    return {key: fields[key] for key in (*_VERSION_KEYS, "size") if key in fields}


def _fetch(system: Any, url: str, path: str, remote: _Remote, folder: Path, partial: Path, *, patterns: bool) -> None:
    try:
        targets = [partial / name for name in remote.names]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        with _explained(url), _progress(url, partial, sum(size or 0 for size in remote.sizes)):
            # Two lists: of one path, fsspec (2026.9) would expand the characters of patterns.
            system.get(list(remote.sources), [str(target) for target in targets])
        for source, target, size in zip(remote.sources, targets, remote.sizes, strict=True):
            arrived = target.stat().st_size if target.exists() else 0
            if size is not None and arrived != size:
                message = f"arrived with {arrived} bytes instead of the {size} that its server names"
                raise UserError(message, where=_source(url, source), fix="try again")
        with _explained(url):
            # fsspec keeps the listings of object stores, and would answer with the first one.
            system.invalidate_cache()
            now = _listed(system, path, patterns=patterns).version
        if now != remote.version:
            raise UserError(
                "has changed while it was fetched", where=without_secrets(url), fix="try again when its writer is done"
            )
        write_atomically(_record_of(folder), _hash(partial).encode())
        os.rename(partial, folder)
    except FileExistsError:  # where there are no locks, another process may be faster
        pass
    except OSError as error:
        # On Linux, a rename onto the other process's folder fails with ENOTEMPTY, for which Python has no class.
        if not folder.is_dir():
            message = f"cannot be kept in {folder.parent} ({error.strerror or error})"
            raise UserError(
                message, where=without_secrets(url), fix="make room, or set ORTFLOW_CACHE to another folder"
            ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _progress(url: str, folder: Path, total: int) -> Iterator[None]:
    """Print how much of a slow transfer has arrived."""
    ended, began = threading.Event(), time.monotonic()

    def watch() -> None:
        while not ended.wait(_QUIET):
            arrived = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            share = f"{arrived / total:.0%}, " if total else ""
            rate = arrived / (time.monotonic() - began) / 1e6
            print(
                f"fetching {without_secrets(url)}: {share}{arrived / 1e6:.0f} MB, {rate:.1f} MB/s",
                file=sys.stderr,
                flush=True,
            )

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Whatever the package of a kind of URL raises, as one sentence."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"needs another package ({_line(error, url)})", where=without_secrets(url), fix=_INSTALL
        ) from None
    except PermissionError as error:
        message = f"access is denied ({_line(error, url)})"
        raise UserError(message, where=without_secrets(url), fix=_CREDENTIALS) from None
    except FileNotFoundError as error:
        # fsspec's http raises it for every failure.
        cause = error.__cause__
        if cause is None or getattr(cause, "status", None) == 404:
            raise UserError("there is no such file", where=without_secrets(url), fix="correct the URL") from None
        raise UserError(
            f"cannot be fetched ({_line(cause, url)})", where=without_secrets(url), fix="correct the URL or the network"
        ) from None
    except Exception as error:  # noqa: BLE001 - each package raises its own
        # botocore and google-auth have no class of errors in common.
        fix = _CREDENTIALS if "Credentials" in type(error).__name__ else "correct the URL or the network"
        raise UserError(f"cannot be fetched ({_line(error, url)})", where=without_secrets(url), fix=fix) from None


def _source(url: str, source: str) -> str:
    shown = without_secrets(url)
    return shown if source == url else f"{shown} ({without_secrets(source)})"


def _line(error: BaseException, url: str) -> str:
    """The first line of an error's text, which may contain the URL, also quoted in another way or redirected."""
    text = str(error).partition("\n")[0].replace(url, without_secrets(url))
    return _URL.sub(lambda match: without_secrets(match[0]), text) or type(error).__name__
