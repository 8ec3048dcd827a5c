"""A program whose steps are profiled: its waits, steps and checkpoints, and torch's operators."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from program_runs import Programs
from project import command

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs' process groups are Linux's")

PROGRAM = """
    import time
    import torch
    import ortflow.program

    model = torch.nn.Linear(64, 64)
    run = ortflow.program.start(model=model)

    def batches():
        while True:
            time.sleep(0.02)
            yield torch.ones(256, 64)

    for batch in run.steps(batches(), total=8):
        loss = model(batch).sum()
        loss.backward()
        run.log(loss=float(loss))
"""


def test_a_programs_waits_and_operators(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    programs.write(PROGRAM)
    window = ("monitor.profile={from: 3, to: 6}", "checkpoint.every_steps=5")
    code, output = programs.run("train.py", *window)
    assert code == 0, output
    done = command("profile", "train", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["first"], found["steps"], found["complete"], found["clock_error"]) == (3, 4, True, None)
    rows = {row["name"]: row for row in found["operators"]}
    assert rows["data wait"]["seconds"] >= 4 * 0.02
    assert rows["checkpoint"]["seconds"] > 0
    assert rows["aten::addmm"]["calls"] == 4
    assert rows["aten::addmm"]["flops"] == 4 * 2 * 256 * 64 * 64
    assert any(sentence.startswith("data wait takes") and "num_workers" in sentence for sentence in found["advice"])
    events = json.loads(gzip.decompress(Path(found["trace"]).read_bytes()))["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "steps"} == {f"step {n}" for n in range(3, 7)}
