"""Tests of this checkout must not run on the code of another one."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    """Refuse an `ortflow` from elsewhere: another clone's editable installation, or a wheel."""
    try:
        import ortflow
    except ImportError as error:
        raise pytest.UsageError(str(error)) from error
    place = Path(str(ortflow.__file__)).resolve().parent.parent
    if place != ROOT:
        raise pytest.UsageError(
            f"the tests in {ROOT} would run on ortflow in {place}: install this checkout with `pip install -e .`"
        )
