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
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
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
    from ortflow.workflow.system.cache_folders import cache_folders  # not at the top: as a program, this file is alone

    machine = platform.machine()
    name, purpose = _name(machine, level), f"ortflow's own, for {level}"
    for folder in (*BROUGHT, *cache_folders("kernels")):
        if (folder / name).exists() and _fault(folder / name) is None:
            return Library(folder / name, purpose)
    reason = no_library()
    for folder in cache_folders("kernels"):
        for compiler in compilers():
            fault = compile_kernels(compiler, machine, level, folder)
            if fault is None:
                return Library(folder / name, purpose)
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


def no_library() -> str:
    """Why there is no compiled library if no compiler failed: there is no folder for it, or no compiler."""
    from ortflow.workflow.system.cache_folders import no_cache

    fault = no_cache("kernels")
    if fault is None:
        return "there is no C compiler: `pip install 'ortflow[kernels]'` brings one"
    return f"there is no folder for a compiled library ({fault}): {remedy()}"


def remedy() -> str:
    """What a user does on a machine without a compiled library."""
    from ortflow.workflow.system.cache_folders import no_cache

    if no_cache("kernels") is None:
        return "install a C compiler (pip install 'ortflow[kernels]')"
    return "set ORTFLOW_CACHE to a folder that only you may write to"


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
    instructions = [f"-m{flag}" for flag in LEVELS[machine][level]]
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
            output = Path(work, path.name)
            result = subprocess.run(
                [*command, "-o", str(output), "-lpthread"],
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
            fault = check(output) if check is not None else None
            if fault is not None:
                return fault
            with output.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(output, path)
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
    for leftover in folder.glob("making-*"):
        mark = leftover / MARK
        if not leftover.is_symlink() and mark.is_file() and now - mark.stat().st_mtime > _STALE:
            shutil.rmtree(leftover, ignore_errors=True)


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
    options, compiler = parser.parse_args(), next(compilers(), ["cc"])
    options.folder.mkdir(parents=True, exist_ok=True)
    faults = {
        level: compile_kernels(compiler, options.machine, level, options.folder)
        for level in LEVELS.get(options.machine, {})
    }
    for level, fault in faults.items():
        if fault is not None:
            print(f"{level}: {shlex.join(compiler)} failed: {fault}", file=sys.stderr)
    return 1 if any(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
