"""A real browser for the tests of the page: headless Chromium, driven over a pipe.

It uses the DevTools protocol directly: a few lines of JSON, and no driver that must match the browser's version.
`python tests/support/chromium.py URL OUT.png [--dark] [--phone] [--whole]` takes a screenshot of a page.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["DESKTOP", "PHONE", "Chromium", "Tab", "chromium_path"]

DESKTOP, PHONE = (1280, 800), (390, 844)

_PATIENCE = 90.0
_OPTIONS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-default-browser-check",
    "--no-first-run",
]


# The browser reads commands from descriptor 3 and writes replies to descriptor 4.
_TRAMPOLINE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium_path() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """One browser. Each tab has a separate profile. `close` removes all files of the browser."""

    def __init__(self, path: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        hears, says = _pipe()
        reads, writes = _pipe()
        command = [sys.executable, "-c", _TRAMPOLINE, str(hears), str(writes), path, *_OPTIONS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._home.name}", "about:blank"],
            pass_fds=(hears, writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(hears)
        os.close(writes)
        self._says = open(says, "wb", buffering=0)  # noqa: SIM115
        self._reads = open(reads, "rb")  # noqa: SIM115
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        self._thread = threading.Thread(target=self._listen, name="chromium", daemon=True)
        self._thread.start()

    def tell(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Sends a command and returns the reply."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        answer: Future[dict[str, Any]] = Future()
        self._waiting[number] = answer
        self._says.write(json.dumps(message).encode() + b"\0")
        return answer.result(_PATIENCE)

    def _listen(self) -> None:
        rest = b""
        while piece := os.read(self._reads.fileno(), 1 << 20):
            *messages, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, messages):
                answer = self._waiting.pop(message.get("id", 0), None)
                if answer is None:
                    listener = self._listeners.get(message.get("sessionId", ""))
                    if listener is not None:
                        listener(message["method"], message["params"])
                elif "error" in message:
                    answer.set_exception(RuntimeError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])

    def tab(self, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> Tab:
        context = self.tell("Target.createBrowserContext")["browserContextId"]
        target = self.tell("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, context, session)
        self._listeners[session] = tab.hear
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.tell(f"{domain}.enable")
        tab.look(size, dark=dark)
        return tab

    def close(self) -> None:
        with suppress(Exception):
            self.tell("Browser.close")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._thread.join(timeout=10)
        self._says.close()
        self._reads.close()
        self._home.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _pipe() -> tuple[int, int]:
    """Both ends, with numbers above the descriptors that the browser uses."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


class Tab:
    """One page. `problems` has console errors and failed requests, `requests` has all requested URLs."""

    def __init__(self, browser: Chromium, context: str, session: str) -> None:
        self._browser, self._context, self._session = browser, context, session
        self.problems: list[str] = []
        self.requests: list[str] = []

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.tell(method, self._session, **params)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.loadingFailed":
            self.problems.append(params["errorText"])
        elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
            self.problems.append(f"{params['response']['status']} {params['response']['url']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {params['message']}")

    def look(self, size: tuple[int, int] = DESKTOP, *, dark: bool = False, zone: str = "UTC") -> None:
        """Sets the screen size, the colour scheme and the time zone."""
        phone = size == PHONE
        width, height = size
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.tell("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.tell("Emulation.setTimezoneOverride", timezoneId=zone)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.tell("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Opens a page and waits until it has a snapshot."""
        self.tell("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && typeof snapshot !== 'undefined' && snapshot !== null")

    def evaluate(self, expression: str) -> Any:
        answer = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = _PATIENCE) -> None:
        until = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < until, f"never: {expression} {self.problems}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")).replace("\xa0", " ")

    def plot(self, section: str) -> dict[str, Any]:
        """The plotly traces of a section, by name."""
        traces = self.evaluate(f"document.querySelector('#{section} .plot').data ?? []")
        return {trace["name"]: trace for trace in traces}

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        answer = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.tell("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def close(self) -> None:
        self._browser.tell("Target.disposeBrowserContext", browserContextId=self._context)


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes a screenshot of a page.")
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("--whole", action="store_true", help="capture the whole page, not only the screen")
    args = parser.parse_args()
    path = chromium_path()
    if path is None:
        raise SystemExit("chromium is not installed: apt install chromium")
    with Chromium(path) as browser:
        tab = browser.tab(PHONE if args.phone else DESKTOP, dark=args.dark)
        tab.open(args.url)
        time.sleep(0.5)  # plotly draws some parts a moment later
        tab.screenshot(args.out, whole=args.whole)
        print(*tab.problems, sep="\n", end="")


if __name__ == "__main__":
    main()
