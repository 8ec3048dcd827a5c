"""Settings for every integration test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from project import FEW_CORES
from rotation import rotate

pytest_collection_modifyitems = rotate

# Started in the background or by nohup, a test run ignores these signals, and its child processes inherit that: those
# are sent a signal on purpose must see it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="package", autouse=True)
def few_cores() -> Iterator[None]:
    """Ranks that wait leave the cores to the tests beside them. The chaos tests and CI's main job run without this."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW_CORES.items():
            patch.setenv(name, value)
        yield
