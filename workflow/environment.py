"""What the bits of a curve depend on besides the run file, as every checkpoint has it on record.

Step `runtime` makes the record of the ranks; resuming compares it with the checkpoint's. Plain data: whatever reads
manifests may import this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PLACE = ("device", "instructions", "library", "threads")
"""What another machine has otherwise: a curve then goes on to rounding, as with another number of ranks.

All else changes only when somebody changes it: with the same of it and as many ranks, a curve goes on bit for bit."""
LAYOUT = "layout"
"""Key of the record: how the ranks divide the model. Who changes that wants another layout."""
WORDS = {
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
"""Key of the record: `resources.kernels`. Who changes that wants other kernels."""


@dataclass(frozen=True)
class Difference:
    """An entry of the record that is another one now."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{WORDS.get(self.name, self.name)}: {self.before} before, {self.now} now"


def merged(records: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """One record of all ranks': every value that occurs, once."""
    records = list(records)
    return {name: ", ".join(sorted({record[name] for record in records})) for name in records[0]}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """The entries that differ; what one of the two did not record does not."""
    names = [name for name in before if name in now and name != ASKED]
    found = [Difference(name, before[name], now[name]) for name in names]
    changed = [difference for difference in found if difference.before != difference.now]
    # Other kernels, and kernels for another processor, are another library.
    others = {difference.name for difference in changed} & {"kernels", "instructions"}
    return [difference for difference in changed if difference.name != "library" or not others]


def breaking(before: Mapping[str, str], now: Mapping[str, str], *, same_ranks: bool) -> list[Difference]:
    """The differences for which a promise would be broken.

    With as many ranks, a curve goes on bit for bit. Another training graph is not a matter of rounding.
    """
    wanted = {"kernels"} if before.get(ASKED) != now.get(ASKED) else set()
    spared = {*PLACE, *wanted, LAYOUT}
    return [
        difference
        for difference in differences(before, now)
        if difference.name == "graphs" or (same_ranks and difference.name not in spared)
    ]
