"""Sends one message as an e-mail. Called by `ortflow.launchers.supervision.notice_sender`, in a process of its own.

An error names the server and the code of its answer, not the answer's text, which may repeat what was sent.
"""

from __future__ import annotations

import os
import smtplib
import ssl
import time
from collections.abc import Mapping
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from pathlib import Path
from typing import Any

from ortflow.launchers.supervision.unsent import PAUSE, TRY, NotSent


def send_mail(mail: Mapping[str, Any], message: Mapping[str, Any], seconds: float) -> None:
    """Send the message, again while the server is not reached or busy and time is left. Raises NotSent."""
    password = None if mail["user"] is None else _password(mail)
    letter = composed(mail, message)
    end = time.monotonic() + seconds
    while True:
        try:
            _send(mail, password, letter, min(TRY, end - time.monotonic()))
            return
        except (smtplib.SMTPException, OSError) as error:
            if time.monotonic() + PAUSE >= end or not _passes(error):
                raise NotSent(f"the mail server {mail['host']}:{mail['port']} {_reason(error)}") from None
        time.sleep(PAUSE)


def composed(mail: Mapping[str, Any], message: Mapping[str, Any]) -> EmailMessage:
    """The e-mail: the event and the run in its subject, and every field in its text. Pure, except for date and id."""
    letter = EmailMessage()
    letter["From"] = mail["sender"]
    letter["To"] = ", ".join(mail["to"])
    # A name of a run may contain line ends, which headers must not.
    letter["Subject"] = " ".join(f"ortflow: {message['run']}: {message['event'].replace('_', ' ')}".split())
    letter["Date"] = formatdate()
    letter["Message-ID"] = make_msgid(domain=mail["sender"].rpartition("@")[2])
    letter["Auto-Submitted"] = "auto-generated"
    fields = "\n".join(f"{name}: {value}" for name, value in message.items() if name != "text")
    letter.set_content(f"{message['text']}\n\n{fields}\n")
    return letter


def _password(mail: Mapping[str, Any]) -> str:
    variable, file = mail["password_variable"], mail["password_file"]
    if variable is not None:
        if variable not in os.environ:
            raise NotSent(f"the environment variable {variable} is not set")
        return os.environ[variable]
    try:
        return Path(file).expanduser().read_text().rstrip("\n")
    except (OSError, ValueError, RuntimeError) as error:
        raise NotSent(f"{file}: {getattr(error, 'strerror', None) or 'cannot be read as text'}") from None


def _send(mail: Mapping[str, Any], password: str | None, letter: EmailMessage, seconds: float) -> None:
    seconds = max(0.1, seconds)
    security = mail["security"]
    # Checks the server's certificate and name; SSL_CERT_FILE names further authorities.
    context = ssl.create_default_context()
    if security == "tls":
        server: smtplib.SMTP = smtplib.SMTP_SSL(mail["host"], mail["port"], timeout=seconds, context=context)
    else:
        server = smtplib.SMTP(mail["host"], mail["port"], timeout=seconds)
    with server:
        if security == "starttls":
            server.starttls(context=context)
        if password is not None:
            server.login(mail["user"], password)
        refused = server.send_message(letter)
    if refused:
        # The others have it: another try would send it to them again.
        reason = _reason(smtplib.SMTPRecipientsRefused(refused))
        raise NotSent(f"the mail server {mail['host']}:{mail['port']} {reason}")


def _passes(error: Exception) -> bool:
    """Whether another try may succeed: nothing was answered, or with a code of SMTP that asks to come back."""
    # Some servers close the connection after a wrong password: trying on would lock the account.
    if isinstance(error, ssl.SSLError | smtplib.SMTPNotSupportedError | smtplib.SMTPServerDisconnected):
        return False
    code = _code(error)
    return code is None or code < 500


def _code(error: Exception) -> int | None:
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return max(code for code, _ in error.recipients.values())
    code = getattr(error, "smtp_code", None)
    return code if isinstance(code, int) and code > 0 else None


def _reason(error: Exception) -> str:
    code = _code(error)
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return f"refused the login ({code})"
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return f"refused {', '.join(error.recipients)} ({code})"
    if isinstance(error, smtplib.SMTPSenderRefused):
        return f"refused the sender {error.sender} ({code})"
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return "offers no STARTTLS or no login: see monitor.notify.mail.security"
    if code is not None:
        return f"answered {code}"
    if isinstance(error, ssl.SSLError):
        return f"has no valid certificate: {getattr(error, 'verify_message', '') or error.reason}"
    # smtplib names a timeout only in the text of this exception.
    if isinstance(error, smtplib.SMTPServerDisconnected) and "timed out" not in str(error):
        return "closed the connection"
    if isinstance(error, smtplib.SMTPServerDisconnected | TimeoutError):
        return "did not answer in time"
    return f"failed: {getattr(error, 'strerror', None) or type(error).__name__}"
