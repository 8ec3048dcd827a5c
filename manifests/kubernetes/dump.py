"""Documents as YAML, in block style. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import yaml

from ortflow.workflow.spec.file.scalars import scalar

if TYPE_CHECKING:
    from yaml import SafeDumper
else:
    SafeDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_NOT_TEXT = re.compile("[yYnN]|0o[0-7]+")
"""Texts that other YAML readers parse as a boolean or a number, but PyYAML does not."""


def dump(documents: Iterable[Any], *, sort_keys: bool = False) -> str:
    """A stream of documents."""
    return yaml.dump_all(
        documents,
        Dumper=_Dumper,
        explicit_start=True,
        sort_keys=sort_keys,
        allow_unicode=True,
        default_flow_style=False,
        width=2**31 - 1,
    )


class _Dumper(SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@lru_cache(4096)
def _style(text: str) -> str | None:
    if "\n" in text and all(line.replace("\t", "").isprintable() for line in text.split("\n")):
        return "|"
    if not text.isprintable() or not isinstance(scalar(text), str) or _NOT_TEXT.fullmatch(text):
        return '"'
    return None


def _text(dumper: SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))


_Dumper.add_representer(str, _text)
