"""Parses a Dockerfile as far as builder.py can build it: an unknown instruction is an error, never ignored."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

KNOWN = {"ARG", "FROM", "ENV", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "LABEL", "EXPOSE", "HEALTHCHECK"}


class Unknown(Exception):
    """An instruction that only a real image builder supports."""


@dataclass(frozen=True)
class Instruction:
    """One instruction; its flags (--name=value) apart."""

    word: str
    value: str
    flags: Mapping[str, str]
    line: int


@dataclass
class Stage:
    """A FROM and what follows it."""

    parent: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Recipe:
    """The whole file: arguments before the first FROM, and the stages."""

    arguments: list[Instruction]
    stages: list[Stage]


def read(text: str) -> Recipe:
    """The recipe of a Dockerfile. Raises Unknown."""
    arguments: list[Instruction] = []
    stages: list[Stage] = []
    for instruction in _instructions(text):
        if instruction.word == "FROM":
            words = instruction.value.split()
            if len(words) == 3 and words[1].upper() == "AS":
                stages.append(Stage(words[0], words[2]))
            elif len(words) == 1:
                stages.append(Stage(words[0], ""))
            else:
                raise Unknown(f"line {instruction.line}: FROM {instruction.value}")
        elif stages:
            stages[-1].instructions.append(instruction)
        elif instruction.word == "ARG":
            arguments.append(instruction)
        else:
            raise Unknown(f"line {instruction.line}: {instruction.word} before FROM")
    return Recipe(arguments, stages)


def _instructions(text: str) -> list[Instruction]:
    found = []
    gathered, begin = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not gathered and not line.strip()):
            continue
        begin = begin if gathered else number
        if line.endswith("\\"):
            gathered += line[:-1]
            continue
        word, _, value = (gathered + line).strip().partition(" ")
        gathered = ""
        if word.upper() not in KNOWN:
            raise Unknown(f"line {begin}: {word}")
        flags = {}
        while flag := re.match(r"\s*--([a-z]+)=(\S+)\s+", value):
            flags[flag[1]] = flag[2]
            value = value[flag.end() :]
        found.append(Instruction(word.upper(), value.strip(), flags, begin))
    return found


def expand(text: str, values: Mapping[str, str]) -> str:
    """With $NAME, ${NAME} and ${NAME:-default} replaced; an unknown name is empty, as in a shell."""

    def value(match: re.Match[str]) -> str:
        return values.get(match["bare"] or match["name"]) or match["default"] or ""

    return re.sub(r"\$(?:\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}|(?P<bare>\w+))", value, text)


def pairs(text: str) -> dict[str, str]:
    """NAME=VALUE NAME="VALUE WITH SPACES"."""
    return dict(word.split("=", 1) for word in shlex.split(text))


def command(instruction: Instruction) -> list[str]:
    """The words of an ENTRYPOINT or CMD, which must be a JSON list."""
    try:
        words = json.loads(instruction.value)
    except ValueError:
        raise Unknown(f"line {instruction.line}: {instruction.word} is not written as a list") from None
    return [str(word) for word in words]
