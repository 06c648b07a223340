"""A headless Chromium, driven by its DevTools protocol over a pipe: no driver, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from support.limits import HANG

NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
QUIET = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-dev-shm-usage", "--force-color-profile=srgb",
)  # fmt: skip


def program() -> str:
    """This machine's browser. Fails if there is none: scripts/test installs it."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    raise AssertionError(f"no {', '.join(NAMES)} on PATH: apt-get install chromium")


class Browser:
    """One browser with one page. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._replies: dict[int, dict[str, Any]] = {}
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.console: list[str] = []
        """Console output, log entries and exceptions."""
        self.requests: list[str] = []
        """Addresses that the browser requested, including the page itself."""

    def __enter__(self) -> Browser:
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for pair in (os.pipe(), os.pipe())
                for fd in pair]  # fmt: skip
        reads, self._write, self._read, writes = ends
        # The protocol's ends are descriptors 3 and 4; root may not have Chromium's sandbox.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", program(), *QUIET, *sandbox,
             "--remote-debugging-pipe", f"--user-data-dir={self._folder / 'profile'}"],
            pass_fds=(reads, writes), start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=(self._folder / "browser.log").open("wb"),
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def show(self, path: Path, width: int, *, dark: bool = False, print_: bool = False) -> None:
        """Load a file, at a width in pixels, and wait until it is drawn."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="print" if print_ else "", features=[scheme])
        self._call("Page.navigate", url=path.as_uri())
        self.evaluate(
            "new Promise(done => { const drawn = () => requestAnimationFrame(() => "
            "requestAnimationFrame(done)); document.readyState === 'complete' ? drawn() : "
            "addEventListener('load', drawn); })"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; awaits promises."""
        result = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._call("Page.printToPDF")["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + HANG
        while number not in self._replies:
            self._receive(end - time.monotonic(), method)
        reply = self._replies.pop(number)
        assert "error" not in reply, f"{method}: {reply['error']}"
        result: dict[str, Any] = reply["result"]
        return result

    def _receive(self, left: float, method: str) -> None:
        ready, _, _ = select.select([self._read], [], [], max(0.0, left))
        got = os.read(self._read, 1 << 20) if ready else b""
        if not got:
            log = (self._folder / "browser.log").read_text(errors="replace")
            raise AssertionError(f"{program()} did not answer {method}:\n{log[-2000:]}")
        *messages, self._buffer = (self._buffer + got).split(b"\0")
        for message in messages:
            self._note(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._replies[message["id"]] = message
            return
        about = message.get("params", {})
        match message["method"]:
            case "Runtime.consoleAPICalled":
                self.console.append(" ".join(str(one.get("value")) for one in about["args"]))
            case "Runtime.exceptionThrown":
                self.console.append(about["exceptionDetails"]["text"])
            case "Log.entryAdded":
                self.console.append(about["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
