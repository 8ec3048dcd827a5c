"""ssh: its options, its private folder, and its errors as one sentence."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from messages import mentions, says

from ortflow.launchers.remote.connection import Connection, connect, settings, socket_folder
from ortflow.launchers.remote.failures import explain, no_python
from ortflow.workflow.errors import OrtflowError, UserError

FOLDER = Path("/run/user/7/ortflow-ssh-7")


def test_options_where_nothing_is_set() -> None:
    assert settings({"connecttimeout": "none", "serveraliveinterval": "0"}, FOLDER, attended=False) == [
        "LogLevel=ERROR", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3", "BatchMode=yes",
        "ControlMaster=auto", f"ControlPath={FOLDER}/%C", "ControlPersist=300",
    ]  # fmt: skip


def test_the_users_settings_win() -> None:
    given = {"connecttimeout": "60", "serveraliveinterval": "30", "controlpath": "/x/%C"}
    assert settings(given, FOLDER, attended=True) == ["LogLevel=ERROR"]


@pytest.mark.parametrize("given", [{}, {"stricthostkeychecking": "ask", "connecttimeout": "none"}])
@pytest.mark.parametrize("attended", [True, False])
def test_checks_of_host_keys_are_never_touched(given: dict[str, str], attended: bool) -> None:
    reported = " ".join(settings(given, FOLDER, attended=attended)).lower()
    assert "hostkey" not in reported
    assert "knownhosts" not in reported


def test_the_host_is_never_an_option() -> None:
    command = Connection("user@login").command("true")
    assert command[command.index("--") :] == ["--", "user@login", "true"]
    for host in ("-oProxyCommand=x", "a b", "a\nb", ""):
        with pytest.raises(UserError, match="is not a host"):
            connect(host)


def test_without_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="install OpenSSH"):
        connect("login")


def test_a_connection_that_breaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho begun; exit ${CODE:-255}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OrtflowError, match="login broke"):
        Connection("login").stream("true")
    monkeypatch.setenv("CODE", "75")
    assert Connection("login").stream("true") == 75


def test_the_folder_of_the_sockets_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short = Path(tempfile.mkdtemp(prefix="o", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    folder = short / f"ortflow-ssh-{os.getuid()}"
    try:
        assert socket_folder() == folder
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)
        with pytest.raises(UserError, match="only you can enter"):
            socket_folder()
        folder.rmdir()
        folder.symlink_to(tmp_path)
        with pytest.raises(UserError, match="only you can enter"):
            socket_folder()
        folder.unlink()
    finally:
        short.rmdir()


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("ssh: Could not resolve hostname u: Name or service not known", 2, "there is no host login"),
        ("ssh: connect to host login port 22: Connection refused", 1, "cannot be reached"),
        ("ssh: connect to host login port 22: Connection timed out", 1, "is the network or the VPN up"),
        ("ssh: connect to host login port 22: No route to host", 1, "cannot be reached"),
        ("Connection timed out during banner exchange\nConnection to 1.2.3.4 timed out", 1, "cannot be reached"),
        ("kex_exchange_identification: Connection closed by remote host", 1, "cannot be reached"),
        ("u@login: Permission denied (publickey,password).", 2, "rejects your login (u@login: Permission denied"),
        ("Received disconnect from 1.2.3.4: 2: Too many authentication failures", 2, "rejects your login"),
        ("No ED25519 host key is known for login and you have requested strict checking.\n"
         "Host key verification failed.", 2, "is not known here; connect once"),
        ("@@@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n@@@@@\nHost key verification failed.", 2,
         "another host key than before"),
        ("", 1, "failed: no output"),
    ],
)  # fmt: skip
def test_one_sentence_for_each_failure(words: str, code: int, sentence: str) -> None:
    error = explain("u@login", words)
    assert sentence in str(error)
    assert (error.exit_code, str(error).count("\n")) == (code, 0)


def test_no_python() -> None:
    error = no_python("login", "python3.12", 127, "bash: line 1: python3.12: command not found\n")
    assert says(str(error), "… python3.12 … login … command not found … give")
    assert mentions(str(no_python("login", "true", 3, "")), "Python", "exit code 3")
