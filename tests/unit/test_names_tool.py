"""tools/names.py: which names count as vague, and that ceilings only fall."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import names  # noqa: E402


def test_assigned_names_and_parameters_count() -> None:
    source = (
        "def save(folder, *, kept_, each=None):\n    found = _made = folder.left\n"
        "    for step in found:\n        mine.taken = step\n    return [what for what in found]\n"
    )
    bound = list(names.bindings(source))
    assert sorted((one.name, one.line) for one in bound if one.vague) == [
        ("_made", 2), ("each", 1), ("found", 2), ("kept_", 1), ("what", 5),
    ]  # fmt: skip
    assert sorted(one.name for one in bound if not one.vague) == ["folder", "step"]


def test_a_ceiling_only_falls() -> None:
    before = {"a": 4.0, "b": 4.0, "gone": 1.0}
    assert names.lowered(before, {"a": 5.2, "b": 1.1, "new": 0.2}) == {"a": 4.0, "b": 1.5, "new": 1.0}


def test_a_room_above_its_ceiling_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "workflow/comm").mkdir(parents=True)
    (tmp_path / "workflow/comm/a.py").write_text("found = 1\nmessage = 2\n")
    ceilings = tmp_path / "names.json"
    monkeypatch.setattr(names, "ROOT", tmp_path)
    monkeypatch.setattr(names, "PACKAGES", ("workflow",))
    monkeypatch.setattr(names, "CEILINGS", ceilings)
    for highest, code in ((50.0, 0), (49.5, 1)):
        ceilings.write_text(json.dumps({"workflow/comm": highest}))
        monkeypatch.setattr(sys, "argv", ["names.py"])
        assert names.main() == code
    assert "workflow/comm                 50.0%  at most 49.5%  above" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["names.py", str(tmp_path / "workflow")])
    assert names.main() == 0
    assert capsys.readouterr().out.endswith("a.py:1: found\n")
