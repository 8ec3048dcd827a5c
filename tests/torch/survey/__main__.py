"""Trains third-party models, each against PyTorch, and prints a table.

    python tests/torch/survey                      all of them: an hour on two cores
    python tests/torch/survey --part 3/10          every tenth, from the third on
    python tests/torch/survey --only 'timm/res*'   by name
    python tests/torch/survey --table FILE         the table as Markdown, too
    python tests/torch/survey --ortmodule          under ORTModule in place of `ortflow run`; --most 3: at most three

`right`: the loss curve and every gradient of the first step are PyTorch's. `off`: the gradients are, and the curve is
two to ten times as far off as PyTorch's own is from double precision. Exits with 1 if a result is wrong, crashed or
failed after the training, or if more than 3% of all are refused.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import children

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

SECONDS = 1800
"""Limit of one model. One needs minutes at most on a core of its own; in CI other tests have precedence."""
COLUMNS = (
    "model", "result", "loss off", "PyTorch's own", "gradient / tolerance", "step / PyTorch's",
    "memory / PyTorch's", "why",
)  # fmt: skip
REFUSED = 0.03
"""Share of all models that may be refused; a part is too few to say."""


def row_of(name: str) -> dict[str, Any]:
    """The row of one model, from a separate process."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path[:2]),
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory(prefix="ortflow-survey-") as folder:
        return children.row_of(name, [sys.executable, str(HERE / "worker.py"), name, folder], environment, SECONDS)


def ortmodule_row_of(name: str) -> dict[str, Any]:
    """The row of one model under ORTModule, from a separate process."""
    import ortmodule

    # CPython 3.11's fork server imports by PYTHONPATH, not by the parent's sys.path.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path[:2]), "HF_HUB_OFFLINE": "1"}
    return children.forked_row_of(name, ortmodule.row, SECONDS)


def line_of(row: dict[str, Any]) -> str:
    """A row of the Markdown table."""
    if "loss" in row:
        numbers = [
            f"{row['loss']:.1e}",
            f"{row['own']:.1e}",
            f"{row['gradient']:.2f} {row['tensor'] if row['gradient'] > 1 else ''}",
        ]
        numbers.append(f"{row['seconds'] / row['torch_seconds']:.2f}")
        numbers.append(f"{row['bytes'] / row['torch_bytes']:.2f}" if "bytes" in row else "")
    else:
        numbers = ["", "", "", "", ""]
    return f"| {row['case']} | {row['result']} | {' | '.join(numbers)} | {row.get('why', '')} |"


def main() -> None:
    """Run the survey."""
    from catalogue import names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--part", default="0/1", help="K/N: every Nth, from the Kth on")
    parser.add_argument("--most", type=int, default=0, help="of the part, at most this many")
    parser.add_argument("--ortmodule", action="store_true", help="under ORTModule")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    first, every = map(int, options.part.split("/"))
    chosen = [name for name in names() if fnmatch(name, options.only)][first % every :: every]
    if options.most:
        chosen = chosen[:: max(1, len(chosen) // options.most)][: options.most]
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(ortmodule_row_of if options.ortmodule else row_of, chosen):
            rows.append(row)
            print(line_of(row), flush=True)
    results = [row["result"] for row in rows]
    counts = {kind: results.count(kind) for kind in ("right", "off", "refused", "wrong", "failed", "crashed")}
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()), f"of {len(rows)}")
    if options.table:
        head = "| " + " | ".join(COLUMNS) + " |"
        options.table.write_text("\n".join([head, "|" + "---|" * len(COLUMNS), *map(line_of, rows)]) + "\n")
    bad = counts["wrong"] + counts["failed"] + counts["crashed"]
    if not rows or bad or (every == 1 and counts["refused"] > REFUSED * len(rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()
