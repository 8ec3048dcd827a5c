"""What a job of the spool runs: `python -m ortflow_spool.job RUN_DIR ATTEMPT COMMAND...`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ortflow.launchers.records import Outcome
from ortflow.workflow.run.rundir import RunDir

OUTCOMES = {0: Outcome.FINISHED, 2: Outcome.USER_ERROR, 75: Outcome.PREEMPTED}

if __name__ == "__main__":
    run, attempt = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    run.record_attempt(event="start", attempt=attempt)
    variables = {**os.environ, "ORTFLOW_LAUNCHER": "spool", "ORTFLOW_ATTEMPT": str(attempt)}
    code = subprocess.run(sys.argv[3:], env=variables, check=False).returncode
    outcome = OUTCOMES.get(code, Outcome.FAILURE)
    asked = "cancel" if outcome is Outcome.PREEMPTED and run.stop_request.exists() else None
    run.record_attempt(
        event="end", attempt=attempt, outcome=outcome.value, exit_code=code, cause=f"exit code {code}", next="stop",
        **({"asked": asked} if asked else {}),
    )  # fmt: skip
