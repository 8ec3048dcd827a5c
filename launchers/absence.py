"""Sends the notices of a run that is not back: `python -m ortflow.launchers.absence RUN_DIR`.

The program of a job that the last supervisor has submitted. Such a job may wait for days, and its script names this
module: its path stays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ortflow.launchers.supervision.absence_notices import AbsenceNotices
from ortflow.launchers.supervision.notices import Notices
from ortflow.launchers.view.plain import PlainView
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.system.clock import SYSTEM_CLOCK


def main(arguments: Sequence[str]) -> int:
    """Send what is due for the run of a directory; 0."""
    run = RunDir(Path(arguments[0]))
    spec = load_run_file(run.run_file)
    view = PlainView(run, spec.monitor.every_steps)
    notices = Notices(spec.monitor.notify, run, view, SYSTEM_CLOCK)
    looking = AbsenceNotices(spec.monitor.notify, notices, run)
    looking.read()
    looking.look()
    notices.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
