"""What every test may rely on."""

from __future__ import annotations

import signal

# Started in the background or by nohup, a test run ignores these, and so would every process it starts: those that
# are sent a signal on purpose must see it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
