"""A stop request that is empty because of a full disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ortflow.launchers.stop import Stop


def test_an_empty_request_does_not_make_a_signal_a_cancel(tmp_path: Path) -> None:
    """The supervisor passes a signal on by the file, which is empty on a full disk."""
    file = tmp_path / ".stop"
    stop = Stop(file)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    file.touch()
    assert stop.settle() == "SIGTERM"
    assert stop.signalled
    assert Stop(file).settle() == "cancel"
    file.write_text('{"reason": "cancel"}')
    assert stop.settle() == "cancel"
