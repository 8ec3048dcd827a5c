"""`ortflow report`: the page, for hostile names too, its numbers and its server; in a browser where there is one."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler
from typing import cast

import pytest
from browser import CHROMIUM, NO_CHROMIUM, Browser, chromium
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import write_run
from typer.testing import CliRunner
from waits import PATIENCE, wait_until

from ortflow.cli.app import command_line
from ortflow.launchers.report.curves import reduced, sparkline, ticks
from ortflow.launchers.report.parallel_coordinates import parallel_coordinates
from ortflow.launchers.report.server import IDLE_LIMIT, server
from ortflow.launchers.report.style import CSS
from ortflow.launchers.report.svg import coarse
from ortflow.launchers.report.timeline import Segment
from ortflow.launchers.sweeps import Member, Sweep

EVIL = "<script>alert(1)</script>\"'&"
VOID = ("meta", "link", "br", "img")


class Page(HTMLParser):
    """Checks the structure while it reads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.scripts = self.pictures = 0
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.references += [values[key] or "" for key in ("src", "href", "action") if key in values]
        self.scripts += tag == "script"
        if tag == "svg":
            self.pictures += 1
            assert values["role"] == "img"
            self.references += [f"#{one}" for one in (values["aria-labelledby"] or "").split()]
        assert not [key for key in values if key.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def report(*arguments: str | Path) -> str:
    done = CliRunner().invoke(command_line("report"), ["report", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.output


def checked(text: str) -> Page:
    page = Page(text)
    assert page.scripts == 1  # ours
    assert len(set(page.ids)) == len(page.ids)
    assert all(one in ("data:,",) or one[1:] in page.ids for one in page.references), page.references
    assert "http://" not in text
    assert "https://" not in text
    return page


def test_a_page_says_all_and_loads_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "calm", steps=400, ranks=3, kills=2, slow_rank=2)
    write_run(tmp_path / "other", steps=300, kills=0)
    page = tmp_path / "page.html"
    report(run.root, "-o", page, "--compare", tmp_path / "other")
    found = checked(page.read_text())
    text = " ".join(found.texts)
    assert "calm has finished at step 400 of 400." in text
    for expected in (
        "productive step", "lost work", "rank 1 was killed by SIGKILL", "1, 2 left", "Comparison", "Evaluation: set/f1",
        "Rank 2 waited longest", "resumed at step", "rank 2", "Run file", "Memory of rank 0",
        "Rank 2 is slower than its peers, which wait for it 104.0 ms a step (21%): it waits for its samples.",
    ):  # fmt: skip
        assert expected in text, expected
    assert found.pictures == 6 + 2
    numbers = json.loads(report(run.root, "--json"))
    assert numbers["sentence"] in text
    assert len(numbers["restarts"]) == 2
    assert set(numbers["curves"]) == {"loss", "lr", "grad_norm", "samples/s"}


def test_a_sweep_is_a_table_and_parallel_coordinates(tmp_path: Path) -> None:
    members = []
    for place, values in enumerate(
        [{"lr": "0.1", "name": EVIL}, {"lr": "0.01", "name": "b"}, {"lr": "0.001", "name": "c"}]
    ):
        steps = 60 if place else 5
        members.append(Member(write_run(tmp_path / f"s-{place}", steps=steps, kills=0), values))
    Sweep(tmp_path / "s", tuple(members)).write()
    page = tmp_path / "page.html"
    report("--sweep", tmp_path / "s", "-o", page)
    if CHROMIUM is not None:
        with chromium(tmp_path) as browser:
            browser.open(page.as_uri())
            named(browser)
            for dark in (False, True):
                browser.look(dark=dark)
                assert browser.value(WITHOUT_CONTRAST) == []
            assert browser.problems == []
    found = checked(page.read_text())
    text = " ".join(found.texts)
    assert "3 of 3 runs have finished; the best by loss is s-1." in text
    for expected in ("s-0", "s-2", "0.001", "evaluation: set/f1", EVIL):
        assert expected in text, expected
    assert 'class="s1 best"' in page.read_text()
    assert "nan" not in parallel_coordinates(
        ["clip", "loss"], [("a", ["inf", 1.0]), ("b", ["2", None])], 0, identifier="x"
    )
    assert json.loads(report("--sweep", tmp_path / "s", "--json"))["runs"][1]["best"] is True
    assert "name a run" in str(CliRunner().invoke(command_line("report"), ["report"]).exception)


def test_names_and_texts_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", name=json.dumps(EVIL))
    for path in (run.events(0), run.attempts):
        text = path.read_text().replace("set/f1", json.dumps(EVIL)[1:-1]).replace("n0", json.dumps(EVIL)[1:-1])
        path.write_text(text.replace("rank 1 was killed", json.dumps(EVIL)[1:-1]))
    page = tmp_path / "page.html"
    report(run.root, "-o", page, "--compare", run.root)
    found = checked(page.read_text())
    assert "<script>alert" not in page.read_text()
    assert EVIL in "".join(found.texts)


def test_a_page_of_a_run_without_steps_and_of_damaged_records(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.yaml").write_text("name: empty\n")
    report(empty, "-o", tmp_path / "page.html")
    checked((tmp_path / "page.html").read_text())
    run = write_run(tmp_path / "a", running=True, begin=time.time() - 60)
    run.events(0).write_bytes(b"\0" * 100 + b"\n" + run.events(0).read_bytes()[:-20])
    report(run.root, "-o", tmp_path / "page.html")
    checked((tmp_path / "page.html").read_text())
    nan = tmp_path / "nan"
    write_run(nan, steps=5).events(0).write_text('{"event":"step","time":1.0,"step":1,"loss":null,"seconds":0.0}\n')
    report(nan, "-o", tmp_path / "page.html")
    checked((tmp_path / "page.html").read_text())


def test_the_page_is_small_however_long_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", steps=20_000, ranks=1, kills=3)
    report(run.root, "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 300_000


@contextlib.contextmanager
def serving(make: Callable[[], str]) -> Iterator[ThreadingHTTPServer]:
    found = server(make, 0)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.shutdown()
        found.server_close()
        thread.join()


def test_the_server_makes_the_page_at_each_load_for_this_machine() -> None:
    pages = iter(["one", "two", "three", "four"])
    with serving(lambda: next(pages)) as found:
        address = f"http://127.0.0.1:{found.server_port}"
        assert found.server_address[0] == "127.0.0.1"
        for expected in ("one", "two"):
            with urllib.request.urlopen(f"{address}/", timeout=PATIENCE) as answer:
                assert answer.read().decode() == expected
        for host in ("localhost", "127.0.0.1"):  # as browsers send it for port 80
            request = urllib.request.Request(address, headers={"Host": host})
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/etc/passwd", timeout=PATIENCE)
        for host in ("evil.example:80", "evil.example", "localhost.evil.example"):
            with pytest.raises(urllib.error.HTTPError, match="421"):
                urllib.request.urlopen(urllib.request.Request(address, headers={"Host": host}), timeout=PATIENCE)


def test_an_idle_connection_blocks_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed in the end."""
    with serving(lambda: "page") as found, socket.create_connection(("127.0.0.1", found.server_port), PATIENCE) as idle:
        with urllib.request.urlopen(f"http://127.0.0.1:{found.server_port}/", timeout=PATIENCE) as answer:
            assert answer.read() == b"page"
        handler = cast("type[StreamRequestHandler]", found.RequestHandlerClass)
        assert handler.timeout == IDLE_LIMIT
        monkeypatch.setattr(handler, "timeout", 0.1)
        with socket.create_connection(("127.0.0.1", found.server_port), PATIENCE) as idle_as_well:
            assert idle_as_well.recv(1) == b""
        idle.setblocking(False)
        with pytest.raises(BlockingIOError):
            idle.recv(1)


def test_a_client_that_leaves_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    left, made = threading.Event(), threading.Event()

    def page() -> str:
        made.set()
        assert left.wait(PATIENCE)
        return "x" * (16 << 20)

    with serving(page) as found:
        before = threading.active_count()
        client = socket.create_connection(("127.0.0.1", found.server_port), PATIENCE)
        client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert made.wait(PATIENCE)
        # Closed with a reset, so that the answer cannot be written.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        left.set()
        wait_until(lambda: threading.active_count() <= before)
    assert capfd.readouterr() == ("", "")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(1, 50))
def test_reduction_keeps_order_ends_and_extremes(values: list[float], columns: int) -> None:
    points = [(float(place), value) for place, value in enumerate(values)]
    found = reduced(points, columns)
    assert len(found) <= 2 * columns or found == points
    assert found == sorted(found)
    assert set(found) <= set(points)
    assert {max(values), min(values)} <= {value for _, value in found}
    assert len(sparkline(values, 10)) == min(10, len(values))


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_within_and_few(low: float, room: float) -> None:
    found = ticks(low, low + room)
    slack = 1e-6 * (abs(low) + room)
    assert len(found) <= 8
    assert all(low - slack <= value <= low + room + slack for value in found)


def test_coarse_segments_cover_the_same_time() -> None:
    from ortflow.launchers.report.causes import Cause

    kinds = [Cause.STEP, Cause.SAVE, Cause.STEP, Cause.OTHER]
    segments = [Segment(10 * n, 10 * n + 10, kinds[n % 4]) for n in range(5000)]
    found = coarse(segments, 100)
    assert len(found) <= 101
    assert (found[0].start, found[-1].end) == (0, 50_000)
    assert [one.end for one in found[:-1]] == [one.start for one in found[1:]]


def test_text_has_contrast_in_both_modes() -> None:
    blocks = re.findall(r":root\{([^}]*)\}", CSS.replace("\n", ""))
    modes = [dict(re.findall(r"--(\w+):(#[0-9a-f]{3,6})", block)) for block in blocks]
    light, dark = modes[0], {**modes[0], **modes[1]}
    for mode in (light, dark):
        for text in ("fg", "dim"):
            for ground in ("bg", "card"):
                assert contrast(mode[text], mode[ground]) >= 4.5, (text, ground, mode)


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminance, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else math.pow((part + 0.055) / 1.055, 2.4) for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


WITHOUT_CONTRAST = """
(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (parts(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), poor = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("title, desc, script")) continue;
    const style = getComputedStyle(node);
    const colours = [light(node.closest("svg") ? style.fill : style.color), light(ground(node))].sort((a, b) => a - b);
    if ((colours[1] + 0.05) / (colours[0] + 0.05) < 4.5) poor.push(walker.currentNode.data);
  }
  return poor;
})()
"""
"""The texts whose contrast with what is behind them is below 4.5, as they are drawn."""


def named(browser: Browser) -> None:
    """What a screen reader needs of a page: names, a language, and headings in order."""
    seen = browser.accessible()
    for role in ("image", "button", "table", "heading", "link"):
        assert [name for one, name in seen if one == role and not name] == [], role
    assert browser.value("document.documentElement.lang") == "en"
    levels = browser.value("[...document.querySelectorAll('h1, h2, h3')].map(one => +one.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_a_browser_shows_it_without_errors(tmp_path: Path) -> None:
    """In light and dark mode, on paper, on a narrow screen, by keys and for a screen reader."""
    run = write_run(tmp_path / "a", steps=400, ranks=3, kills=2)
    write_run(tmp_path / "other", steps=300, kills=0)
    page = tmp_path / "page.html"
    report(run.root, "-o", page, "--compare", tmp_path / "other")
    with chromium(tmp_path) as browser:
        browser.look()
        browser.open(page.as_uri())
        pictures, grounds = [], []
        for dark in (False, True):
            browser.look(dark=dark)
            assert browser.value(WITHOUT_CONTRAST) == []
            grounds.append(browser.value("getComputedStyle(document.body).backgroundColor"))
            pictures.append(browser.picture())
            assert pictures[-1].startswith(b"\x89PNG")
            assert len(pictures[-1]) > 50_000
        assert grounds[0] == "rgb(255, 255, 255)"
        assert sum(map(int, re.findall(r"\d+", grounds[1])[:3])) < 100

        named(browser)
        seen = browser.accessible()
        assert ("group", "Time axis") in seen
        assert len([role for role, _ in seen if role == "image"]) >= 6

        axis = "document.querySelector('.zoom svg').getAttribute('viewBox')"
        focus = "document.activeElement.classList.contains('zoom')"
        whole = browser.value(axis)
        for _ in range(30):
            browser.press("Tab")
            assert browser.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
            if browser.value(focus):
                break
        assert browser.value(focus), "Tab does not reach the time axis"
        browser.press("+")
        zoomed = browser.value(axis)
        browser.press("ArrowRight")
        moved = browser.value(axis)
        assert len({whole, zoomed, moved}) == 3
        browser.press("0")
        assert browser.value(axis) == whole

        browser.look(width=400)
        assert browser.value("document.documentElement.scrollWidth") <= 400
        browser.look(dark=True, paper=True)
        assert browser.value(WITHOUT_CONTRAST) == []
        assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.printed().startswith(b"%PDF")
        assert browser.problems == []
        assert [one for one in browser.requests if not one.startswith(("file:", "data:"))] == []
