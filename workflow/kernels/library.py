"""The kernels' shared library: shipped in the wheel, found in a cache, or compiled for this processor.

Uses any C compiler: $CC, cc, gcc, clang, or the one that `pip install ortflow[kernels]` installs. Without a compiler,
and on processors without the required instructions, ONNX Runtime's own kernels are used. Called by steps `configure`
and `runtime`. As a program, `library.py FOLDER` compiles for every supported processor of a machine type; wheels and
images are built that way and need no compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import grp
import hashlib
import importlib.util
import os
import platform
import pwd
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = (
    *("-shared", "-fPIC", "-O3", "-std=gnu11", "-w"),
    # The alignment of the innermost loop changes the time of a step by 6%.
    "-falign-loops=64",
    # Fuse a multiplication and an addition; all other arithmetic is as written in the source.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-sanitize=undefined"),
)
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"AVX-512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"), "AVX2": ("avx2", "fma")},
    # Linux and macOS use different names for the same processors. All of them have NEON.
    "aarch64": {"NEON": ()},
    "arm64": {"NEON": ()},
}
"""Machine -> level -> instruction sets, as Linux and compilers name them; the first supported level is used."""
BROUGHT = (SOURCES, Path(sys.prefix, "share", "ortflow", "kernels"))
"""Folder for libraries that were compiled when a wheel or an image was built."""
_ENTRY = "RegisterCustomOps"
"""The function that ONNX Runtime calls."""
_SECONDS = 300
_STALE = 3600
MARK = ".ortflow-kernels"
"""Marker file in a folder in which a compiler is working."""


@dataclass(frozen=True)
class Library:
    """The library's file, or None; `note` says which kernels ranks use, and why."""

    path: Path | None
    note: str


def library_for(kernels: str) -> Library | None:
    """The library that `resources.kernels` selects; None if only ONNX Runtime's kernels are wanted."""
    return find_library() if kernels == "auto" else None


@functools.cache
def find_library() -> Library:
    """The library for this processor, compiled if necessary. Never raises: `note` says what is missing."""
    machine = platform.machine()
    if machine not in LEVELS:
        return Library(None, f"ONNX Runtime's, because ortflow has no kernels for {machine}")
    level = next(iter(levels()), None)
    if level is None:
        return Library(None, "ONNX Runtime's, because this processor has no AVX2")
    return library_at(level)


def library_at(level: str) -> Library:
    """The library for one of the processor's levels, compiled if necessary. Never raises; see `find_library`."""
    machine = platform.machine()
    name, ours = _name(machine, level), f"ortflow's own, for {level}"
    for folder in (*BROUGHT, *cache_folders("kernels")):
        if (folder / name).exists() and _fault(folder / name) is None:
            return Library(folder / name, ours)
    reason = no_library()
    for folder in cache_folders("kernels"):
        for compiler in compilers():
            fault = compile_kernels(compiler, machine, level, folder)
            if fault is None:
                return Library(folder / name, ours)
            reason = f"{shlex.join(compiler)} failed: {fault}"
    return Library(None, f"ONNX Runtime's, because {reason}")


def levels() -> list[str]:
    """The levels that the processor supports, best first."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    has = next((set(line.split()) for line in text.splitlines() if line.startswith("flags")), set())
    return [level for level, sets in LEVELS.get(platform.machine(), {}).items() if has >= set(sets)]


def source_key() -> str:
    """A hash of the sources and compiler flags, independent of the processor."""
    key = hashlib.sha256(repr((FLAGS, LEVELS)).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        key.update(source.read_bytes())
    return key.hexdigest()


def _name(machine: str, level: str) -> str:
    """The file's name, which identifies processor and sources."""
    return f"{machine}-{level.lower()}-{source_key()[:16]}.so"


def cache_folders(purpose: str) -> Iterator[Path]:
    """Existing folders for a purpose, best first: $ORTFLOW_CACHE, the user's cache, then the temporary folder.

    Only folders that no other user can write to or replace, including their parents: their contents are trusted.
    Missing ones are created for the user alone, whatever the umask.
    """
    return (place for place in _places(purpose) if _unusable(place) is None)


def no_cache(purpose: str) -> str | None:
    """Why there is no folder for a purpose; None if there is one."""
    reasons = [_unusable(place) for place in _places(purpose)]
    return None if None in reasons else "; ".join(filter(None, reasons))


def no_library() -> str:
    """Why there is no compiled library if no compiler failed: there is no folder for it, or no compiler."""
    fault = no_cache("kernels")
    if fault is None:
        return "there is no C compiler: `pip install 'ortflow[kernels]'` brings one"
    return f"there is no folder for a compiled library ({fault}): {remedy()}"


def remedy() -> str:
    """What a user does on a machine without a compiled library."""
    if no_cache("kernels") is None:
        return "install a C compiler (pip install 'ortflow[kernels]')"
    return "set ORTFLOW_CACHE to a folder that only you may write to"


