"""Of the random trials a part runs with ORTFLOW_CASES, which depends on the tree in .ci/run."""

from rotation import rotate

__all__ = ["pytest_collection_modifyitems"]

pytest_collection_modifyitems = rotate
