"""A headless Chromium, where there is one: `chromium` on PATH, or the program in ORTFLOW_CHROMIUM."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = os.environ.get("ORTFLOW_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@dataclass(frozen=True)
class Seen:
    """A page as a browser shows it."""

    document: str
    """After its scripts."""
    console: list[str]
    """Messages of its scripts, of errors and refused loads."""
    picture: bytes
    """PNG."""


def look_at(page: Path, folder: Path, *, dark: bool = False) -> Seen:
    """Open a page from the disk."""
    options = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1240,2400", "--enable-logging=stderr",
        *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []),
    ]  # fmt: skip
    picture = folder / "page.png"
    address = page.resolve().as_uri()
    shot = subprocess.run(
        [*options, f"--screenshot={picture}", address], capture_output=True, text=True, timeout=120, check=True
    )
    dump = subprocess.run([*options, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in shot.stderr.splitlines() if re.search(r"CONSOLE|Failed to load|Refused", line)]
    return Seen(dump.stdout, console, picture.read_bytes())
