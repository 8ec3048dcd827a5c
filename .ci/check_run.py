"""Did a run learn? `check_run.py RUN_DIR METRIC below|above BOUND`; exits 1 if its last evaluation says no."""

from __future__ import annotations

import json
import sys
from pathlib import Path

run_dir, metric, relation, bound = sys.argv[1:]
records = [json.loads(line) for line in (Path(run_dir) / "events/rank-0000.jsonl").read_text().splitlines()]
steps = [record for record in records if record["event"] == "step"]
final = [record for record in records if record["event"] == "evaluation"][-1][metric]
train = next(r["seconds"] for r in reversed(records) if r["event"] == "phase_end" and r["phase"] == "train")
print(f"loss {steps[0]['loss']:.2f} -> {steps[-1]['loss']:.2f}, {metric} {final:.4f} on held-out samples")
print(f"{len(steps)} steps in {train:.0f} s")
sys.exit(not (final < float(bound) if relation == "below" else final > float(bound)))
