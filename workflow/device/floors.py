"""Peak performance of GPUs according to their data sheets, and the least that a healthy one reaches. Pure.

Numbers are NVIDIA's, dense: TFLOP/s in fp32 without tensor cores and in fp16 with tensor cores and fp32 accumulation,
and
GB/s in one direction over NVLink (0: none, or not in every machine). Sources: the data sheets "NVIDIA H200", "H100",
"A100", "L40S", "L40", "L4", "A10", "A30", "A40", "A2", "T4", "RTX A6000", "RTX 6000 Ada Generation", "HGX" (B200); the
whitepapers "NVIDIA Turing GPU Architecture", "NVIDIA Ampere GA102", "NVIDIA Ada GPU Architecture" and "NVIDIA RTX
Blackwell GPU Architecture" for GeForce.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = {"fp32": 0.6, "fp16": 0.5}
"""Share of the data sheet's value to be reached; a product of large matrices on a healthy GPU reaches 0.7 or more."""
COOL_SHARE = {"fp32": 0.35, "fp16": 0.25}
"""The same for cards of up to 75 W, which throttle by design."""
LINK_SHARE = 0.4
PCIE = 2.0
"""Least GB/s of a sum over GPUs through PCI Express and host memory."""


@dataclass(frozen=True)
class Sheet:
    """A row of the table."""

    name: str
    """Words that CUDA's name of the GPU contains."""
    fp32: float
    fp16: float
    link: float = 0.0
    cool: bool = False


TABLE = (
    # more specific names come first
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
    """The row for CUDA's name of a GPU; None if it is not in the table."""
    words = name.replace("-", " ").split()
    for row in TABLE:
        name_words = row.name.replace("-", " ").split()
        places = range(len(words) - len(name_words) + 1)
        if any(_alike(words[at : at + len(name_words)], name_words) for at in places):
            return row
    return None


def _alike(words: list[str], name_words: list[str]) -> bool:
    """Whether all wanted words occur; SXM also matches SXM4 and SXM5."""
    return all(
        word == part or (part == "SXM" and word.startswith("SXM")) for word, part in zip(words, name_words, strict=True)
    )


def floor(name: str, precision: str) -> float | None:
    """Least TFLOP/s of a healthy GPU of this name in fp32 or fp16; None if unknown."""
    row = sheet(name)
    if row is None:
        return None
    peak: float = getattr(row, precision)
    return peak * (COOL_SHARE if row.cool else SHARE)[precision]


def link_floor(name: str) -> float:
    """Least GB/s per GPU of a sum over GPUs of this name."""
    row = sheet(name)
    return max(PCIE, LINK_SHARE * row.link if row is not None else 0.0)
