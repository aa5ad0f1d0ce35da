"""A headless Chromium for tests of HTML pages, driven through chromedriver's HTTP interface.

with open_page(file) as page: page.run("return document.title")
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import free_port

OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


class Page:
    """A page that is open in the browser."""

    def __init__(self, session: str) -> None:
        self._session = session

    def run(self, script: str, *arguments: Any) -> Any:
        """What the JavaScript returns; it reads `arguments`."""
        return _call(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def complaints(self) -> list[str]:
        """Errors that the page's scripts and requests have caused since the last call."""
        log = _call(f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]


@contextmanager
def open_page(file: Path, timeout_s: float = 60) -> Iterator[Page]:
    """The file in a browser of its own; the test is skipped where there is none."""
    driver, browser = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or browser is None:
        pytest.skip("needs the Debian packages chromium and chromium-driver")
    port = free_port()
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, timeout_s)
            arguments = [*OPTIONS, f"--user-data-dir={profile}"]
            chrome = {"binary": browser, "args": arguments}
            wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = _call(f"{url}/session", {"capabilities": {"alwaysMatch": wanted}})
            session = f"{url}/session/{answer['sessionId']}"
            _call(f"{session}/url", {"url": file.resolve().as_uri()})
            yield Page(session)
            _call(session, method="DELETE")
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait(url: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            if _call(f"{url}/status")["ready"]:
                return
        except urllib.error.URLError:
            pass
        if time.monotonic() > end:
            raise TimeoutError(f"chromedriver was not ready within {timeout_s:g} s")
        time.sleep(0.1)


def _call(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from None
