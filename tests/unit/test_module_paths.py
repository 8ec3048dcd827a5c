"""Modules that programs outside the package name: type checks read the package alone, and ruff resolves no import."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from program_files import module_of

ROOT = Path(__file__).resolve().parents[2]


def imported_modules(source: str) -> set[str]:
    """Modules of ortflow in `from MODULE import …`, wherever it stands."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and not node.level]
    return {node.module for node in nodes if node.module and node.module.partition(".")[0] == "ortflow"}


def file_of(module: str) -> Path:
    """The file or folder of a module: workflow/, launchers/ and manifests/ stand beside ortflow/."""
    words = module.split(".")
    words = words[1:] if words[1:2] in (["workflow"], ["launchers"], ["manifests"]) else words
    folder = ROOT.joinpath(*words)
    return folder if folder.is_dir() else folder.with_suffix(".py")


def test_every_import_names_a_module_that_exists() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not in a Git checkout")
    files = [ROOT / name for name in listed.stdout.split()]
    assert len(files) > 1000
    missing = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in files
        if file.exists()
        for module in sorted(imported_modules(file.read_text()))
        if not file_of(module).exists()
    ]
    assert missing == []


def test_every_planted_fault_fits_its_file() -> None:
    faults = module_of(ROOT / "tools/planted_faults/faults.py").FAULTS
    outdated = [
        f"{fault.file}: {fault.before}"
        for fault in faults
        if not (ROOT / fault.file).exists() or (ROOT / fault.file).read_text().count(fault.before) != 1
    ]
    assert outdated == []
