"""`monitor.notify.mail`: a real mail server with STARTTLS and logins; servers that refuse, hang or are absent."""

from __future__ import annotations

import errno
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from views import Lines
from waits import PATIENCE

from ortflow.launchers.supervision import notices as module
from ortflow.launchers.supervision.notice_mail import composed
from ortflow.launchers.supervision.notices import Notices
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.notify import EMail, Notify

pytest.importorskip("aiosmtpd", reason="aiosmtpd is not installed")
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

SECRET = "hunter2"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl, which makes a certificate")


class Post:
    """Keeps what it gets; refuses mails for `refused@…`, and once those for `busy@…`."""

    def __init__(self) -> None:
        self.letters: list[EmailMessage] = []
        self.receivers: list[list[str]] = []
        self.busy = 1

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:  # noqa: N802
        if address.startswith("refused@"):
            return "550 no such user"
        if address.startswith("busy@") and self.busy:
            self.busy -= 1
            return "451 later"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        self.letters.append(message_from_bytes(envelope.content, policy=policy.default))
        self.receivers.append(envelope.rcpt_tos)
        return "250 OK"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serving(post: Post, **options: Any) -> Controller:
    for left in reversed(range(3)):
        server = Controller(
            post, hostname="127.0.0.1", port=free_port(), server_hostname="localhost", ready_timeout=PATIENCE, **options
        )
        try:
            server.start()
            break
        except OSError as error:  # another process has taken the port
            if error.errno != errno.EADDRINUSE or not left:
                raise
    return server


@pytest.fixture
def plain() -> Iterator[tuple[Post, int]]:
    post = Post()
    server = serving(post)
    yield post, server.port
    server.stop()


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Post, int]]:
    """With STARTTLS and a login, as mail servers of a site have it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def login(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        return AuthResult(success=data.login == b"me" and data.password == SECRET.encode(), handled=False)

    post = Post()
    server = serving(post, tls_context=context, require_starttls=True, auth_required=True, authenticator=login)
    yield post, server.port
    server.stop()


def mail(port: int, **changes: Any) -> EMail:
    values = {"host": "127.0.0.1", "port": port, "sender": "ortflow@example.org", "to": ["me@example.org"], **changes}
    return EMail.model_validate(values)


def sent(folder: Path, *mails: EMail) -> list[str]:
    """Send a message through each; the warnings."""
    view = Lines()
    notices = Notices([Notify(on=["failed"], mail=one) for one in mails], RunDir(folder / "run"), view, time)
    notices.send("failed", "the budget of 3 failures is spent\nsecond line", step=7)
    notices.close()
    return view.said


@needs_openssl
def test_a_mail_over_starttls_with_a_login(
    tmp_path: Path, encrypted: tuple[Post, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    post, port = encrypted
    monkeypatch.setenv("SMTP_PASSWORD", SECRET)
    (tmp_path / "password").write_text(f"{SECRET}\n")
    assert (
        sent(tmp_path, mail(port, user="me", password_variable="SMTP_PASSWORD", to=["me@example.org", "you@x.y"])) == []
    )
    assert sent(tmp_path, mail(port, user="me", password_file=str(tmp_path / "password"))) == []
    first, second = post.letters
    assert first["Subject"] == second["Subject"] == "ortflow: run: failed"
    assert first["From"] == "ortflow@example.org"
    assert post.receivers[0] == ["me@example.org", "you@x.y"]
    content = first.get_content().replace("\r\n", "\n")
    assert content.startswith("the budget of 3 failures is spent\nsecond line\n\nrun: run\n")
    assert "step: 7" in content
    assert SECRET not in first.as_string()


@needs_openssl
def test_what_a_server_refuses_is_one_warning_without_secrets(
    tmp_path: Path, encrypted: tuple[Post, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    post, port = encrypted
    monkeypatch.setenv("WRONG", f"{SECRET}-wrong")
    monkeypatch.setenv("RIGHT", SECRET)
    said = "\n".join(
        sent(
            tmp_path,
            mail(port, user="me", password_variable="WRONG"),
            mail(port, user="me", password_variable="NOT_SET"),
            mail(port, user="me", password_file=str(tmp_path / "nothing")),
            mail(port, user="me", password_variable="RIGHT", to=["refused@example.org"]),
            mail(port, security="none"),
        )
    )
    assert post.letters == []
    for place, expected in enumerate(
        ["refused the login (535)", "NOT_SET is not set", "No such file", "refused refused@example.org (550)", "530"]
    ):
        line = next(line for line in said.splitlines() if f"monitor.notify[{place}]" in line)
        assert expected in line
    assert SECRET not in said
    monkeypatch.delenv("SSL_CERT_FILE")
    (warning,) = sent(tmp_path, mail(port, user="me", password_variable="RIGHT"))
    assert "certificate" in warning


def test_a_server_without_encryption_gets_no_mail_unless_asked(tmp_path: Path, plain: tuple[Post, int]) -> None:
    post, port = plain
    (warning,) = sent(tmp_path, mail(port))
    assert "offers no STARTTLS" in warning
    assert post.letters == []
    assert sent(tmp_path, mail(port, security="none", to=["busy@example.org"])) == []
    assert len(post.letters) == 1  # at the second try


def test_a_server_that_hangs_or_is_absent_costs_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 1.5)
    monkeypatch.setattr(module, "START", PATIENCE)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as absent:
        absent.bind(("127.0.0.1", 0))  # nobody else can listen there, and it does not
        begun = time.monotonic()
        said = sent(tmp_path, mail(silent.getsockname()[1]), mail(absent.getsockname()[1]))
        assert time.monotonic() - begun < PATIENCE
    assert "did not answer in time" in said[0]
    assert "Connection refused" in said[1]


def test_a_receiver_who_is_refused_is_named_and_the_others_get_one_mail(
    tmp_path: Path, plain: tuple[Post, int]
) -> None:
    post, port = plain
    for other in ("refused@example.org", "busy@example.org"):
        (warning,) = sent(tmp_path, mail(port, security="none", to=["me@example.org", other]))
        assert f"refused {other}" in warning
    assert post.receivers == [["me@example.org"]] * 2


def test_a_name_with_line_ends_adds_no_header() -> None:
    message = {"run": "x\nBcc: all@example.org", "event": "budget_low", "text": "ä"}
    letter = composed(mail(25).model_dump(), message)
    assert letter["Subject"] == "ortflow: x Bcc: all@example.org: budget low"
    assert letter["Bcc"] is None
