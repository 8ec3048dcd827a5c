"""Comparisons with PyTorch; skipped where it is not installed."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from rotation import rotate

if TYPE_CHECKING:
    from workshop import Workshop

# transformers must neither download files nor wait for the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# PyTorch's warnings about its own internals, which this project cannot change.
OTHERS = (
    r"ignore:.*_check_is_size will be removed:FutureWarning",
    r"ignore:.*legacy TorchScript-based ONNX export:DeprecationWarning",
    r"ignore:.*`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
)


def pytest_collection_finish(session: pytest.Session) -> None:
    """With models this small, threads only wait for each other."""
    if torch := sys.modules.get("torch"):  # imported by the tests that need it
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All tests in this folder compare with PyTorch."""
    for item in items:
        if item.path.parent.name == "torch":
            item.add_marker(pytest.mark.torch)
            for warning in OTHERS:
                item.add_marker(pytest.mark.filterwarnings(warning))
    rotate(config, items)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    from workshop import Workshop

    return Workshop(tmp_path_factory.mktemp("zoo"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The distance of each export from PyTorch: relative to values above 1, absolute below."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    rows = [dict(r.user_properties)["differences"] for r in reports if dict(r.user_properties).get("differences")]
    if rows:
        terminalreporter.section("largest differences to PyTorch")
    for row in sorted(rows, key=lambda row: row["model"]):
        numbers = "  ".join(f"{key} {row[key]:.1e}" for key in ("loss", "norm", "statistics"))
        terminalreporter.write_line(f"{row['model']:32} {numbers}")
