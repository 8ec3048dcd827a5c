"""Finding and compiling the library: with any compiler, with none, and without a writable folder."""

from __future__ import annotations

import grp
import os
import platform
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from messages import mentions, says

from ortflow.workflow.kernels import library
from ortflow.workflow.kernels.library import Library
from ortflow.workflow.system import cache_folders

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
FLAGS = library.FLAGS
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler on this machine")
COMPILED = library.find_library().path
needs_library = pytest.mark.skipif(COMPILED is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate cache, and no compiler except those that a test names."""
    for name in ("cache", "temporary", "bin"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(library, "BROUGHT", (tmp_path / "none",))
    monkeypatch.setattr(library, "FLAGS", tuple(flag.replace("-O3", "-O0") for flag in FLAGS))  # faster
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(library.shutil, "which", lambda _: None)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda _: None)


def find() -> Library:
    """As in the first process on a machine."""
    return library.find_library.__wrapped__()


def compiler(folder: Path, body: str) -> Path:
    path = folder / "bin" / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def copying(tmp_path: Path) -> str:
    """A compiler that takes no second: it gives what a real one has made of the same sources."""
    return str(compiler(tmp_path, f'while [ "$1" != -o ]; do shift; done; exec cp {COMPILED} "$2"'))


@needs_compiler
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CC", str(compiler(tmp_path, f'echo called >> {log}; exec {COMPILER} "$@"')))
    first = find()
    assert first.path is not None, first.note
    assert first.note.startswith("ortflow's own, for ")
    assert first.path.parent == tmp_path / "cache" / "kernels"
    assert [path.name for path in first.path.parent.iterdir()] == [first.path.name]
    assert find() == first
    assert log.read_text() == "called\n"


@needs_compiler
def test_what_an_image_brings_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = tmp_path / "prefix" / "kernels"
    program = [sys.executable, library.__file__, str(brought)]
    quick = compiler(tmp_path, f'exec {COMPILER} "$@" -O0')
    subprocess.run(program, check=True, env={**os.environ, "CC": str(quick)})
    machine = platform.machine()
    made = {f"{machine}-{level.lower()}" for level in library.LEVELS[machine]}
    assert {path.name.rpartition("-")[0] for path in brought.iterdir()} == made
    monkeypatch.setattr(library, "BROUGHT", (tmp_path / "none", brought))
    monkeypatch.setattr(library, "FLAGS", FLAGS)
    found = find()
    assert found.path is not None, found.note
    assert found.path.parent == brought


@needs_library
def test_what_a_wheel_brings_is_used_as_long_as_its_sources_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copying: str
) -> None:
    package = shutil.copytree(Path(library.__file__).parent, tmp_path / "package")
    monkeypatch.setattr(library, "SOURCES", package)
    monkeypatch.setattr(library, "BROUGHT", (package,))
    level = library.levels()[0]
    assert library.compile_kernels([copying], platform.machine(), level, package) is None
    found = find()
    assert found.path is not None, found.note
    assert found == Library(found.path, f"ortflow's own, for {level}")
    assert found.path.parent == package
    with (package / "sums.c").open("a") as source:
        source.write("/* changed */\n")
    assert find().path is None
    monkeypatch.setenv("CC", copying)
    newer = find().path
    assert newer is not None
    assert newer.parent == tmp_path / "cache" / "kernels"


def test_an_image_without_its_kernels_is_not_built(tmp_path: Path) -> None:
    program = [sys.executable, library.__file__, str(tmp_path / "kernels")]
    result = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "CC": "nonesuch"})
    assert result.returncode == 1
    assert f"{library.levels()[0]}: nonesuch failed: [Errno 2]" in result.stderr


def test_without_a_compiler_the_note_names_the_fix() -> None:
    found = find()
    assert found.path is None
    assert mentions(found.note, "no C compiler", "'ortflow[kernels]'")


def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiler(tmp_path, "echo note >&2; echo 'gemm.c:3: error: what is this' >&2; exit 1")
    monkeypatch.setenv("CC", f"{path} -x")
    found = find()
    assert found.path is None
    assert says(found.note, f"ONNX Runtime's … {path} -x failed: gemm.c:3: error: what is this")
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_what_cannot_be_loaded_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo no library > "$2"')))
    found = find()
    assert found.path is None
    assert "failed: " in found.note
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


@needs_compiler
def test_a_library_without_the_kernels_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", COMPILER or "")
    monkeypatch.setattr(library, "SOURCES", tmp_path / "bin")
    found = find()
    assert found.path is None
    assert found.note.endswith("what it made has no RegisterCustomOps")
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


@needs_library
def test_a_truncated_library_is_compiled_again(monkeypatch: pytest.MonkeyPatch, copying: str) -> None:
    monkeypatch.setenv("CC", copying)
    path = find().path
    assert path is not None
    whole = path.stat().st_size
    path.unlink()
    path.write_bytes(b"")
    assert find().path == path
    assert path.stat().st_size == whole


@needs_library
def test_a_fault_of_one_compiler_does_not_keep_from_trying_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copying: str
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nonesuch"))
    monkeypatch.setattr(library.shutil, "which", lambda name: copying if name == "cc" else None)
    assert find().path is not None


@needs_library
def test_a_folder_that_others_may_write_to_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copying: str
) -> None:
    monkeypatch.setenv("CC", copying)
    shared = tmp_path / "cache" / "kernels"
    shared.mkdir()
    shared.chmod(0o777)
    found = find()
    assert found.path is not None
    assert found.path.parent == tmp_path / "home" / "ortflow" / "kernels"
    assert found.path.parent.stat().st_mode & 0o777 == 0o700


@needs_library
def test_a_cache_that_cannot_be_made_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copying: str
) -> None:
    monkeypatch.setenv("CC", copying)
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = find()
    assert found.path is not None
    assert found.path.is_relative_to(tmp_path / "temporary" / f"ortflow-{os.getuid()}")


@needs_library
def test_what_a_killed_compilation_left_is_taken_away_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copying: str
) -> None:
    monkeypatch.setenv("CC", copying)
    place = tmp_path / "cache" / "kernels"
    for name, age in (("making-old", 7200), ("making-now", 0)):
        (place / name).mkdir(parents=True)
        (place / name / library.MARK).touch()
        os.utime(place / name / library.MARK, (time.time() - age,) * 2)
    (place / "making-of").mkdir()
    (place / "making-of" / "film.txt").write_text("precious")
    (place / "making-link").symlink_to(place / "making-old")
    for name in ("making-of", "making-link"):
        os.utime(place / name, (time.time() - 7200,) * 2, follow_symlinks=False)
    ahead = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: ahead)  # the file server's clock is behind
    assert find().path is not None
    assert sorted(path.name for path in place.glob("making-*")) == ["making-link", "making-now", "making-of"]
    assert (place / "making-of" / "film.txt").exists()


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ("fpu sse2 avx avx2 fma", ["AVX2"]),
        ("fpu avx2 fma avx512f avx512bw avx512dq avx512vl avx512cd", ["AVX-512", "AVX2"]),
        ("fpu avx2 fma avx512f", ["AVX2"]),
        ("fpu sse2 avx", []),
        ("fpu avx2", []),
    ],
)
def test_the_instructions_of_the_processor_are_taken_best_first(
    flags: str, levels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    real = Path
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(
        library, "Path", lambda *parts: real(tmp_path / "cpuinfo") if parts == ("/proc/cpuinfo",) else real(*parts)
    )
    assert library.levels() == levels


@pytest.mark.parametrize(
    ("machine", "levels"), [("aarch64", ["NEON"]), ("arm64", ["NEON"]), ("ppc64le", []), ("riscv64", [])]
)
def test_the_levels_of_other_machines(machine: str, levels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    assert library.levels() == levels


def test_a_machine_for_which_there_is_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: "ppc64le")
    assert find().path is None
    assert says(find().note, "ONNX Runtime's … ppc64le")


def test_a_processor_without_the_instructions_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "levels", list)
    assert find().path is None
    assert says(find().note, "ONNX Runtime's … AVX2")


@pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")
@needs_compiler
def test_the_compiler_gives_no_warnings(tmp_path: Path) -> None:
    sources = sorted(str(path) for path in Path(library.__file__).parent.glob("*.c"))
    assert COMPILER is not None
    instructions = [f"-m{one}" for one in library.LEVELS[platform.machine()][library.levels()[0]]]
    flags = [flag for flag in FLAGS if flag != "-w"]
    result = subprocess.run(
        [COMPILER, *flags, *instructions, "-Wall", "-Wextra", "-Wno-psabi", *sources, "-o", str(tmp_path / "x.so")],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_program_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """An image compiles the kernels before ortflow is installed."""
    copy = shutil.copytree(Path(library.__file__).parent, tmp_path / "kernels")
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(copy / "library.py"), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder away")
def test_a_cache_is_ours_all_the_way_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = tmp_path / "above"
    monkeypatch.setenv("ORTFLOW_CACHE", str(above / "cache"))

    def trusted() -> bool:
        return above / "cache" / "kernels" in cache_folders.cache_folders("kernels")

    assert trusted()
    monkeypatch.setattr(cache_folders, "_is_private_group", lambda group: False)
    for mode, expected in ((0o777, False), (0o1777, True), (0o775, False), (0o755, True)):
        above.chmod(mode)
        assert trusted() == expected, oct(mode)
    os.chown(above, 12345, -1)
    assert not trusted()
    os.chown(above, 0, -1)
    (tmp_path / "link").symlink_to(above)
    above.chmod(0o777)
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "link" / "cache"))
    assert tmp_path / "link" / "cache" / "kernels" not in cache_folders.cache_folders("kernels")


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o000])
def test_the_caches_do_not_depend_on_the_umask(mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian and Red Hat set 002 for users who have a group of their own, shared projects for everybody."""
    monkeypatch.delenv("ORTFLOW_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    before = os.umask(mask)
    try:
        for purpose in ("kernels", "gradients"):
            assert list(cache_folders.cache_folders(purpose)) == [
                tmp_path / "home" / ".cache" / "ortflow" / purpose,
                tmp_path / "temporary" / f"ortflow-{os.getuid()}" / purpose,
            ]
    finally:
        os.umask(before)
    assert cache_folders.no_cache("kernels") is None
    for folder in (*(tmp_path / "home").rglob("*"), *tmp_path.rglob("ortflow-*")):
        assert not folder.stat().st_mode & 0o077, folder


def test_folders_that_an_earlier_version_left_group_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wrote nothing into them. What is in such a folder may be another user's."""
    monkeypatch.delenv("ORTFLOW_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache_folders, "_is_private_group", lambda group: False)
    for purpose in ("kernels", "gradients"):
        (tmp_path / "ortflow" / purpose).mkdir(parents=True, exist_ok=True)
        (tmp_path / "ortflow" / purpose).chmod(0o775)
    (tmp_path / "ortflow").chmod(0o775)
    (tmp_path / "ortflow" / "gradients" / "of-another").touch()
    assert tmp_path / "ortflow" / "kernels" in cache_folders.cache_folders("kernels")
    assert tmp_path / "ortflow" / "gradients" not in cache_folders.cache_folders("gradients")


def test_the_reason_is_the_folder_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "shared"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "shared"))
    monkeypatch.setattr(library, "BROUGHT", ())
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    note = library.library_at(library.levels()[0]).note
    assert "C compiler" not in note
    assert f"other users may write to {tmp_path / 'shared'}" in note
    assert "ORTFLOW_CACHE" in note


def test_a_group_of_the_users_own_is_no_other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    user = pwd.getpwuid(os.getuid())
    cache_folders._is_private_group.cache_clear()
    for name, members, expected in (
        (user.pw_name, [], True),
        (user.pw_name, ["somebody"], False),
        ("project", [], False),
    ):
        entry = grp.struct_group((name, "x", user.pw_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda group, entry=entry: entry)
        assert cache_folders._is_private_group(user.pw_gid) == expected
        cache_folders._is_private_group.cache_clear()
