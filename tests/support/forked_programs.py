"""Programs of a test, each in a fork of one Python process that has imported what they need.

For tests of dozens of short programs that print and end, where the start of an interpreter is not what is tested.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 60
"""A program that lasts longer is killed."""


class Programs:
    """The process that forks. Use it as a context manager, outside of whose folder and environment the programs run."""

    def __init__(self, *modules: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.communicate()

    def run(self, script: Path, *arguments: str, environment: Mapping[str, str], output: Path) -> str:
        """What a script prints, with its errors; it works in its own folder."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"script": str(script), "arguments": arguments, "environment": dict(environment), "output": str(output)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ended\n"
        return output.read_text()


def _program(job: dict[str, Any]) -> int:
    """Of a forked process: the program's exit code."""
    signal.alarm(SECONDS)
    target = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.chdir(Path(job["script"]).parent)
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = [job["script"], *job["arguments"]]
    code = 0
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _main(modules: list[str]) -> None:
    for module in modules:
        __import__(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_program(json.loads(line)))
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
