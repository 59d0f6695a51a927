"""A headless Chromium, spoken to over its DevTools protocol: through a pipe, so that there is no port and no driver.

https://chromedevtools.github.io/devtools-protocol/; with `--remote-debugging-pipe` messages are JSON with a NUL after
each, read by the browser from file descriptor 3 and written to 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium-headless-shell"
_PATIENCE_S = 30.0
_FD = "/proc/self/fd"
"""Where a shell that knows only numbers of one digit finds its other files."""


def program() -> str | None:
    """Where a Chromium is on this machine."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """One browser with one tab. Collects everything that went wrong in it, and every request that it made."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        command = [program, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$@" 3<{_FD}/{to_browser} 4>{_FD}/{from_browser}', "sh", *command],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._buffer = 0, b""
        self._session: str | None = None
        self.problems: list[str] = []
        """Exceptions, errors and warnings on the console, and complaints of the browser itself."""
        self.requests: list[str] = []
        """URLs."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a separate session: all of its processes that are left
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Load a file, anew; what was collected before is forgotten. Returns when it is drawn."""
        self.problems.clear()
        self.requests.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + _PATIENCE_S
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") != page.as_uri():
            assert time.monotonic() < deadline, "the page does not load"
        self.drawn()

    def drawn(self) -> None:
        """Return after the next frame."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")

    def evaluate(self, expression: str) -> Any:  # any JSON value
        """The value of an expression in the page; of a promise, its result."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def key(self, key: str) -> None:
        """Press and release a key, where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        self.drawn()

    def click(self, selector: str) -> None:
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.drawn()

    def hover(self, selector: str) -> None:
        x, y = self._middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.drawn()

    def screenshot(self, to: Path) -> None:
        """The whole page, as PNG."""
        to.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._take(answer)

    def _middle(self, selector: str) -> tuple[float, float]:
        quoted = json.dumps(selector)
        self.evaluate(f"document.querySelector({quoted}).scrollIntoView({{block: 'center'}})")
        box = self.evaluate(f"document.querySelector({quoted}).getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE_S)
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _take(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
