"""`ortflow demo`, from nothing to the report, and the commands that it names at its end."""

from __future__ import annotations

from pathlib import Path

from browser import CHROMIUM, chromium
from project import command


def test_the_demo_and_what_it_recommends(tmp_path: Path) -> None:
    ended = command("demo", folder=tmp_path, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rank 1 was killed by SIGKILL" in ended.stdout
    assert "of all 750 steps are the same bits in both runs" in ended.stdout
    folder = tmp_path / "ortflow-demo"
    assert (folder / "runs/spirals/export/model.onnx").is_file()
    assert "<html" in (folder / "report.html").read_text()
    if CHROMIUM is not None:
        with chromium(tmp_path) as browser:
            browser.open((folder / "report.html").as_uri())
            assert browser.value("document.querySelectorAll('svg[role=img]').length") >= 6
            assert browser.problems == []
    named = [line.split("#")[0].split()[1:] for line in ended.stdout.splitlines() if line.startswith("  ortflow ")]
    assert len(named) == 3
    for arguments in named:
        again = command(*arguments, folder=folder)
        assert again.returncode == 0, again.stdout + again.stderr
    again = command("demo", folder=tmp_path)
    assert again.returncode == 2
    assert "ortflow-demo: is there already; give a new folder" in again.stderr + again.stdout
