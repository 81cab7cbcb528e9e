"""Chromium without a screen, driven by its own protocol: what it loads, says and shows of pages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .waiting import eventually

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-pipe", "about:blank",
)  # fmt: skip


class Browser:
    """One page of a browser, through the pipe of https://chromedevtools.github.io/devtools-protocol."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers = orders, answers
        self._read = b""
        self._number = 0
        self._session: str | None = None
        self.requested: list[str] = []
        """The addresses that it asked for."""
        self.said: list[str] = []
        """Errors and warnings of pages, whoever said them."""
        self._loaded = False
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(
        self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        """Open a page, and wait until it and its scripts are loaded."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        assert "errorText" not in (said := self.ask("Page.navigate", url=address)), said
        while not self._loaded:
            self._listen()

    def run(self, script: str) -> Any:
        """Return what a script's expression is on the page; of a promise, what becomes of it."""
        found = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true on the page, and return it."""
        return eventually(lambda: self.run(script), said=lambda: f"{script}; {self.said}")

    def picture(self, file: Path) -> None:
        """Write what is shown."""
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to an order."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while (message := self._listen()).get("id") != self._number:
            pass
        assert "error" not in message, (method, message)
        return dict(message["result"])

    def _listen(self) -> dict[str, Any]:
        """Return the next message, and take note of what it tells."""
        while b"\0" not in self._read:
            assert select.select([self._answers], [], [], 60)[0], "the browser is silent"
            piece = os.read(self._answers, 1 << 20)
            assert piece, "the browser has ended"
            self._read += piece
        first, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        told = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.said.append(json.dumps(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.said.append(json.dumps(told["entry"]))
        return message


@contextmanager
def browser(place: Path) -> Iterator[Browser]:
    """A browser that keeps its files in a directory, and ends afterwards."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if not program:
        pytest.skip("no Chromium here: apt-get install chromium")
    orders_in, orders = os.pipe()
    answers, answers_out = os.pipe()

    def as_it_expects() -> None:
        os.dup2(os.dup(orders_in), 3)
        os.dup2(os.dup(answers_out), 4)

    with subprocess.Popen(
        [program, f"--user-data-dir={place}", *_OPTIONS], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=as_it_expects, close_fds=False,
    ) as process:  # fmt: skip
        os.close(orders_in)
        os.close(answers_out)
        try:
            yield Browser(orders, answers)
        finally:
            process.kill()
            os.close(orders)
            os.close(answers)
