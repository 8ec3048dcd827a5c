"""A view of a launcher that keeps what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Lines:
    """Keeps the messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def record(self, record: Mapping[str, Any]) -> None: ...
    def attempt(self, number: int) -> None: ...
    def tick(self) -> None: ...

    def message(self, text: str) -> None:
        self.said.append(text)
