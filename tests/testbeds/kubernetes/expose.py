"""A relay from a port of the machine's 127.0.0.1 into a testbed's network: expose.py TESTBED INSIDE_PORT PORT_FILE.

It listens outside, where the kernel picks a free port, and then enters the testbed with the open socket: a socket stays
in the network it was made in. In the testbed's process namespace it ends with the testbed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

LISTENER = "ORTFLOW_TESTBED_LISTENER"


def enter(testbed: str, port_file: str) -> None:
    """Listen, write the port to its file, and start this program again inside."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.set_inheritable(True)
    Path(port_file).write_text(str(listener.getsockname()[1]))
    os.environ[LISTENER] = str(listener.fileno())
    script = str(Path(__file__).with_name("enter"))
    os.execv(script, [script, "--testbed", testbed, sys.executable, os.path.abspath(__file__), *sys.argv[1:]])


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy everything from one side to the other."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def relay(inside_port: int) -> None:
    """Serve until killed."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inside_reader, inside_writer = await asyncio.open_connection("127.0.0.1", inside_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, inside_writer), pump(inside_reader, writer))

    listener = socket.socket(fileno=int(os.environ[LISTENER]))
    async with await asyncio.start_server(connected, sock=listener) as server:
        await server.serve_forever()


if LISTENER not in os.environ:
    enter(sys.argv[1], sys.argv[3])
asyncio.run(relay(int(sys.argv[2])))
