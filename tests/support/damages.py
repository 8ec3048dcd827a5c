"""Random damage to the files of a run: any kind, to any file, drawn from a seed."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Kind = Callable[[Path, random.Random], None]


@dataclass(frozen=True)
class Damage:
    """A damage: what was done to which file."""

    path: Path
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.path}"


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(max(1, path.stat().st_size)))


def zero(path: Path, chance: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zero_a_piece(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data) + 1)
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 3) if data else 0):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def scramble(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randrange(1, 5000)))


def add(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.choice([b"\0" * 4096, b"\x80\xff", b"[]\n", b"{}\n", b"null\n", b"x"]))


def replace_text(path: Path, chance: random.Random) -> None:
    """JSON of another shape, or with other types."""
    words = ["[]", "{}", "null", "7", '"x"', "[" * 50_000, '{"a":' * 50_000, "\ud800", '{"event":7}', "NaN", ""]
    path.write_bytes(chance.choice(words).encode("utf-8", "surrogatepass"))


def damage_a_line(path: Path, chance: random.Random) -> None:
    lines = path.read_bytes().split(b"\n")
    place = chance.randrange(len(lines))
    line = lines[place]
    for old, new in chance.sample(SPOILT, 2):
        line = line.replace(old, new)
    lines[place] = line
    path.write_bytes(b"\n".join(lines))


def remove(path: Path, chance: random.Random) -> None:
    clear(path)


def fifo(path: Path, chance: random.Random) -> None:
    clear(path)
    os.mkfifo(path)


def a_socket(path: Path, chance: random.Random) -> None:
    clear(path)
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


def device(path: Path, chance: random.Random) -> None:
    clear(path)
    path.symlink_to(chance.choice(["/dev/zero", "/dev/null", "/dev/full", "/dev/random"]))


def folder(path: Path, chance: random.Random) -> None:
    clear(path)
    path.mkdir()
    if chance.random() < 0.5:
        (path / "thesis.txt").write_text("precious")


def endless_link(path: Path, chance: random.Random) -> None:
    clear(path)
    path.symlink_to(path.name)


def dangling_link(path: Path, chance: random.Random) -> None:
    clear(path)
    path.symlink_to("nothing-there")


def holes(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.5:
        clear(path)
        path.touch()
    os.truncate(path, 1 << 40)


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


SPOILT = [
    (b'"event"', b'"evnt"'),
    (b'"attempt":', b'"attempt":"x'),
    (b'"time":', b'"time":-'),
    (b'"step":', b'"step":null,"s":'),
]
"""What a line of a record has, and what it gets instead."""
LARGE = 1 << 24
"""Bytes; no file of these runs has as many."""
CONTENTS: tuple[Kind, ...] = (truncate, zero, zero_a_piece, scramble, add, replace_text, damage_a_line)
QUIET: tuple[Kind, ...] = (flip,)
"""What may leave another text that is as good as the old one."""
STRANGE: tuple[Kind, ...] = (remove, fifo, a_socket, device, folder, endless_link, dangling_link, holes)


def draw(root: Path, unguarded: Callable[[Path], bool], chance: random.Random) -> list[Damage]:
    """Damage entries below a folder, one to three times; flip bits only in files with a checksum."""
    done: list[Damage] = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        path = chance.choice([path for path in sorted(root.rglob("*")) if path.is_file() or path.is_dir()])
        # One that is full of holes already is not read here.
        whole = path.is_file() and path.stat().st_size < LARGE
        kinds = (*CONTENTS, *STRANGE, *(() if unguarded(path) else QUIET)) if whole else STRANGE
        kind = chance.choice([one for one in kinds if not (path.is_dir() and one is holes)])
        kind(path, chance)
        done.append(Damage(path.relative_to(root), kind.__name__))
    return done
