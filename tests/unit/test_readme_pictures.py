"""The pictures of the README: they load nothing and name no folder of a machine; that of one file is up to date."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest
from browser import CHROMIUM, NO_CHROMIUM, chromium
from documentation import DOCS
from program_files import module_of

PICTURES = DOCS / "pictures"
NAMES = ("report", "terminal", "three-places", "two-kills")


def program(name: str) -> ModuleType:
    return module_of(PICTURES / f"{name}.py")


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_stands_alone(name: str) -> None:
    path = PICTURES / f"{name}.svg"
    text = path.read_text()
    assert f"docs/pictures/{name}.svg" in (DOCS.parent / "README.md").read_text()
    assert len(text) < 200_000
    root = ElementTree.fromstring(text)
    assert root.attrib["role"] == "img"
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert re.findall(r"(?:href|src|url)\s*[=(]", text) == []
    assert "<script" not in text
    assert re.findall(r"/(?:tmp|var|home|root)/", text) == []
    assert r"\x1b" not in text


def test_the_picture_of_one_file_is_up_to_date() -> None:
    assert program("three_places").picture() == (PICTURES / "three-places.svg").read_text(), (
        "run: python docs/pictures/three_places.py"
    )


def test_a_recording_shows_the_end_where_nothing_moves() -> None:
    demo = program("demo")
    spans = {0: [(0.0, None, "$ ortflow demo")], 1: [(0.0, 2.0, "<1>"), (2.0, None, "<2>")], 40: [(3.0, None, "end")]}
    text = demo.recording(spans, [(0.0, 0), (3.0, 15)], 8.0)
    ElementTree.fromstring(text)
    shown = re.findall(r"<text [^>]*>([^<]*)", re.sub(r'<text [^>]*class="hidden[^>]*>[^<]*', "", text))
    assert shown == ["$ ortflow demo", "&lt;2&gt;", "end"]
    assert "translateY(-255px)" in text


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_a_browser_draws_them(tmp_path: Path) -> None:
    with chromium(tmp_path) as browser:
        for name in NAMES:
            browser.open((PICTURES / f"{name}.svg").as_uri())
        assert browser.problems == []
        moving = "document.getAnimations().length"
        browser.open((PICTURES / "terminal.svg").as_uri())
        assert browser.value(moving) > 10
        calm = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        browser.call("Emulation.setEmulatedMedia", features=calm)
        assert browser.value(moving) == 0
