"""A worker process of a rank: makes samples, and writes them into memory that it shares with the rank.

Started by `workers`. It ends when the rank does, however that ends: its input then ends, which a separate thread
notices even while a user's function runs.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortflow.workflow.data.schema import Array

LENGTH_BYTES = 8


def send(stream: IO[bytes], message: object) -> None:
    """Write a message. Raises OSError if the other side has ended."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    rest = memoryview(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    while rest:
        # A write may be partial: where a signal interrupts it, and above 2 GiB (write(2)).
        rest = rest[stream.write(rest) :]


def receive(stream: IO[bytes]) -> Any:
    """Read a message of the rank or of a worker that it started. Raises EOFError if the other side has ended."""
    return pickle.loads(_exactly(stream, int.from_bytes(_exactly(stream, LENGTH_BYTES), "little")))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def main() -> None:
    """Serve until the input ends. Argument: the descriptor of the shared memory."""
    memory = int(sys.argv[1])
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    # What a user's function prints must not get among the replies.
    os.dup2(2, 1)
    # Before the thread starts: it imports what tasks are made of, and an import that meets a change of sys.path may
    # miss modules, because CPython walks the list by index.
    try:
        folder, sys.path[:], recipes = receive(sys.stdin.buffer)
    except EOFError:
        return
    os.chdir(folder)  # relative paths of a user's function are the rank's
    tasks: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, tasks), daemon=True).start()
    sets: dict[int, Any] = {}
    reply: tuple[int, Any, Any]
    while True:
        number, key, epoch, name, indices, offset = tasks.get()
        try:
            if key not in sets:
                sets[key] = pickle.loads(recipes[key]).make()
            samples = sets[key].at(epoch) if hasattr(sets[key], "at") else sets[key]
            if samples.columns[name].variable:
                reply = (number, samples.read_ragged(name, indices), None)
            else:
                _put(memory, samples.read(name, indices), offset)
                reply = (number, None, None)
        except BaseException as error:  # noqa: BLE001 - the rank raises it
            reply = (number, None, _described(error))
        send(replies, reply)


def _put(memory: int, samples: Array, offset: int) -> None:
    rest = memoryview(samples.reshape(-1).view("uint8").data)
    while rest:
        # One call writes at most 2 GiB (write(2)).
        count = os.pwrite(memory, rest, offset)
        rest, offset = rest[count:], offset + count


def _described(error: BaseException) -> tuple[str, str | None, str | None, bool]:
    """What, where, fix, and whether the user's input is the cause."""
    from ortflow.workflow.errors import UserError

    if isinstance(error, UserError):
        return error.what, error.where, error.fix, True
    return "".join(traceback.format_exception(error)).strip(), None, None, False


def _listen(stream: IO[bytes], tasks: SimpleQueue[Any]) -> None:
    try:
        while True:
            tasks.put(receive(stream))
    except EOFError:
        # sys.exit would end this thread alone.
        os._exit(0)
    except BaseException:  # noqa: BLE001 - without this thread, the rank would wait for ever
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
