"""The process beside rank 0, `python -m ortflow.workflow.sinks RUN_DIR ATTEMPT`: started by `sinks.process`.

Follows the events of rank 0 until its input ends, which rank 0 holds open; a last line there is the state in which the
attempt ended. Prints warnings, one a line, for rank 0's record and, at once, to the log.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import xxhash

from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.sinks.delivery import Delivery
from ortflow.workflow.sinks.following import Following
from ortflow.workflow.sinks.kinds import maker_of, name_of
from ortflow.workflow.sinks.metrics import metrics_of
from ortflow.workflow.sinks.protocol import Run, State
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.locations import without_secrets
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.system.files import lines_of

PRIVATE: dict[str, Any] = {"backends": True, "monitor": {"notify", "sinks"}, "program": {"env"}, "run_dir": True}
"""Keys of the run file that stay here: addresses, and environments that may contain secrets."""
PERIOD = 0.5
"""Seconds between two readings of the record."""


def main(root: str, attempt: str) -> None:
    """Follow one attempt of a run."""
    os.nice(5)
    run_dir = RunDir(Path(root))
    spec = load_run_file(run_dir.run_file, others=False)
    first = next(iter(lines_of(run_dir.attempts)), b"")
    run = Run(
        name=spec.name,
        identity=xxhash.xxh3_128_hexdigest(first or os.fsencode(root)),
        folder=run_dir.root,
        attempt=int(attempt),
        settings=settings_of(spec),
    )
    record, log = _own_output()

    def warn(message: str) -> None:
        os.write(log, f"warning: {message}\n".encode())
        os.write(record, f"{message}\n".encode())

    deliveries = [Delivery(name_of(section), maker_of(section), run, warn) for section in spec.monitor.sinks]
    following = Following(run_dir.events(0), run.attempt)

    def deliver() -> None:
        for event in following.new():
            if values := metrics_of(event):
                for delivery in deliveries:
                    delivery.write(event.get("step", 0), event["time"], values)

    last = b""
    while True:
        ready = select.select([0], [], [], PERIOD)[0]
        deliver()
        if ready:
            received = os.read(0, 1000)
            if not received:
                break
            last += received
    deliver()
    last_line = last.decode(errors="replace").strip()
    state: State = next((name for name in get_args(State) if name == last_line), "failed")
    ends = [threading.Thread(target=delivery.end, args=(state, spec.monitor.sinks_seconds)) for delivery in deliveries]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    os._exit(0)  # packages wait for their own threads at the interpreter's end, some for ever


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """What services get of a run file."""
    settings: dict[str, Any] = _without_secrets(spec.model_dump(mode="json", exclude_none=True, exclude=PRIVATE))
    return settings


def _without_secrets(value: Any) -> Any:
    """Keys and values without the passwords and signatures of URLs, such as those of sets."""
    if isinstance(value, dict):
        return {key: _without_secrets(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


def _own_output() -> tuple[int, int]:
    """Output and log of this process, while what packages print goes nowhere."""
    output, log = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return output, log


if __name__ == "__main__":
    main(*sys.argv[1:])
