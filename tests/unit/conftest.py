"""What all unit tests share."""

from collections.abc import Iterator

import one_thread
import pytest
from rotation import rotate

__all__ = ["one_thread", "pytest_collection_modifyitems"]

pytest_collection_modifyitems = rotate


@pytest.fixture(scope="package", autouse=True)
def one_thread_of_openblas() -> Iterator[None]:
    """In what the tests start, as in their own process (`tests/conftest.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        yield
