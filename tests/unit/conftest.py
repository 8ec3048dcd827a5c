"""What all unit tests share."""

from rotation import rotate

__all__ = ["pytest_collection_modifyitems"]

pytest_collection_modifyitems = rotate
