"""Build the wheels: one for each platform with the kernels compiled, and one for any machine, which compiles its own.

    pip install wheel ziglang
    python tools/build_wheels.py --out dist                  # all of them, in a minute
    python tools/build_wheels.py --out dist --here           # this machine's and the one for any
    python tools/build_wheels.py --out dist --compiled FOLDER    # with kernels that FOLDER has from the same sources

zig compiles for every platform on any of them. The Linux libraries need glibc 2.17, that of manylinux_2_17, and no
other library; pip takes the wheel for any machine where none of the others fits.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ortflow", "workflow", "launchers", "manifests")
"""What the wheel is made from; copied, so that nothing of an earlier build gets in."""
KERNELS = Path("ortflow", "workflow", "kernels")
GLIBC = (2, 17)


@dataclass(frozen=True)
class Target:
    """A platform: the wheel's tag, zig's name for it, and what `platform.system` and `platform.machine` say there."""

    tag: str
    zig: str
    system: str
    machine: str


TARGETS = (
    Target("manylinux_2_17_x86_64", "x86_64-linux-gnu.2.17", "Linux", "x86_64"),
    Target("manylinux_2_17_aarch64", "aarch64-linux-gnu.2.17", "Linux", "aarch64"),
    Target("macosx_11_0_arm64", "aarch64-macos.11.0", "Darwin", "arm64"),
)


def main() -> int:
    """Build what is asked for and print the wheels' paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    parser.add_argument("--here", action="store_true", help="of the platforms, this machine's alone")
    parser.add_argument("--compiled", type=Path, help="folder that keeps compiled kernels, by their sources' content")
    asked = parser.parse_args()
    here = (platform.system(), platform.machine())
    targets = [target for target in TARGETS if not asked.here or (target.system, target.machine) == here]
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        plain = build_plain(work)
        made = [build_for(target, plain, work / target.tag, asked.compiled) for target in targets]
        for wheel in (*made, plain):
            print(shutil.copy(wheel, asked.out))
    return 0


def build_plain(work: Path) -> Path:
    """The wheel for any machine: sources alone."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, work / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (work / "source").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, work / "source")
    _run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work / "plain"), str(work / "source"))
    return next((work / "plain").glob("*.whl"))


def build_for(target: Target, plain: Path, work: Path, compiled: Path | None = None) -> Path:
    """The same with the libraries of a platform beside the kernels' sources."""
    _run("wheel", "unpack", "--dest", str(work / "unpacked"), str(plain))
    content = next((work / "unpacked").iterdir())
    compiler = ["-m", "ziglang", "cc", "-target", target.zig, "-g0", "-s"]
    kept = None if compiled is None else compiled / _key(content / KERNELS, compiler)
    if kept is not None and kept.is_dir():
        shutil.copytree(kept, content / KERNELS, dirs_exist_ok=True)
    else:
        # The program that is in the wheel, so that what it looks for later has the name that it gives now.
        program = [str(content / KERNELS / "library.py"), str(content / KERNELS), "--machine", target.machine]
        environment = {**os.environ, "CC": shlex.join([sys.executable, *compiler])}
        subprocess.run([sys.executable, *program], env=environment, check=True)
        if kept is not None:
            _keep(content / KERNELS, kept)
    for library in (content / KERNELS).glob("*.so"):
        fault = fault_of(library.read_bytes(), target)
        if fault is not None:
            raise SystemExit(f"{target.tag}: {library.name}: {fault}")
    about = next(content.glob("*.dist-info")) / "WHEEL"
    about.write_text(_tagged(Parser().parsestr(about.read_text()), target.tag).as_string())
    _run("wheel", "pack", "--dest-dir", str(work), str(content))
    return next(work.glob("*.whl"))


def fault_of(library: bytes, target: Target) -> str | None:
    """Why a file is not what ONNX Runtime can load on every machine of a platform, or None."""
    if target.system == "Linux":
        head = (
            b"\x7fELF\x02\x01" + library[6:16] + struct.pack("<HH", 3, {"x86_64": 62, "aarch64": 183}[target.machine])
        )
    else:  # Mach-O, 64 bits, ARM64, a library
        head = struct.pack("<II", 0xFEEDFACF, 0x0100000C) + library[8:12] + struct.pack("<I", 6)
    if not library.startswith(head):
        return "is made for another platform"
    if b"RegisterCustomOps\0" not in library:
        return "has no entry for ONNX Runtime"
    versions = [tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_([0-9.]+)\0", library)]
    if max(versions, default=GLIBC) > GLIBC:
        return f"needs glibc {'.'.join(map(str, max(versions)))}"
    return None


def _key(kernels: Path, compiler: list[str]) -> str:
    """A name for what a compiler makes of a folder of kernels and the program that compiles them."""
    key = hashlib.sha256(repr((compiler, version("ziglang"))).encode())
    for source in sorted(kernels.iterdir()):
        if source.suffix in {".c", ".h", ".py"}:
            key.update(source.name.encode() + source.read_bytes())
    return key.hexdigest()[:32]


def _keep(kernels: Path, kept: Path) -> None:
    """Copy the libraries to a new folder, which another process never sees in part."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        part = Path(folder, kept.name)
        part.mkdir()
        for library in kernels.glob("*.so"):
            shutil.copy(library, part)
        if not kept.exists():
            part.rename(kept)


def _tagged(about: Message, tag: str) -> Message:
    del about["Tag"], about["Root-Is-Purelib"]
    about["Root-Is-Purelib"] = "false"
    about["Tag"] = f"py3-none-{tag}"
    return about


def _run(*command: str) -> None:
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
