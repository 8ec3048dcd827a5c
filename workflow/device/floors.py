"""What GPUs compute by their data sheets, and what a sound one reaches at least. Pure.

Numbers are NVIDIA's, dense: TFLOP/s of fp32 without tensor cores, of fp16 with them and sums in fp32, and GB/s in one
direction over NVLink (0: none, or none that every machine has). Sources: the data sheets "NVIDIA H200", "H100", "A100",
"L40S", "L40", "L4", "A10", "A30", "A40", "A2", "T4", "RTX A6000", "RTX 6000 Ada Generation", "HGX" (B200); the
whitepapers "NVIDIA Turing GPU Architecture", "NVIDIA Ampere GA102", "NVIDIA Ada GPU Architecture" and "NVIDIA RTX
Blackwell GPU Architecture" for GeForce.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = {"fp32": 0.6, "fp16": 0.5}
"""Of the data sheet: a product of large matrices on a sound GPU reaches 0.7 and more of it."""
COOL_SHARE = {"fp32": 0.35, "fp16": 0.25}
"""The same for cards of 75 W and less, which slow down by design."""
LINK_SHARE = 0.4
PCIE = 2.0
"""GB/s that a sum over GPUs reaches through PCI Express and the host's memory at least."""


@dataclass(frozen=True)
class Sheet:
    """A row of the table."""

    name: str
    """What CUDA's name of the GPU holds."""
    fp32: float
    fp16: float
    link: float = 0.0
    cool: bool = False


TABLE = (
    # what is particular comes first
    Sheet("B200", 75.0, 2250.0, 900.0),
    Sheet("H200 NVL", 60.0, 835.0),
    Sheet("H200", 67.0, 989.0, 450.0),
    Sheet("H100 NVL", 60.0, 835.0),
    Sheet("H100 PCIe", 51.0, 756.0),
    Sheet("H100", 67.0, 989.0, 450.0),
    Sheet("A100-SXM", 19.5, 312.0, 300.0),
    Sheet("A100", 19.5, 312.0),
    Sheet("A30", 10.3, 165.0),
    Sheet("A40", 37.4, 149.7),
    Sheet("RTX A6000", 38.7, 154.8),
    Sheet("A10G", 31.2, 70.0),
    Sheet("A10", 31.2, 125.0),
    Sheet("A2", 4.5, 18.0, cool=True),
    Sheet("L40S", 91.6, 362.0),
    Sheet("L40", 90.5, 181.0),
    Sheet("L4", 30.3, 121.0, cool=True),
    Sheet("RTX 6000 Ada", 91.1, 364.2),
    Sheet("T4", 8.1, 65.0, cool=True),
    Sheet("RTX 5090", 104.8, 209.5),
    Sheet("RTX 4090", 82.6, 165.2),
    Sheet("RTX 3090", 35.6, 71.0),
    Sheet("RTX 2080 Ti", 13.4, 53.8),
)


def sheet(name: str) -> Sheet | None:
    """The row of a GPU by the name that CUDA gives it; None for one that is not in the table."""
    words = name.replace("-", " ").split()
    for row in TABLE:
        wanted = row.name.replace("-", " ").split()
        places = range(len(words) - len(wanted) + 1)
        if any(_alike(words[at : at + len(wanted)], wanted) for at in places):
            return row
    return None


def _alike(words: list[str], wanted: list[str]) -> bool:
    """SXM stands for SXM4, SXM5."""
    return all(
        word == part or (part == "SXM" and word.startswith("SXM")) for word, part in zip(words, wanted, strict=True)
    )


def floor(name: str, precision: str) -> float | None:
    """TFLOP/s that a sound GPU of this name reaches at least in fp32 or fp16; None if it is not known."""
    row = sheet(name)
    if row is None:
        return None
    peak: float = getattr(row, precision)
    return peak * (COOL_SHARE if row.cool else SHARE)[precision]


def link_floor(name: str) -> float:
    """GB/s that a sum over GPUs of this name moves over each of them at least."""
    row = sheet(name)
    return max(PCIE, LINK_SHARE * row.link if row is not None else 0.0)
