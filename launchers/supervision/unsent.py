"""What the senders of messages have in common (`notice_sender`, `notice_mail`)."""

from __future__ import annotations

TRY = 4.0
"""Seconds of one try to send a message."""
PAUSE = 1.0
"""Seconds between two tries."""


class NotSent(Exception):
    """The message was not sent; says why."""
