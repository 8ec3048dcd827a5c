"""The pages of docs/walks: their commands, and a PyTorch program over the same samples beside each run.

    python benchmarks/documented_walks.py [--only table images text language-model] [--write]

Writes a page's data and files into a temporary folder, runs its commands as they are printed, and prints the numbers
of the last evaluation beside those of PyTorch, with the largest relative difference of a step's loss. Then it compares
what the page shows with what the commands have printed, and ends with exit code 1 if a line or a number differs;
`--write` renews the page instead. Times, rates and norms are not compared, and other numbers up to 1%: they differ
between processors. Needs PyTorch, and timm (images) or transformers (text, language-model).
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "torch"))

import numpy as np
import torch
from documentation import DOCS
from project import curve, of_kind
from walk_data import write_animals, write_customers, write_reviews, write_stories
from walk_pages import Page
from walk_peers import PEERS

DATA: dict[str, Callable[[Path], None]] = {
    "table": write_customers, "images": write_animals, "text": write_reviews, "language-model": write_stories,
}  # fmt: skip
NEAR = 1e-2


def walk(name: str, folder: Path) -> dict[str, list[str]]:
    """Run a page and PyTorch's programs; print their numbers, and return what the page would show."""
    os.chdir(folder)
    os.environ["ORTFLOW_CACHE"] = str(folder / "cache")
    DATA[name](folder)
    page = Page.read(name)
    made = page.write(folder)
    renewed = page.renewed(page.run(folder))
    for run, peer in PEERS[name](folder, made).items():
        losses = np.array([loss for _, loss, _, _ in curve(folder / "runs" / run)])
        apart = np.abs(losses / peer.losses - 1).max()
        print(f"{run}: {len(losses)} steps, losses at most {apart:.1e} from PyTorch's", flush=True)
        for last in of_kind(folder / "runs" / run, "evaluation")[-1:]:
            for key in sorted(last.keys() & peer.evaluation.keys()):
                print(f"  {key:12} {last[key]:.6f}  PyTorch {peer.evaluation[key]:.6f}", flush=True)
    return renewed


def differences(shown: list[str], renewed: list[str]) -> list[str]:
    """Lines of a page whose numbers are no longer those, or that a command no longer prints."""
    if len(shown) != len(renewed):
        return [f"{len(shown)} lines are shown, and {len(renewed)} of them printed"]
    return [f"{old!r} is now {new!r}" for old, new in zip(shown, renewed, strict=True) if not _near(old, new)]


def _near(old: str, new: str) -> bool:
    pairs = [re.findall(r"([a-z]\w*) (\d[\d.]*(?:e-?\d+)?)", line) for line in (old, new)]
    return len(pairs[0]) == len(pairs[1]) and all(
        key == other and abs(float(number) - float(value)) <= NEAR * abs(float(number))
        for (key, number), (other, value) in zip(*pairs, strict=True)
    )


def write(name: str, renewed: dict[str, list[str]]) -> None:
    """Put the lines into the page."""
    path = DOCS / "walks" / f"{name}.md"
    text = path.read_text()
    for command, shown in Page.read(name).commands.items():
        old, new = ("\n".join([f"$ {command}", *lines]) + "\n" for lines in (shown, renewed[command]))
        text = text.replace(old, new)
    path.write_text(text)


def main() -> int:
    """Run the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--write", action="store_true", help="renew the pages")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    outdated = 0
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            renewed = walk(name, Path(folder).resolve())
            os.chdir(DOCS)
        if options.write:
            write(name, renewed)
            continue
        for command, shown in Page.read(name).commands.items():
            for line in differences(shown, renewed[command]):
                print(f"docs/walks/{name}.md: {command}: {line}")
                outdated += 1
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
