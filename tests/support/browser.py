"""A headless Chromium, where there is one: `chromium` on PATH, or the program in ORTFLOW_CHROMIUM.

Driven over its debugging pipe (file descriptors 3 and 4, messages of JSON that end with a zero byte), which needs no
package and no port.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("ORTFLOW_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
NO_CHROMIUM = "no Chromium (apt-get install chromium, or ORTFLOW_CHROMIUM)"
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
]  # fmt: skip
LIMIT = 60.0
"""Seconds that an answer may take."""


class Browser:
    """One page. `problems`: its messages on the console, exceptions and failed loads; `requests`: all addresses."""

    def __init__(self, process: subprocess.Popen[bytes], orders: int, answers: int) -> None:
        self._process, self._orders, self._answers = process, orders, answers
        self._number, self._rest, self._session = 0, b"", ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return its result."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while (message := self._read()).get("id") != self._number:
            pass
        assert "error" not in message, f"{method}: {message['error']}"
        result: dict[str, Any] = message["result"]
        return result

    def _read(self) -> dict[str, Any]:
        """The next message; of events, what tests ask for is kept."""
        end = time.monotonic() + LIMIT
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], max(0.0, end - time.monotonic()))[0], (
                "Chromium does not answer"
            )
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        values = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.consoleAPICalled":
                self.problems.append(" ".join(str(one.get("value", one)) for one in values["args"]))
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(values["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])
        return message

    def look(self, *, dark: bool = False, paper: bool = False, width: int = 1240) -> None:
        """Follow the light or dark mode and the medium, before or after a page is opened."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="print" if paper else "screen", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def open(self, address: str) -> None:
        """Open a page, and wait until it and its scripts are loaded."""
        self._loaded = False
        self.call("Page.navigate", url=address)
        while not self._loaded:
            self._read()

    def value(self, expression: str) -> Any:
        """A JavaScript expression's value, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The first value of an expression that is true."""
        end = time.monotonic() + LIMIT / 4
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"{expression} stays {value!r}: {self.problems}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """A key, by its name in JavaScript."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}
        character = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **character, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, **code)

    def picture(self) -> bytes:
        """PNG of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def printed(self) -> bytes:
        """PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of what a screen reader finds, in its order."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "").strip())
            for node in nodes
            if not node["ignored"]
        ]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in a new folder."""
    orders, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    # Chromium reads file descriptor 3 and writes 4. Not dash, which knows numbers of one digit only.
    command = ["bash", "-c", f'exec "$@" 3<&{orders} 4>&{answers}', "bash", str(CHROMIUM), *OPTIONS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"], pass_fds=(orders, answers),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    os.close(orders)
    os.close(answers)
    try:
        yield Browser(process, to_browser, from_browser)
    finally:
        os.close(to_browser)  # it ends with its pipe
        os.close(from_browser)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
