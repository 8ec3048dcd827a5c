"""What all unit tests share."""

import one_thread
from rotation import rotate

__all__ = ["one_thread", "pytest_collection_modifyitems"]

pytest_collection_modifyitems = rotate
