"""The supervisor in the background: `python -m ortflow.launchers.detached RUN_DIR LOCK`.

Started by the local launcher's `submit`, which passes the lock as an inherited descriptor. Standard output is
RUN_DIR/logs/supervisor.log.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ortflow.launchers.attempts.locks import sign
from ortflow.launchers.base import Submission
from ortflow.launchers.local import LocalLauncher
from ortflow.launchers.records import pending_changes
from ortflow.launchers.start_folder import go_back
from ortflow.launchers.starting import supervise
from ortflow.launchers.supervision.moved_directory import DirectoryMoved
from ortflow.launchers.view.plain import PlainView
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.system.streams import guard_log


def main(arguments: list[str]) -> int:
    """Supervise the run of a directory; returns ortflow's exit code."""
    guard_log()
    go_back()
    run = RunDir(Path(arguments[0]))
    sign(int(arguments[1]))
    spec = load_run_file(run.run_file)
    request = LocalLauncher().request(Submission(spec, run))
    view = PlainView(run, spec.monitor.every_steps)
    for note in pending_changes(run.read_attempts()):
        view.message(note)
    try:
        return supervise(request, view)
    except DirectoryMoved as error:
        print(f"error: {error}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
