"""A real browser for the tests: the chromium that is installed, and a server for a folder of pages."""

import functools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# .ci/run installs it, and says so by this variable: there, a test that cannot run is a failure.
PROMISED = os.environ.get("MINIVLLM_BROWSER") == "required"
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not PROMISED, reason="no browser: apt-get install chromium, or what your system calls it"
)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """The browser, without a window."""
    assert CHROMIUM, "chromium was to be installed, and is not on the PATH"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and does not write down every request."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The address of a server for a folder, on this machine only."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:  # also when a test fails: else the thread would keep the process alive
        server.shutdown()
        thread.join()
        server.server_close()
