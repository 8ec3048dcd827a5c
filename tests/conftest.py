"""For all tests: their costs are recorded, and they must not run on the code of another checkout."""

from __future__ import annotations

import contextlib
import filecmp
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent / "support"))  # where no configuration names it

from costs import pytest_runtest_makereport

__all__ = ["pytest_configure", "pytest_runtest_makereport"]

# Threads of OpenBLAS, which numpy starts when it is imported, spin for 30 ms behind each product. Commands of tests are
# users': they start as many as there are cores, unless the test says otherwise.
if "OPENBLAS_NUM_THREADS" not in os.environ:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401
    del os.environ["OPENBLAS_NUM_THREADS"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ROOMS = {"ortflow": ".", "workflow": "workflow", "launchers": "launchers", "manifests": "manifests"}
"""By folder of the checkout, the folder of the installed package."""

# pytest puts the folder of a conftest on the path: tests/torch would be taken for PyTorch where that is missing.
sys.path[:] = [entry for entry in sys.path if entry != str(HERE)]


def pytest_configure() -> None:
    """Refuse an `ortflow` from elsewhere: another clone's editable installation, or a wheel."""
    # A shell without job control starts what is in the background with SIGINT ignored, and the product leaves it so.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        import ortflow
    except ImportError as error:
        raise pytest.UsageError(str(error)) from error
    place = Path(str(ortflow.__file__)).resolve().parent.parent
    if place != ROOT and ((place / "pyproject.toml").exists() or not _is_copy(place / "ortflow")):
        raise pytest.UsageError(
            f"the tests in {ROOT} would run on ortflow in {place}: install this checkout with `pip install -e .`"
        )


def _is_copy(package: Path) -> bool:
    """Whether an installed package has the modules of this checkout, as on a machine without a registry."""
    modules = ((folder, path) for folder in ROOMS for path in (ROOT / folder).rglob("*.py"))
    return all(
        (copy := package / ROOMS[folder] / path.relative_to(ROOT / folder)).is_file()
        and filecmp.cmp(path, copy, shallow=False)
        for folder, path in modules
    )
