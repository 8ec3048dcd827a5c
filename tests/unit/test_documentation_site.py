"""The documentation site: it builds without warnings, loads nothing from a network, and is searched from the disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, NO_CHROMIUM, chromium
from documentation import DOCS

from ortflow.cli.app import VERBS

pytest.importorskip("material", reason="the documentation's packages are not installed (ortflow[docs])")
pytest.importorskip("mmdr", reason="the documentation's packages are not installed (ortflow[docs])")
ROOT = DOCS.parent


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=project, text=True, capture_output=True, check=False, timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a page that has no place in the navigation, and one of the folder of walks."""
    project = tmp_path_factory.mktemp("project")
    for name in ("Dockerfile", "tests"):
        (project / name).symlink_to(ROOT / name)
    shutil.copytree(DOCS, project / "docs")
    shutil.copy(ROOT / "mkdocs.yml", project)
    (project / "docs" / "newcomer.md").write_text("# A newcomer\n")
    (project / "docs" / "walks").mkdir(exist_ok=True)
    (project / "docs" / "walks" / "a-walk.md").write_text("# A walk\n")
    done = build(project, project / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "site"


class Loads(HTMLParser):
    """Addresses that a browser loads by itself, and pictures without a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.silent: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag in ("script", "img", "iframe") and values.get("src"):
            self.addresses.append(values["src"] or "")
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.addresses.append(values["href"] or "")
        if tag == "img" and not values.get("alt"):
            self.silent.append(values.get("src") or "")


def test_every_page_is_there_and_loads_its_own_files_only(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file()
    for page in site.rglob("*.html"):
        loads = Loads(page.read_text())
        assert loads.silent == []
        for address in loads.addresses:
            target = site / address[1:] if address.startswith("/") else page.parent / address
            assert target.is_file(), f"{page.name} loads {address}"
    assert not [path for path in site.rglob("*.py*") if "docs" in path.parts]


def test_references_come_from_the_code(site: Path) -> None:
    commands, api = ((site / f"{name}.html").read_text() for name in ("commands", "api"))
    for name, verb in VERBS.items():
        assert (f'id="ortflow-{name}"' in commands) is not verb.hidden
    for name in ("ortflow.program.start", "ortflow.program.run.Run.steps", "ortflow.export.export_for_training"):
        assert f'id="{name}"' in api
    assert "<svg" in (site / "diagrams" / "architecture-1.svg").read_text()
    assert "mermaid" not in (site / "architecture.html").read_text()
    assert 'blob/main/tests/trainers/linear"' in (site / "trainers.html").read_text()


def test_pages_without_a_place_get_one(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert re.search(r'href="walks/a-walk.html"[^>]*>\s*Walks', home)
    assert "newcomer.html" in (site / "models.html").read_text()


def test_each_broken_link_is_a_warning_and_any_is_an_error(tmp_path: Path) -> None:
    links = {"[x](report.md#no-such)": "no-such", "[x](nowhere.md)": "nowhere.md", "[x](../nope)": "nope"}
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "report.md").write_text("# Reports\n")
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n" + "\n".join(links) + "\n")
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    # Without the generated references, which take most of the time.
    plain = re.sub(r"  - mkdocstrings:\n(?:   .*\n)*", "", text).replace("hooks: [docs/site_pages.py]\n", "")
    (tmp_path / "mkdocs.yml").write_text(plain)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    warnings = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" in line]
    for address in links.values():
        assert any(address in line for line in warnings), done.stdout + done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_the_search_works_from_the_disk_in_a_browser(site: Path, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser:
        browser.look()
        browser.open((site / "tutorials" / "only-onnx.html").as_uri())
        browser.value("document.querySelector('input[name=query]').focus()")
        for key in "goodput":
            browser.press(key)
        results = browser.wait_for(
            "[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href).join()"
        )
        assert "/report.html?h=goodput" in results
        browser.open((site / "architecture.html").as_uri())
        assert browser.value("[...document.images].every(one => one.complete && one.naturalWidth > 0)")
        assert browser.problems == []
        assert [one for one in browser.requests if not one.startswith(("file:", "data:"))] == []
