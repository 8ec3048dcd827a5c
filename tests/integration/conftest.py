"""Settings for every integration test."""

from __future__ import annotations

import signal

from rotation import rotate

pytest_collection_modifyitems = rotate

# Started in the background or by nohup, a test run ignores these signals, and its child processes inherit that: those
# are sent a signal on purpose must see it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
