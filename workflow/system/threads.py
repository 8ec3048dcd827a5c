"""Work beside the main thread, on a machine that may have no thread to spare.

A user's limit of processes (`ulimit -u`), or a container's of process ids, counts threads too, and other programs use
it up at any time. Work that only need not delay the caller is then done by the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def start_or_call(name: str, work: Callable[[], object]) -> threading.Thread | None:
    """Start a daemon thread that calls `work`. If none can be started, call it here, and return None."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        work()
        return None
    return thread


def map_in_threads(work: Callable[[A], B], items: Iterable[A], most: int) -> list[B]:
    """The results for all items, computed by at most `most` threads; by this one if none can be started.

    `work` may then be called twice for an item.
    """
    items = list(items)
    with ThreadPoolExecutor(most) as pool:
        try:
            results = pool.map(work, items)
        except RuntimeError:
            pool.shutdown(cancel_futures=True)
            return [work(item) for item in items]
        return list(results)
