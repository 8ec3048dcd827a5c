"""What all unit tests share."""

from rotation import rotate

pytest_collection_modifyitems = rotate
