"""Everything besides the run file that a curve's bits depend on; recorded in every checkpoint.

Step `runtime` collects the record of all ranks; on resume it is compared with the checkpoint's. Plain data: modules
that read manifests may import this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PLACE = ("device", "instructions", "library", "threads")
"""Entries that differ between machines; the curve then continues up to rounding, as with another number of ranks.

All other entries change only when somebody changes them: if they are equal, with as many ranks, a curve continues
bit-identically.
"""
LAYOUT = "layout"
"""Key of the record: how the ranks divide the model. A change of it is intended to change the layout."""
LABELS = {
    "kernels": "kernels",
    "package": "ONNX Runtime's package",
    "onnxruntime": "ONNX Runtime",
    "settings": "settings of sessions",
    "graphs": "training graph",
    "device": "device",
    "instructions": "processor",
    "library": "compiled kernels",
    "threads": "threads a rank",
    LAYOUT: "layout",
}
ASKED = "asked"
"""Key of the record: `resources.kernels`. A change of it is intended to change kernels."""


@dataclass(frozen=True)
class Difference:
    """An entry of the record that has changed."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{LABELS.get(self.name, self.name)}: {self.before} before, {self.now} now"


def merged(records: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """One record of all ranks, with every value that occurs, once."""
    records = list(records)
    return {name: ", ".join(sorted({record[name] for record in records})) for name in records[0]}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """The entries that differ; entries that one of the two lacks are ignored."""
    names = [name for name in before if name in now and name != ASKED]
    pairs = [Difference(name, before[name], now[name]) for name in names]
    changed = [difference for difference in pairs if difference.before != difference.now]
    # Other kernels, and kernels for another processor, are in another library.
    kernel_changes = {difference.name for difference in changed} & {"kernels", "instructions"}
    return [difference for difference in changed if difference.name != "library" or not kernel_changes]


def breaking(before: Mapping[str, str], now: Mapping[str, str], *, same_ranks: bool) -> list[Difference]:
    """The differences that break a promise.

    With as many ranks, a curve continues bit-identically. Another training graph changes more than rounding.
    """
    intended_changes = {"kernels"} if before.get(ASKED) != now.get(ASKED) else set()
    spared = {*PLACE, *intended_changes, LAYOUT}
    return [
        difference
        for difference in differences(before, now)
        if difference.name == "graphs" or (same_ranks and difference.name not in spared)
    ]
