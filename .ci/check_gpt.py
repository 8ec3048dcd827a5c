"""Did the main job learn? Reads the record of runs/gpt; exits 1 where the loss is not what the README promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

records = [json.loads(line) for line in (Path(sys.argv[1]) / "events/rank-0000.jsonl").read_text().splitlines()]
losses = [record["loss"] for record in records if record["event"] == "step"]
final = [record["loss"] for record in records if record["event"] == "evaluation"][-1]
seconds = next(r["seconds"] for r in reversed(records) if r["event"] == "phase_end" and r["phase"] == "train")
print(f"loss {losses[0]:.2f} -> {final:.2f} nats a byte on held-out text, {len(losses)} steps in {seconds:.0f} s")
sys.exit(not (losses[0] > 5.0 and final < 2.6))
