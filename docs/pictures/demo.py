"""Draws docs/pictures/terminal.svg and report.svg: `ortflow demo` in a terminal, and the report of its killed run.

    python docs/pictures/demo.py [--folder FOLDER]

Records what the terminal shows, with its times; three times as fast. Takes a minute.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from terminal import Terminal  # noqa: E402

from ortflow.launchers.report.causes import Cause  # noqa: E402
from ortflow.launchers.report.curves import step_curves  # noqa: E402
from ortflow.launchers.report.state import sentence  # noqa: E402
from ortflow.launchers.report.style import CAUSES, CSS  # noqa: E402
from ortflow.launchers.report.survey import Survey, survey  # noqa: E402
from ortflow.launchers.report.svg import line_chart, share_bar  # noqa: E402
from ortflow.workflow.run.rundir import RunDir  # noqa: E402

COLUMNS, ROWS = 90, 26
CHARACTER, LINE = 7.2, 17
LONGEST_WAIT = 1.0
"""Seconds of the picture in which nothing moves."""
PERIOD = 1.5
"""Seconds between two looks at the terminal."""
SPEED = 3.0
"""Seconds of the demo in a second of the picture."""
HOLD = 5.0
"""Seconds for which the end is shown."""
Spans = Mapping[int, Sequence[tuple[float, float | None, str]]]
"""Number of a line -> from, to (None: until the end) and its text."""


def record(folder: Path) -> tuple[Spans, list[tuple[float, int]], float]:
    """Run the demo; the texts of each line, the first line of the window over time, and the length in seconds."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    terminal = Terminal(["ortflow", "demo"], folder, environment, width=COLUMNS)
    spans: dict[int, list[tuple[float, float | None, str]]] = {}
    tops = [(0.0, 0)]
    now, seen, last = 0.0, ["$ ortflow demo"], time.monotonic()
    spans[0] = [(0.0, None, seen[0])]
    running = True
    while running:
        running = terminal._read()
        lines = [seen[0], *(line.rstrip().replace(f"{folder}/", "~/") for line in terminal.screen.lines)]
        moment = time.monotonic()
        if lines == seen or (running and moment < last + PERIOD):
            continue
        now += min(LONGEST_WAIT, (moment - last) / SPEED)
        last = moment
        for place in range(max(len(lines), len(seen))):
            before, after = (each[place] if place < len(each) else "" for each in (seen, lines))
            if before == after:
                continue
            known = spans.setdefault(place, [])
            if known and known[-1][1] is None:
                known[-1] = (known[-1][0], now, known[-1][2])
            if after:
                known.append((now, None, after))
        top = max(0, max(place for place, line in enumerate(lines) if line) + 2 - ROWS)
        if top != tops[-1][1]:
            tops.append((now, top))
        seen = lines
    code = os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1])
    if code:
        raise SystemExit(f"ortflow demo ended with exit code {code}:\n{terminal.screen}")
    return spans, tops, now + HOLD


def recording(spans: Spans, tops: Sequence[tuple[float, int]], seconds: float) -> str:
    """An animated picture. Where nothing moves, as on paper, it shows the end."""
    width, height = round(COLUMNS * CHARACTER) + 24, ROWS * LINE + 44
    rules, texts = [], []

    def share(moment: float) -> str:
        return f"{min(100.0, 100 * moment / seconds):.2f}%"

    for place, known in spans.items():
        for first, last, text in known:
            if last is not None and last - first < 0.05:
                continue
            kinds = ["hidden"] * (last is not None) + ["command"] * text.startswith("$ ")
            style = f' class="{" ".join(kinds)}"' if kinds else ""
            if last is not None or first > 0:
                name = f"t{len(texts)}"
                end = "" if last is None else f"{share(last)},to{{opacity:0}}"
                rules.append(f"@keyframes {name}{{from{{opacity:0}}{share(first)}{{opacity:1}}{end}}}")
                style += f' style="animation-name:{name}"'
            length = f'textLength="{len(text) * CHARACTER:.1f}" ' if text.strip() else ""
            texts.append(
                f'<text {length}x="12" y="{LINE * place + 46}"{style} xml:space="preserve">{escape(text)}</text>'
            )
    steps = "".join(f"{share(moment)}{{transform:translateY({-LINE * top}px)}}" for moment, top in tops)
    end = -LINE * tops[-1][1]
    style = (
        "<style>text{font:12px ui-monospace,SFMono-Regular,Menlo,monospace;fill:#e6edf3}.command{fill:#7ee787}"
        f".hidden{{opacity:0}}text,.window{{animation:{seconds:.1f}s step-end infinite}}text{{animation-name:none}}"
        f".window{{animation-name:window;transform:translateY({end}px)}}@keyframes window{{{steps}}}{''.join(rules)}"
        "@media(prefers-reduced-motion:reduce){text,.window{animation:none!important}}</style>"
    )
    title = "A terminal in which ortflow demo trains a model, kills a rank, and compares both runs bit by bit"
    dots = "".join(f'<circle cx="{18 + 16 * n}" cy="15" r="5" fill="#484f58"/>' for n in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="terminal-t">{style}<title id="terminal-t">{title}</title>'
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
        f'{dots}<svg y="28" width="{width}" height="{height - 36}" overflow="hidden"><g transform="translate(0,-28)">'
        f'<g class="window">{"".join(texts)}</g></g></svg></svg>\n'
    )


