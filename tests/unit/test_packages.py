"""A wheel contains everything in the folders."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = (".py", ".c", ".h", ".cu", ".typed")


def test_no_package_and_no_source_is_left_out_of_wheels() -> None:
    """An editable install would find them anyway."""
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages, data = set(settings["packages"]), settings["package-data"]
    missing = []
    for name, folder in settings["package-dir"].items():
        for path in (ROOT / folder).rglob("*"):
            package = ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
            patterns = ["*.py", *data.get(package, [])]
            if path.suffix in CODE and not (package in packages and any(map(path.match, patterns))):
                missing.append(str(path.relative_to(ROOT)))
    assert not missing


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by name: with PyTorch installed, a duplicate would stop all tests."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
