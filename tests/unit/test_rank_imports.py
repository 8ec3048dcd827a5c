"""What a rank that builds no graph leaves unimported: each import costs every rank of every run."""

from __future__ import annotations

import subprocess
import sys

RANK = "import ortflow.workflow.executor, ortflow.workflow.steps.order, ortflow.workflow.trainer.opening"
ONLY_TO_BUILD = ["onnx.reference", "ortflow.workflow.graph.operators.families", "ortflow.workflow.assembly.build"]


def test_a_rank_does_not_import_what_only_builds_graphs() -> None:
    code = f"{RANK}, sys; print([name for name in {ONLY_TO_BUILD} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    assert done.stdout == "[]\n"