def _places(purpose: str) -> list[Path]:
    named = os.environ.get("ORTFLOW_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    temporary = Path(tempfile.gettempdir(), f"ortflow-{os.getuid()}")
    return [folder / purpose for folder in (*([Path(named)] if named else []), Path(home, "ortflow"), temporary)]


def _unusable(place: Path) -> str | None:
    """Create a cache folder if it is missing; returns why its contents cannot be trusted, or None."""
    try:
        _create(place)
        real = Path(os.path.realpath(place))
        _take_back(real)
        exposed = next((folder for folder in (real, *real.parents) if _others_may_replace(folder)), None)
    except OSError as error:
        return f"{place}: {error.strerror}"
    return None if exposed is None else f"other users may write to {exposed}"


def _create(folder: Path) -> None:
    """Create a folder and its parents for the user alone: `mkdir` gives parents the umask's mode."""
    if not folder.is_dir():
        _create(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _take_back(place: Path) -> None:
    """Make an empty cache folder of ours, and the folder `ortflow` that it is in, unwritable for other users.

    Earlier versions created both with the umask's mode, and wrote nothing where others may write.
    """
    above = place.parent
    if above.name not in ("ortflow", f"ortflow-{os.getuid()}"):
        return
    if _is_exposed(above):
        above.chmod(above.stat().st_mode & ~0o022)
    # Files may have the umask's mode, too, so nobody else may reach them.
    if _is_exposed(place) and not any(place.iterdir()):
        place.chmod(0o700)


def _is_exposed(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.getuid() and bool(status.st_mode & 0o022) and not status.st_mode & stat.S_ISVTX


def _others_may_replace(folder: Path) -> bool:
    """Whether another user can replace the contents of this folder."""
    status = folder.stat()
    if status.st_uid not in (os.getuid(), 0):
        return True
    writable = status.st_mode & (stat.S_IWOTH if _is_private_group(status.st_gid) else 0o022)
    return bool(writable and not status.st_mode & stat.S_ISVTX)


@functools.cache
def _is_private_group(group: int) -> bool:
    """Whether a group is the user's own and has no other member, as Debian's and Red Hat's user private groups.

    They go with a umask of 002, which makes the user's folders writable to this group.
    """
    try:
        user, entry = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_gid == user.pw_gid and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


def compilers() -> Iterator[list[str]]:
    """C compilers of this machine as command lines, best first."""
    if os.environ.get("CC"):
        yield shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            yield [path]
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "cc"]


def compile_kernels(compiler: Sequence[str], machine: str, level: str, folder: Path) -> str | None:
    """Compile into the folder; returns a short error message, or None."""
    instructions = [f"-m{one}" for one in LEVELS[machine][level]]
    sources = sorted(map(str, SOURCES.glob("*.c")))
    check = _fault if machine == platform.machine() else None
    return compile_to(folder / _name(machine, level), [*compiler, *FLAGS, *instructions, *sources, "-lm"], check)


def compile_to(
    path: Path, command: Sequence[str], check: Callable[[Path], str | None] | None = None, seconds: float = _SECONDS
) -> str | None:
    """Run a compiler to create the library `path`.

    Parameters
    ----------
    path
        The library; it is moved there only after the check.
    command
        The compiler's command line without its output file.
    check
        Returns what is wrong with the compiled library, or None.
    seconds
        Time limit.

    Returns
    -------
    str or None
        A short error message, or None.

    Raises
    ------
    EndedBySignal
        If the compiler was ended by a signal.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as work:
            Path(work, MARK).touch()
            _sweep(path.parent, Path(work, MARK).stat().st_mtime)
            made = Path(work, path.name)
            result = subprocess.run(
                [*command, "-o", str(made), "-lpthread"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                cwd=work,
                env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": work, "ZIG_LOCAL_CACHE_DIR": work, "TMPDIR": work},
            )
            if result.returncode < 0:
                # Imported here: as a program, this file runs before ortflow is installed.
                from ortflow.workflow.errors import check_signal

                check_signal(result.returncode, "the C compiler")
            if result.returncode != 0:
                lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
                return lines[0].strip() if lines else f"exit code {result.returncode}"
            fault = check(made) if check is not None else None
            if fault is not None:
                return fault
            with made.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(made, path)
    except subprocess.TimeoutExpired:
        return f"not finished after {seconds:g} s"
    except OSError as error:
        return str(error)
    return None


def _fault(library: Path) -> str | None:
    """Why a file is not a usable library of kernels, or None.

    A folder may be mounted without execute permission, and from empty sources a compiler makes an empty library.
    """
    try:
        return None if hasattr(ctypes.CDLL(str(library)), _ENTRY) else f"what it made has no {_ENTRY}"
    except OSError as error:
        return str(error)


def _sweep(folder: Path, now: float) -> None:
    """Remove the folders of killed compilations, which contain our marker.

    `now` is the time of the file system's clock, since a file server's clock may differ from the machine's.
    """
    for left in folder.glob("making-*"):
        mark = left / MARK
        if not left.is_symlink() and mark.is_file() and now - mark.stat().st_mtime > _STALE:
            shutil.rmtree(left, ignore_errors=True)


def main() -> int:
    """Compile for every level into the given folder; returns 1 and prints the error on failure."""
    parser = argparse.ArgumentParser(description="Compile ortflow's CPU kernels for all supported processors.")
    parser.add_argument("folder", type=Path, help="output folder for the libraries")
    parser.add_argument(
        "--machine",
        choices=LEVELS,
        default=platform.machine(),
        help="machine type, if $CC is a cross-compiler: arm64 is macOS, aarch64 Linux (default: this machine's)",
    )
    asked, compiler = parser.parse_args(), next(compilers(), ["cc"])
    asked.folder.mkdir(parents=True, exist_ok=True)
    faults = {
        level: compile_kernels(compiler, asked.machine, level, asked.folder) for level in LEVELS.get(asked.machine, {})
    }
    for level, fault in faults.items():
        if fault is not None:
            print(f"{level}: {shlex.join(compiler)} failed: {fault}", file=sys.stderr)
    return 1 if any(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
