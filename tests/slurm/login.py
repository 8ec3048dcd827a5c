"""A login node for the tests: a separate sshd on this machine, with a home folder without ortflow.

Its account has a virtual environment with ortflow's dependencies and, as a trap, another version of ortflow.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ortflow.launchers.remote.code import own_code

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
HOST = "login"
TRAP = "raise ImportError('this is the ortflow that is installed here, and not the one that came along')\n"


def missing() -> str | None:
    """Why no login node can be started; None if it can."""
    lacking = [name for name in ("sshd", "ssh", "ssh-keygen") if not (SSHD if name == "sshd" else shutil.which(name))]
    return f"no OpenSSH server and client here: {', '.join(lacking)}" if lacking else None


@dataclass(frozen=True)
class Login:
    """A running login node, and the laptop's side of the connection."""

    folder: Path
    port: int
    runtime: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        """The account's home folder there."""
        return self.folder / "home"

    @property
    def python(self) -> Path:
        """The Python of the account's environment."""
        return self.home / "venv/bin/python"

    @property
    def laptop(self) -> Path:
        """The laptop's own files: its ssh settings, its key, its home."""
        return self.folder / "laptop"

    @property
    def installed(self) -> Path:
        """The laptop's ortflow in a wheel's layout, unaffected by edits to the tree during the tests."""
        return self.laptop / "installed"

    @property
    def config(self) -> Path:
        """The ssh settings for this login node."""
        return self.laptop / "config"

    @classmethod
    def start(cls, folder: Path, environment: dict[str, str]) -> Login:
        """Start a login node; `environment` is what the site sets for every login."""
        # A socket's path has to be short.
        login = cls(folder, _free_port(), Path(tempfile.mkdtemp(prefix="laptop-")))
        for path in (login.home, login.laptop):
            path.mkdir(parents=True)
        _environment(login.home / "venv")
        with tarfile.open(fileobj=io.BytesIO(own_code().archive())) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # none before CPython 3.11.4
            archive.extractall(login.installed)
        for name in ("host", "laptop/key", "laptop/stranger"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=30
            )
        shutil.copy(folder / "laptop/key.pub", folder / "authorized")
        settings = " ".join(f'"{name}={value}"' for name, value in {**environment, "HOME": str(login.home)}.items())
        (folder / "sshd_config").write_text(
            f"Port {login.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile {folder}/sshd.pid\n"
            f"AuthorizedKeysFile {folder}/authorized\nUsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nPrintMotd no\nSetEnv {settings}\n"
        )
        key = (folder / "host.pub").read_text()
        (login.laptop / "known").write_text(f"[127.0.0.1]:{login.port} {key}")
        login.write_config(login.config)
        # sshd requires its folder for privilege separation.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        process = subprocess.Popen(
            [str(SSHD), "-D", "-E", str(folder / "sshd.log"), "-f", str(folder / "sshd_config")],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        login = replace(login, process=process)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", login.port)) == 0:
                    return login
            assert process.poll() is None, (folder / "sshd.log").read_text()
            time.sleep(0.05)
        raise AssertionError("sshd does not listen")

    def write_config(self, file: Path, **changes: str) -> Path:
        """The ssh settings, with `changes`."""
        options = {
            "HostName": "127.0.0.1", "Port": str(self.port), "User": "root", "IdentityFile": str(self.laptop / "key"),
            "IdentitiesOnly": "yes", "IdentityAgent": "none", "UserKnownHostsFile": str(self.laptop / "known"),
            "GlobalKnownHostsFile": "/dev/null", **changes,
        }  # fmt: skip
        file.write_text("\n".join([f"Host {HOST}", *(f"  {name} {value}" for name, value in options.items())]) + "\n")
        return file

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a command on the laptop, which has no Slurm."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ORTFLOW_", "PMI", "OMPI_", "SLURM_", "SBATCH_", "MPI", "XDG_"))
        }
        own = {
            "HOME": str(self.laptop), "XDG_RUNTIME_DIR": str(self.runtime),
            "ORTFLOW_SSH_CONFIG": str(self.config), "PYTHONPATH": str(self.installed),
            "SLURM_CONF": "/nowhere", "PYTHONWARNINGS": "default",
        }  # fmt: skip
        return {**kept, **own}

    def hang_up(self) -> None:
        """End the laptop's connection."""
        for path in self.runtime.glob("ortflow-ssh-*/*"):
            command = ["ssh", "-F", str(self.config), "-o", f"ControlPath={path}", "-O", "exit", HOST]
            subprocess.run(command, capture_output=True, timeout=120, check=False)

    def stop(self) -> None:
        """Remove the login node, connections included."""
        self.hang_up()
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        shutil.rmtree(self.runtime)


def _environment(folder: Path) -> None:
    """An environment with the dependencies of the one that runs the tests, its MPI, and the trap."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    (site / "dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    (site / "ortflow").mkdir()
    (site / "ortflow/__init__.py").write_text(TRAP)
    for library in (Path(sys.prefix) / "lib").iterdir():
        if not library.name.startswith("python"):
            (folder / "lib" / library.name).symlink_to(library)


def _free_port() -> int:
    for port in range(23100, 23900):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
