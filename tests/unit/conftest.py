"""What all unit tests share."""

from rotation import rotate
from started_processes import pytest_runtest_makereport

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_makereport"]

pytest_collection_modifyitems = rotate
