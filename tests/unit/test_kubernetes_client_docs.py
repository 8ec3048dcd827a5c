"""docs/kubernetes.md is up to date: its example is a valid run, its symptoms are messages of the program."""

from __future__ import annotations

import re
from pathlib import Path

from ortflow.cli.submission import submission_of
from ortflow.launchers.kubernetes.launcher import KubernetesLauncher

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def test_the_example_is_a_run(tmp_path: Path) -> None:
    file = ROOT / "examples" / "gpt" / "kubernetes.yaml"
    assert f"{file.relative_to(ROOT)} backends.kubernetes.image" in PAGE
    text = str(
        KubernetesLauncher().request(submission_of(file, ["backends.kubernetes.image=x"], tmp_path, elsewhere=True))
    )
    assert text.count("\nkind: ") == 3


def test_what_sentences_cite_is_there() -> None:
    """Pages of the docs and their sections exist."""
    cited: set[tuple[str, str]] = set()
    for room in ("launchers", "manifests", "ortflow", "workflow"):
        for path in (ROOT / room).rglob("*.py"):
            cited |= set(re.findall(r"\b(docs/[a-z-]+\.md)(?:, '([^']+)')?", path.read_text()))
    assert ("docs/kubernetes.md", "From an empty cluster") in cited
    for page, section in cited:
        headings = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("#")]
        assert any(section in heading for heading in headings), f"{page}: there is no section {section!r}"


def test_symptoms_are_messages_of_the_program() -> None:
    folders = (ROOT / "launchers", ROOT / "manifests" / "kubernetes")
    source = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    rows = [line for line in PAGE.partition("| symptom")[2].splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    for row in rows:
        for symptom in re.findall(r"`([^`]*)`", row.split(" | ")[0]):
            pieces = [piece.strip(' :"`') for piece in re.split(r"…|\b[n]?\d+\b(?:/\d+)?|uid 1000", symptom)]
            longest = max(pieces, key=len)
            assert longest in source, f"{symptom!r}: no message contains {longest!r}"
