"""A signal that reaches a forked child in its first moments ends it."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import os, signal, time
from ortflow.program.stop_signals import StopSignals

signals = StopSignals(lambda name: None)
signals.install()

def in_child():
    signals.remove_in_child()
    signals.release()

os.register_at_fork(before=signals.hold, after_in_parent=signals.release, after_in_child=in_child)
for _ in range(100):
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_children_are_ended_as_soon_as_they_are_there() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)
