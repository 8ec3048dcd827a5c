"""A request to stop that a full disk left empty."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ortflow.launchers.stop import Stop


def test_an_empty_request_does_not_make_a_signal_a_cancel(tmp_path: Path) -> None:
    """The supervisor passes a signal on by the file, of which a full disk leaves nothing."""
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
