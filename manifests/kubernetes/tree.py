"""The few words that a document is written in: a tree of them is read by Python, and turned into a Helm template.

A document is a mapping of mappings, lists, plain values and the nodes below. `evaluate` makes it from a run's values;
`chart` writes the same tree as a template, so that the chart cannot say another thing than `ortflow render`. What a
value's absence or emptiness means is therefore the same in both: empty is false, and what is not there is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Node = Any
"""A node, a plain value, a dict of nodes or a list of nodes."""


@dataclass(frozen=True)
class Ref:
    """The run file's value at a key path, such as `resources.nodes`; its default where it is not given."""

    path: str


@dataclass(frozen=True)
class Param:
    """What is no key of the run file: `job`, `namespace`, `version`, `text`, `contents`, `new_budget`, `fresh`."""

    name: str


@dataclass(frozen=True)
class Key:
    """The key that `Entries` or `Each` has come to; in a list, the place counted from 0."""


@dataclass(frozen=True)
class Item:
    """The value that `Entries` or `Each` has come to, or a key of it."""

    key: str | None = None


@dataclass(frozen=True)
class Format:
    """A text with `%s` for each argument; whole numbers stand there as such."""

    text: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True)
class Call:
    """One of the named functions: in Python in `functions`, in the chart in `_functions.tpl`."""

    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True)
class Product:
    """The product of whole numbers."""

    factors: tuple[Node, ...]


@dataclass(frozen=True)
class Sum:
    """The sum of whole numbers."""

    terms: tuple[Node, ...]


@dataclass(frozen=True)
class Is:
    """Whether a value equals a plain one."""

    value: Node
    other: str | int


@dataclass(frozen=True)
class Not:
    """Whether a value is empty."""

    value: Node


@dataclass(frozen=True)
class All:
    """Whether no value is empty."""

    values: tuple[Node, ...]


@dataclass(frozen=True)
class Some:
    """Whether a value is not empty."""

    values: tuple[Node, ...]


@dataclass(frozen=True)
class First:
    """The first value that is not empty."""

    values: tuple[Node, ...]


@dataclass(frozen=True)
class When:
    """A node that is there only under a condition; in place of it another one, if there is one."""

    condition: Node
    then: Node
    otherwise: Node = None


@dataclass(frozen=True)
class Given:
    """A value that is there only if it was given."""

    value: Node


@dataclass(frozen=True)
class Each:
    """In a list: an item for each one of a list, or of a mapping by key."""

    of: Node
    item: Node


@dataclass(frozen=True)
class Entries:
    """As a key of a mapping: an entry for each one of a mapping, by key; the value is the entry's."""

    of: Node
    key: Node = Key()


def text(template: str, *arguments: Node) -> Format:
    """`Format`, shorter."""
    return Format(template, arguments)


def call(function: str, *arguments: Node) -> Call:
    """`Call`, shorter."""
    return Call(function, arguments)
