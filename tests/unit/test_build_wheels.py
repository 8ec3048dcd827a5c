"""Building wheels: a wheel contains only what its platform can load."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from program_files import module_of

from ortflow.workflow.kernels.library import LEVELS, find_library, source_key

TOOL = Path(__file__).parents[2] / "tools" / "build_wheels.py"
LIBRARY = find_library().path
HERE = (platform.system(), platform.machine())


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return module_of(TOOL)


@pytest.mark.skipif(LIBRARY is None, reason="no library on this machine")
def test_a_library_goes_into_the_wheel_of_its_platform_alone(tool: ModuleType) -> None:
    assert LIBRARY is not None
    content = LIBRARY.read_bytes()
    for target in tool.TARGETS:
        fault = tool.fault_of(content.replace(b"GLIBC_2.", b"OTHER_2."), target)
        assert fault == (None if (target.system, target.machine) == HERE else "is made for another platform")


@pytest.mark.skipif(LIBRARY is None or HERE[0] != "Linux", reason="no library for Linux on this machine")
def test_a_library_that_older_machines_cannot_load_is_found(tool: ModuleType) -> None:
    assert LIBRARY is not None
    content = LIBRARY.read_bytes()
    (target,) = (one for one in tool.TARGETS if (one.system, one.machine) == HERE)
    assert tool.fault_of(content + b"GLIBC_2.34\0", target) == "needs glibc 2.34"
    assert tool.fault_of(content[:64] + bytes(64), target) == "has no entry for ONNX Runtime"


def test_compiled_kernels_are_kept_by_their_sources(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "version", lambda _: "0.13")
    kernels, kept = tmp_path / "kernels", tmp_path / "store" / "kept"
    kernels.mkdir()
    for name in ("gelu.c", "library.py", "x86_64-avx2.so"):
        (kernels / name).write_text(name)
    key = tool._key(kernels, ["-target", "linux"])
    (kernels / "x86_64-avx2.so").write_text("compiled again")
    assert tool._key(kernels, ["-target", "linux"]) == key
    assert tool._key(kernels, ["-target", "macos"]) != key, "another compiler or target"
    tool._keep(kernels, kept)
    tool._keep(kernels, kept)
    assert [path.name for path in kept.iterdir()] == ["x86_64-avx2.so"]
    assert list(kept.parent.iterdir()) == [kept], "nothing else is left"
    (kernels / "gelu.c").write_text("changed")
    assert tool._key(kernels, ["-target", "linux"]) != key


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All wheels: those in $ORTFLOW_WHEELS, or built."""
    if os.environ.get("ORTFLOW_WHEELS"):
        return Path(os.environ["ORTFLOW_WHEELS"])
    for package in ("ziglang", "wheel"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, str(TOOL), "--out", str(folder)], check=True, timeout=600)
    return folder


def test_wheels_bring_a_library_for_every_processor_of_their_platform(wheels: Path, tool: ModuleType) -> None:
    made = {path.name.rpartition("-py3-none-")[2]: path for path in wheels.iterdir()}
    assert set(made) == {"any.whl", *(f"{target.tag}.whl" for target in tool.TARGETS)}
    brought = {
        tag: {Path(name).name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")}
        for tag, path in made.items()
    }
    assert brought.pop("any.whl") == set()
    key = source_key()[:16]
    assert brought == {
        f"{target.tag}.whl": {f"{target.machine}-{level.lower()}-{key}.so" for level in LEVELS[target.machine]}
        for target in tool.TARGETS
    }
    for target in tool.TARGETS:
        archive = zipfile.ZipFile(made[f"{target.tag}.whl"])
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(about).decode().splitlines()
        assert f"Tag: py3-none-{target.tag}" in lines
        assert "Root-Is-Purelib: false" in lines
        assert archive.testzip() is None
