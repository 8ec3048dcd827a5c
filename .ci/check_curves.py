"""Have two runs the same curve? `check_curves.py RUN_DIR RUN_DIR TOLERANCE` exits 1 where losses differ by more.

The tolerance is relative.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def losses(run_dir: str) -> dict[int, float]:
    """Step -> loss, the last one of a step that was made again."""
    lines = (Path(run_dir) / "events/rank-0000.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["event"] == "step"]
    return {record["step"]: record["loss"] for record in records}


first, second = losses(sys.argv[1]), losses(sys.argv[2])
worst = max(abs(first[step] - second[step]) / first[step] for step in first.keys() & second.keys())
print(f"{len(first)} and {len(second)} steps, losses at most {worst:.1e} apart")
sys.exit(first.keys() != second.keys() or worst > float(sys.argv[3]))
