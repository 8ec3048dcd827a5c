"""The login node: finds what is there, copies what is missing, and runs ortflow there as if typed there."""

from __future__ import annotations

import errno
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ortflow.launchers.remote.bootstrap import MARK
from ortflow.launchers.remote.code import Code, Requirement
from ortflow.launchers.remote.command_lines import OLDEST, TOO_OLD, python_line
from ortflow.launchers.remote.connection import ANSWERS, Answer, Connection
from ortflow.launchers.remote.failures import no_python
from ortflow.workflow.errors import OrtflowError, UserError

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BEGIN = """\
import base64, json, os, runpy, sys
wish = json.loads(base64.urlsafe_b64decode(sys.argv[2]))
code = os.path.abspath(os.path.expanduser(wish["code"]))
sys.path.insert(0, code)
from ortflow.launchers.remote.arrival import settle
settle(code, wish)
sys.argv[1:] = wish["arguments"]
runpy.run_module("ortflow", run_name="__main__", alter_sys=True)
"""
"""Runs the copied code, before any other installation."""


@dataclass(frozen=True)
class RemoteState:
    """What exists there."""

    lacking: list[str]
    """Names of packages."""
    folders_complete: list[bool]
    """For each requested folder, whether it is there with all its files."""
    paths_exist: list[bool]
    """For each requested path, whether it is there."""


@dataclass(frozen=True)
class Login:
    """A login node, a Python there, and the folder for ortflow's files."""

    connection: Connection
    python: str
    folder: str
    """Absolute, or from `~/`."""

    @property
    def host(self) -> str:
        """As the user named it."""
        return self.connection.host

    def probe(
        self,
        packages: Sequence[Requirement] = (),
        folders: Sequence[tuple[str, Mapping[str, int]]] = (),
        paths: Sequence[str] = (),
    ) -> RemoteState:
        """Query all of it in one call. Raises UserError if there is no Python, or only an old one."""
        wish = {
            "do": "ask",
            "packages": [(package.name, package.low, package.high) for package in packages],
            "folders": [(folder, dict(files)) for folder, files in folders],
            "paths": list(paths),
        }
        answer = self._ask(wish)
        return RemoteState(answer["lacking"], answer["whole"], answer["there"])

    def require(self, packages: Sequence[Requirement], lacking: Sequence[str]) -> None:
        """Raise UserError if packages are missing there."""
        if not lacking:
            return
        texts = [package.text for package in packages if package.name in lacking]
        raise UserError(
            f"{self.python} on {self.host} lacks {', '.join(lacking)}",
            fix=f"run there: {self.python} -m pip install {shlex.join(texts)}; or give another with --host-python",
        )

    def take(
        self, folder: str, sizes: Mapping[str, int], write: Callable[[IO[bytes]], object], *, into: bool = False
    ) -> None:
        """Copy files there: the whole folder or nothing; `into`: into an existing one, file by file."""
        self._ask({"do": "take", "folder": folder, "files": dict(sizes), "into": into}, write)

    def bring_code(self, code: Code) -> None:
        """Copy the code there."""
        archive = code.archive()
        self.take(self.code_folder(code), code.sizes, lambda pipe: pipe.write(archive))

    def code_folder(self, code: Code) -> str:
        """Its folder there: beside the runs, because all machines that see the runs must see it."""
        return f"{self.folder}/code/{code.hash}"

    def input_folder(self, name: str) -> str:
        """The folder of the inputs of a name there."""
        return f"{self.folder}/inputs/{name}"

    def run(self, code: Code, arguments: Sequence[str]) -> int:
        """Run `ortflow ARGUMENTS` there, with its output here; returns the exit code."""
        wish = {
            "code": self.code_folder(code), "folder": self.folder, "host": self.host, "arguments": list(arguments),
        }  # fmt: skip
        return self.connection.stream(python_line(self.python, _BEGIN, wish))

    def _ask(self, wish: Mapping[str, Any], write: Callable[[IO[bytes]], object] = lambda pipe: None) -> dict[str, Any]:
        def feed(pipe: IO[bytes]) -> None:
            pipe.write(json.dumps(wish).encode() + b"\n")
            write(pipe)

        seconds = ANSWERS if wish["do"] == "ask" else None
        line = python_line(self.python, BOOTSTRAP.read_text(encoding="utf-8"))
        return self._read(self.connection.call(line, feed, seconds))

    def _read(self, answer: Answer) -> dict[str, Any]:
        *_, last = ["", *answer.out.decode(errors="replace").split(MARK)]
        if TOO_OLD in answer.err:
            version = answer.err.split(TOO_OLD)[1].split()[0]
            raise UserError(
                f"{self.python} on {self.host} is Python {version}, and ortflow needs {'.'.join(map(str, OLDEST))}",
                fix="give a newer one with --host-python, or resources.python in the run file",
            )
        try:
            reply: dict[str, Any] = json.loads(last)
        except (ValueError, RecursionError):
            raise no_python(self.host, self.python, answer.code, answer.err) from None
        if "error" in reply:
            place = f"{reply['file']} on {self.host}" if reply.get("file") else self.host
            if reply.get("errno") in _FULL:
                raise OrtflowError(
                    f"there is no room left for {place}; make some, or give another folder with --host-dir"
                )
            raise OrtflowError(f"{place}: {reply['error']}; --host-dir names another folder")
        return reply