def report(run: Survey, folder: Path) -> str:
    """The head of a run's report: its sentence, its loss, and its time by cause."""
    totals: Mapping[Cause, int] = run.account.totals
    said = sentence(run).replace(f"{folder}/", "")
    wall = sum(totals.values())
    marks = [float(event["step"]) for event in run.events if event["event"] == "resume"]
    chart = line_chart("Loss over steps", {"loss": step_curves(run.events)["loss"]}, identifier="loss", marks=marks)
    bar = share_bar(totals, identifier="bar")
    keys, x, y = [], 24, 352
    for cause, value in totals.items():
        if value:
            text = f"{cause.label} {100 * value / wall:.1f}%"
            if x + 7 * len(text) > 800:
                x, y = 24, y + 20
            keys.append(f'<rect class="c-{cause.value}" x="{x}" y="{y - 10}" width="11" height="11" rx="2"/>')
            keys.append(f'<text class="key-of" x="{x + 17}" y="{y}">{escape(text)}</text>')
            x += 7 * len(text) + 40
    # The page's own colours; its rules for elements of HTML match nothing here.
    style = (
        f"<style>{CSS}{CAUSES}.page{{fill:var(--bg);stroke:var(--line)}}polyline{{fill:none;stroke:var(--s0)}}"
        "svg{display:inline;width:auto;height:auto}.name{font:600 22px system-ui,sans-serif;fill:var(--fg)!important}"
        ".said{font:15px system-ui,sans-serif;fill:var(--fg)!important}"
        ".key-of{font:12px system-ui,sans-serif!important}"
        "svg text.name{font-size:22px}svg text.said{font-size:15px}</style>"
    )
    goodput = "unknown" if run.account.goodput is None else f"{100 * run.account.goodput:.1f}%"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 {y + 24}" role="img" '
        f'aria-labelledby="report-t">{style}'
        f'<title id="report-t">The head of a report: {escape(said)}</title>'
        f'<rect class="page" x="1" y="1" width="838" height="{y + 22}" rx="6"/>'
        f'<text class="name" x="24" y="36">{escape(run.status.name)}</text>'
        f'<text class="said" x="24" y="62">{escape(said)}</text>'
        f"{placed(chart, 110, 70, 620, 210)}"
        f'<text class="said" x="24" y="300">Goodput {goodput}: wall time by cause</text>{placed(bar, 24, 310, 792, 22)}'
        f"{''.join(keys)}</svg>\n"
    )


def placed(picture: str, x: int, y: int, width: int, height: int) -> str:
    """A picture within another one."""
    size = f"width:{width}px;height:{height}px"
    return picture.replace("<svg ", f'<svg x="{x}" y="{y}" width="{width}" height="{height}" style="{size}" ', 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the demo runs (default: a temporary folder)")
    chosen = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        project = chosen or Path(temporary)
        (HERE / "terminal.svg").write_text(recording(*record(project)))
        killed = RunDir(project / "ortflow-demo" / "runs" / "spirals")
        (HERE / "report.svg").write_text(report(survey(killed, time.time()), project))
    print(HERE / "terminal.svg", HERE / "report.svg")
