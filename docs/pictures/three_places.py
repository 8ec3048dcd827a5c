"""Draws docs/pictures/three-places.svg: one run file, and what `ortflow render` makes of it for each backend.

    python docs/pictures/three_places.py [-o FILE]

Every line of the picture is a line of examples/digits/run.yaml or of the output of `ortflow render`. A test fails
while the picture differs from what is drawn now.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("three-places.svg")
RUN_FILE = ROOT / "examples" / "digits" / "run.yaml"
SHOWN = ("name", "model", "  path", "  loss", "data", "  train", "  micro_batch", "resources")
PLACES = {
    "A laptop: ranks of mpirun": ([], r"/(mpirun) .*?(-n \d+) .*?(ortflow\.workflow\.rank)"),
    "Slurm: a batch job": (
        ["--backend", "slurm", "resources.nodes=2"],
        r"^(#SBATCH --(?:nodes|ntasks|requeue|signal)\S*)|^  (srun) .*?(--ntasks=\d+)",
    ),
    "Kubernetes: an MPIJob": (
        ["--backend", "kubernetes", "resources.nodes=2", "backends.kubernetes.image=ortflow",
         "backends.kubernetes.volume={claim: shared}"],
        r"^(kind: MPIJob| *(?:slotsPerWorker|replicas|mpiImplementation): .*)",
    ),
}  # fmt: skip
"""Title -> arguments of `ortflow render`, and the parts of its output that are drawn."""
STYLE = """<style>
text{font:12px ui-monospace,SFMono-Regular,Menlo,monospace;fill:#1b1f24;white-space:pre}
.title{font:600 13px system-ui,sans-serif}.box{fill:#f6f8fa;stroke:#d0d7de}
.arrow{fill:none;stroke:#0969da;stroke-width:2}.head{fill:#0969da}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.box{fill:#161b22;stroke:#30363d}
.arrow{stroke:#58a6ff}.head{fill:#58a6ff}}
</style>"""
LINE, PAD, WIDTH = 17, 12, 350


def rendered(arguments: Sequence[str], pattern: str) -> list[str]:
    """The parts of `ortflow render` that match, each once."""
    command = [sys.executable, "-m", "ortflow", "render", RUN_FILE.name, *arguments]
    done = subprocess.run(command, cwd=RUN_FILE.parent, capture_output=True, text=True, check=True)
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    lines = [" … ".join(filter(None, one)) if isinstance(one, tuple) else one.strip() for one in found]
    return list(dict.fromkeys(lines))


def run_file() -> list[str]:
    """The lines of the run file that are drawn."""
    lines = [line.split("#")[0].rstrip() for line in RUN_FILE.read_text().splitlines()]
    return [line for line in lines if line.split(":")[0] in SHOWN]


def box(title: str, lines: Sequence[str], x: int, y: int) -> tuple[str, int]:
    """A box with a title and lines, and its height."""
    height = (len(lines) + 1) * LINE + 2 * PAD
    texts = [f'<text class="title" x="{x + PAD}" y="{y + PAD + 12}">{escape(title)}</text>'] + [
        f'<text x="{x + PAD}" y="{y + PAD + 12 + LINE * place}" xml:space="preserve">{escape(line)}</text>'
        for place, line in enumerate(lines, 1)
    ]
    return f'<rect class="box" x="{x}" y="{y}" width="{WIDTH}" height="{height}" rx="6"/>{"".join(texts)}', height


def picture() -> str:
    """The whole picture."""
    right, y, boxes, middles = WIDTH + 90, 4, [], []
    for title, (arguments, pattern) in PLACES.items():
        drawn, height = box(title, rendered(arguments, pattern), right, y)
        boxes.append(drawn)
        middles.append(y + height // 2)
        y += height + 12
    total = y - 8
    lines = run_file()
    left, height = box("run.yaml", lines, 4, (total - (len(lines) + 1) * LINE - 2 * PAD) // 2)
    start = 4 + WIDTH
    arrows = "".join(
        f'<path class="arrow" d="M{start + 4},{total // 2}'
        f'C{start + 50},{total // 2} {start + 34},{end} {right - 10},{end}"/>'
        f'<path class="head" d="M{right - 2},{end}l-10,-5v10z"/>'
        for end in middles
    )
    title = "One run file starts ranks on a laptop, becomes a batch job of Slurm, and becomes an MPIJob of Kubernetes"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + WIDTH + 4} {total}" role="img" '
        f'aria-labelledby="three-t">{STYLE}<title id="three-t">{title}</title>{left}{arrows}{"".join(boxes)}</svg>\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    arguments.output.write_text(picture())
    print(arguments.output)
