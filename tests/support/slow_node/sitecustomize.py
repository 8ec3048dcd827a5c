"""Makes the ranks of one node slow, as a throttled processor does: Python imports this at its start if the folder is on
PYTHONPATH.

SLOW_NODE: the name of a node, by ORTFLOW_NODE (of pods), ORTFLOW_NODE_NAMES or the host name. From the import of the
preflight on, its ranks run for a twelfth of the time: a process beside each stops and continues it.
"""

import contextlib
import os
import signal
import socket
import sys
import time

RANKS = {"ortflow.workflow.rank", "node_report.py"}
RUNS, STANDS = 0.004, 0.044


def throttle(process: int) -> None:
    if os.fork():
        return
    with contextlib.suppress(OSError):  # on a busy machine it would let the rank run for longer
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    while True:
        try:
            os.kill(process, signal.SIGSTOP)
            time.sleep(STANDS)
            os.kill(process, signal.SIGCONT)
        except ProcessLookupError:
            os._exit(0)
        time.sleep(RUNS)


def on_the_node(node: str) -> bool:
    if (name := os.environ.get("ORTFLOW_NODE")) is not None:
        return name == node
    names = os.environ.get("ORTFLOW_NODE_NAMES")
    if not names:
        return socket.gethostname() == node
    rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0")
    size = int(os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or "1")
    every = names.split(",")
    return every[rank * len(every) // size] == node


if (
    "SLOW_NODE" in os.environ
    and RANKS & {*map(os.path.basename, sys.orig_argv)}
    and on_the_node(os.environ["SLOW_NODE"])
):
    THROTTLED: list[int] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "import" and arguments[0] == "ortflow.workflow.preflight.measure" and not THROTTLED:
            THROTTLED.append(os.getpid())
            throttle(os.getpid())

    sys.addaudithook(watch)
