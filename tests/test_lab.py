"""`make lab`'s own command, in a real browser: chapter 00 opens, every cell runs, and no output is an error."""

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import needs_browser, open_browser
from chapters import NOTEBOOKS, ROOT, code_cells
from nbformat import NotebookNode
from playwright.sync_api import Page, expect

ERRORS = "[data-mime-type$='jupyter.error'], [data-mime-type$='jupyter.stderr']"  # outputs that should not be there
START, RUN = 60, 180  # seconds: until JupyterLab answers, until the chapter has run
# Every cell stands in the page, scrolled to or not; the notebook is not saved; nothing is asked of other machines.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def lab_command() -> list[str]:
    """What `make lab` runs, with the Python of the tests."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^lab:.*\n\t\$\(BIN\)/(.+)$", makefile, re.MULTILINE)
    assert recipe, "the Makefile has no rule for lab that begins with a program of .venv"
    program, *arguments = shlex.split(recipe[1])
    return [str(Path(sys.executable).parent / program), *arguments]


def write_settings(folder: Path) -> None:
    for name, settings in SETTINGS.items():
        path = folder / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings), encoding="utf-8")


def environment(home: Path) -> dict[str, str]:
    """A JupyterLab that knows nothing of the one that the reader uses."""
    write_settings(home / "settings")
    folders = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
    folders |= {"IPYTHONDIR": "ipython"}
    folders |= {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    return os.environ | {name: str(home / folder) for name, folder in folders.items()}


@contextmanager
def lab(checkout: Path, home: Path) -> Iterator[str]:
    """The address that the command would open in the browser, for as long as it is needed."""
    options = ["--no-browser", "--ServerApp.port=0"]  # 0: any port that is free
    options += ["--allow-root"] if os.name == "posix" and os.geteuid() == 0 else []
    command = [*lab_command(), *options]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=checkout, env=environment(home), stdout=log, stderr=log)
    try:
        yield wait_for_address(home, server)
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for_address(home: Path, server: subprocess.Popen[bytes]) -> str:
    """Where JupyterLab shows the file that it was called with: it writes a page for the browser that leads there."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.poll() is None:
        for page in (home / "runtime").glob("jpserver-file-to-run-*-open.html"):
            if address := re.search(r'href="(http[^"]+)"', page.read_text(encoding="utf-8")):
                return html.unescape(address[1])
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab does not answer:\n{(home / 'log').read_text(encoding='utf-8')}")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy, so that no output of this test gets into the notebook that is committed."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "notebooks", copy / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    return copy


def choose(page: Page, menu: str, entry: str) -> None:
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.get_by_role("menuitem", name=entry, exact=True).click()


def prompts(page: Page) -> list[str]:
    """What stands before each code cell: `[3]:` when it has run, `[*]:` while it waits, `[ ]:` before."""
    return page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()


@needs_browser
def test_chapter_00_runs_from_the_first_cell_to_the_last(checkout: Path, tmp_path: Path) -> None:
    chapter = NOTEBOOKS[0]
    cells = code_cells(chapter)
    before = chapter.read_bytes()
    with lab(checkout, tmp_path) as address, open_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address)
        expect(page.locator(".jp-CodeCell")).to_have_count(len(cells), timeout=START * 1000)
        expect(page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")).to_be_visible(timeout=START * 1000)
        choose(page, "Edit", "Clear Outputs of All Cells")
        expect(page.locator(".jp-OutputArea-output")).to_have_count(0)
        choose(page, "Run", "Run All Cells")
        done = page.locator(".jp-InputPrompt").get_by_text(f"[{len(cells)}]:", exact=True)
        expect(done.or_(page.locator(ERRORS)).first).to_be_attached(timeout=RUN * 1000)
        assert page.locator(ERRORS).all_inner_texts() == []
        assert prompts(page) == [f"[{number}]:" for number in range(1, len(cells) + 1)]
        check_outputs(page, cells)
    assert (checkout / "notebooks" / chapter.name).read_bytes() == before == chapter.read_bytes()


def check_outputs(page: Page, cells: list[NotebookNode]) -> None:
    """An output wherever the committed notebook has one, and its pictures."""
    for index, cell in enumerate(cells):
        outputs = page.locator(".jp-CodeCell").nth(index).locator(".jp-OutputArea-output")
        if cell.outputs:
            expect(outputs.first).to_be_attached()
        else:
            expect(outputs).to_have_count(0)
    pictures = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    expect(page.locator(".jp-OutputArea-output img")).to_have_count(pictures)
