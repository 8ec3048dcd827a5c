"""A model of a survey in a separate process, so that a crash does not end the survey."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any


def row_of(name: str, command: Sequence[str], environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """The JSON object in the last line of a command's output; `crashed` if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"case": name, "result": "crashed", "why": f"not done after {seconds} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return {"case": name, "result": "crashed", "why": " ".join(done.stderr.splitlines()[-3:])[-400:]}
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def forked_row_of(name: str, function: Callable[[str], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What a function returns in a process that has its imports already; `crashed` if it fails or takes too long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(writer, function, name))
    process.start()
    writer.close()
    try:
        row: dict[str, Any] = (
            reader.recv() if reader.poll(seconds) else {"result": "crashed", "why": f"not done after {seconds} s"}
        )
    except EOFError:
        process.join()
        row = {"result": "crashed", "why": f"exit code {process.exitcode}"}
    process.join(10)
    process.kill()
    process.join()
    return {"case": name} | row


def _send(writer: Connection, function: Callable[[str], dict[str, Any]], name: str) -> None:
    try:
        row = function(name)
    except Exception as error:  # noqa: BLE001 - a traceback is a result, too
        row = {"result": "crashed", "why": f"{type(error).__name__}: {error}"[:600]}
    writer.send(row)
