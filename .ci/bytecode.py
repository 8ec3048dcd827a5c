"""Compiled modules of the checkout, kept by the content of their sources.

    .ci/bytecode.py bring STORE      # before tests: what the store has, into PYTHONPYCACHEPREFIX
    .ci/bytecode.py keep STORE       # at the end: what Python and pytest have compiled since

A new clone has new times of change, by which Python and pytest would compile everything again. pytest rewrites the
assertions of a test file when it compiles it: 14 s of a core for all unit tests, in each of its workers.
"""

from __future__ import annotations

import _imp
import hashlib
import importlib.util
import marshal
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = 16
"""Bytes of a .pyc file before its code."""
TAIL = re.compile(r"\.(cpython-[\w.-]+)\.pyc$")
STALE = 40 * 24 * 3600
"""Seconds after which a file of the store that nobody used is deleted."""


def sources(root: Path) -> Iterator[Path]:
    """The Python files of a checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    yield from (root / name for name in listed.split("\0") if name and (root / name).is_file())


def compiled_beside(source: Path, prefix: Path) -> Path:
    """The folder of a source's compiled files."""
    return prefix.joinpath(*source.parts[1:-1])


def key_of(source: Path, root: Path) -> str:
    """The same for the same content in the same place of a checkout."""
    name = source.relative_to(root).as_posix().encode()
    return hashlib.sha256(name + b"\0" + source.read_bytes()).hexdigest()[:32]


def header_of(source: Path, by_hash: bool) -> bytes:
    """What a .pyc file of this Python begins with: the source's hash (pytest 9), or its time and size (Python)."""
    if by_hash:
        return struct.pack("<4sI8s", importlib.util.MAGIC_NUMBER, 3, importlib.util.source_hash(source.read_bytes()))
    status = source.stat()
    numbers = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return struct.pack("<4sIII", importlib.util.MAGIC_NUMBER, 0, *numbers)


def is_by_hash(content: bytes) -> bool:
    """Whether a .pyc file names its source's hash."""
    return content[4:8] == b"\3\0\0\0"


def bring(root: Path, prefix: Path, store: Path) -> int:
    """Write the compiled files that the store has for this Python, with the sources' times; how many."""
    kept: dict[str, list[Path]] = {}
    for path in store.glob("*.pyc"):
        kept.setdefault(path.name.partition(".")[0], []).append(path)
    count = 0
    for source in sources(root):
        for path in kept.get(key_of(source, root), ()):
            content = path.read_bytes()
            if content[:4] != importlib.util.MAGIC_NUMBER:
                continue
            tail = TAIL.search(path.name)
            assert tail is not None
            code = marshal.loads(content[HEADER:])
            _imp._fix_co_filename(code, str(source))  # type: ignore[attr-defined]  # the clone may be another one
            folder = compiled_beside(source, prefix)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{source.stem}.{tail[1]}.pyc").write_bytes(
                header_of(source, is_by_hash(content)) + marshal.dumps(code)
            )
            os.utime(path)
            count += 1
    return count


def keep(root: Path, prefix: Path, store: Path) -> int:
    """Copy what was compiled from the sources as they are now into the store; how many files are new there."""
    store.mkdir(parents=True, exist_ok=True)
    count = 0
    for source in sources(root):
        for path in compiled_beside(source, prefix).glob(f"{source.stem}.*.pyc"):
            tail = TAIL.search(path.name)
            content = path.read_bytes()
            if tail is None or path.name != source.stem + tail[0]:
                continue
            if content[:HEADER] != header_of(source, is_by_hash(content)):  # of an earlier source, or another Python
                continue
            target = store / f"{key_of(source, root)}{tail[0]}"
            if not target.exists():
                part = target.with_suffix(f".{os.getpid()}")
                part.write_bytes(content)
                part.replace(target)
                count += 1
    for path in store.iterdir():
        if path.stat().st_mtime < time.time() - STALE:
            path.unlink(missing_ok=True)
    return count


if __name__ == "__main__":
    number = {"bring": bring, "keep": keep}[sys.argv[1]](
        ROOT, Path(os.environ["PYTHONPYCACHEPREFIX"]), Path(sys.argv[2])
    )  # fmt: skip
    print(f"bytecode: {number} files, {sys.argv[1]}")
