"""The site, as `make site` builds it: every page in a real browser, every link, every figure, every line of source."""

import ast
import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from browser import needs_browser, open_browser, serve
from chapters import NOTEBOOKS, ROOT, code_cells, read
from playwright.sync_api import Browser, Page, expect

PHONE, DESKTOP = 390, 1280  # CSS pixels
NO_NETWORK = "http://127.0.0.1:9"  # a proxy that refuses: what would be downloaded fails
chapters = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site") / "pages"
    environment = os.environ | dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NO_NETWORK)
    command = [sys.executable, str(ROOT / "site" / "build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


# --- pages as they are written ---


def next_page(site: Path, page: str, direction: str) -> str:
    """Where the button below a page leads: `next` or `prev`."""
    text = (site / page).read_text(encoding="utf-8")
    link = re.search(rf'class="(?:left|right)-{direction}"\s+href="([^"]+)"', text)
    assert link, f"{page} has no button {direction}"
    return (site / page).parent.joinpath(link[1]).resolve().relative_to(site.resolve()).as_posix()


@dataclass
class Parsed(HTMLParser):
    """What a page links to and what it can be linked to."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    images: list[dict[str, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids |= {value for name in ("id", "name") if (value := given.get(name))}
        if tag == "a":
            self.links.append(given.get("href") or "")
        elif tag == "img":
            self.images.append(given)
        is_loaded = tag in ("script", "img", "iframe") or given.get("rel") in ("stylesheet", "icon", "preload")
        self.loaded += [value for name in ("src", "href") if is_loaded and (value := given.get(name))]


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Parsed]:
    """Every page of the site, by its path."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        if "_static" not in path.parts:
            found[path.relative_to(site).as_posix()] = parsed = Parsed()
            parsed.feed(path.read_text(encoding="utf-8"))
    return found


def page_of(path: Path) -> str:
    """`notebooks/03_block_manager.html`."""
    return path.relative_to(ROOT).with_suffix(".html").as_posix()


def is_elsewhere(link: str) -> bool:
    return bool(re.match(r"(https?:)?//|mailto:", link))


def broken(site: Path, pages: dict[str, Parsed], page: str, link: str) -> bool:
    """Does a link of a page lead to no file, or to no place in one?"""
    target, anchor = urldefrag(link)
    path = (site / page).parent / unquote(target) if target else site / page
    if not path.resolve().is_file():
        return True
    there = pages.get(path.resolve().relative_to(site.resolve()).as_posix())
    return bool(anchor) and there is not None and unquote(anchor) not in there.ids


def test_make_builds_the_site_and_ci_brings_the_browser() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^site: \$\(READY\)\n\t\$\(BIN\)/python site/build\.py$", makefile, re.MULTILINE)
    assert "`make site`" in (ROOT / "README.md").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "chromium" in script and "MINIVLLM_BROWSER=required" in script


def test_there_is_a_page_for_everything(pages: dict[str, Parsed]) -> None:
    texts = [*NOTEBOOKS, *ROOT.glob("notebooks/*.md"), ROOT / "CONTRIBUTING.md"]
    assert {page_of(text) for text in texts} | {"index.html", "search.html", "api/core.html"} <= pages.keys()


def test_no_link_is_broken(site: Path, pages: dict[str, Parsed]) -> None:
    links = [(page, link) for page, parsed in pages.items() for link in parsed.links if not is_elsewhere(link)]
    assert len(links) > 1000
    assert [f"{page}: {link}" for page, link in links if broken(site, pages, page, link)] == []


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Parsed]) -> None:
    loaded = [(page, link) for page, parsed in pages.items() for link in parsed.loaded]
    assert [f"{page}: {link}" for page, link in loaded if is_elsewhere(link)] == []
    assert [
        f"{page}: {link}" for page, link in loaded if broken(site, pages, page, urldefrag(link)[0].split("?")[0])
    ] == []
    styles = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.css")}
    assert [path.name for path, text in styles.items() if re.search(r"(url\(|@import )['\"]?(https?:)?//", text)] == []


def test_every_image_says_what_is_seen(pages: dict[str, Parsed]) -> None:
    images = [(page, image) for page, parsed in pages.items() for image in parsed.images]
    assert images
    assert [f"{page}: {image['src']}" for page, image in images if len(image.get("alt") or "") < 20] == []


def test_next_and_previous_lead_through_the_chapters(site: Path) -> None:
    pages = ["index.html", *map(page_of, NOTEBOOKS)]
    assert [next_page(site, page, "next") for page in pages[:-1]] == pages[1:]
    assert [next_page(site, page, "prev") for page in pages[1:]] == pages[:-1]


@chapters
def test_figures_keep_their_text_and_their_caption(path: Path, site: Path) -> None:
    page = (site / page_of(path)).read_text(encoding="utf-8")
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    texts = [o.metadata["image/png"]["alt"] for o in outputs if "image/png" in o.get("data", {})]
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert [html.unescape(re.search(r'alt="([^"]*)"', figure)[1]) for figure in figures] == texts
    assert [figure for figure in figures if not re.search(r"<figcaption>.*\w{3}", figure, re.DOTALL)] == []


@chapters
def test_formulas_are_set(path: Path, site: Path) -> None:
    prose = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", prose, flags=re.DOTALL)
    formulas = re.findall(r"<math.*?</math>", (site / page_of(path)).read_text(encoding="utf-8"), re.DOTALL)
    assert len(formulas) == len(re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", prose, re.DOTALL))
    assert [formula for formula in formulas if "\\" in formula or "merror" in formula] == []


@chapters
def test_a_download_is_the_notebook(path: Path, site: Path) -> None:
    assert (site / "_sources" / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


# --- source ---


def plain(markup: str) -> str:
    """The text of a piece of a page."""
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def shown_line(site: Path, page: str, number: str) -> str:
    """A line of a page of source, as it is read."""
    text = (site / page).read_text(encoding="utf-8")
    line = re.search(rf'id="L{number}">[ \d]*</span>(.*?)\n', text)
    assert line, f"{page} has no line {number}"
    return plain(line[1]).strip()


@chapters
def test_export_cells_lead_to_the_lines_that_define_their_names(path: Path, site: Path) -> None:
    page = (site / page_of(path)).read_text(encoding="utf-8")
    notes = re.findall(r'<p class="exported"[^>]*>(.*?)</p>', page)
    assert len(notes) == sum(cell.source.startswith("#| export ") for cell in code_cells(path))
    for target, number, name in re.findall(r'href="\.\./([^"#]+)#L(\d+)"><code>([\w.]+)</code>', "".join(notes)):
        last, line = re.escape(name.rpartition(".")[2]), shown_line(site, target, number)
        assert re.match(rf"((async )?def|class) {last}\b|{last}(:.+)? =|{last}:", line), f"{name} leads to: {line}"


def public_names(path: Path) -> Iterator[str]:
    """Classes and functions that a module shows to others."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name


MODULES = [
    path.relative_to(ROOT).with_suffix("")
    for path in sorted((ROOT / "minivllm").rglob("*.py"))
    if not {"course", "assets"} & set(path.parts) and not path.name.startswith("__")
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.as_posix())
def test_the_reference_has_every_public_name_and_leads_to_its_source(module: Path, site: Path) -> None:
    reference = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    page = f"_modules/{module.as_posix()}.html"
    source = (site / page).read_text(encoding="utf-8")
    for name in public_names((ROOT / module).with_suffix(".py")):
        assert f'id="{".".join(module.parts)}.{name}"' in reference, f"{name} is not in the reference"
        assert f'href="../{page}#{name}"' in reference, f"{name} does not lead to its source"
        block = source[source.index(f'<div class="viewcode-block" id="{name}">') :].split("</div>")[0]
        assert re.search(rf"\d(def|class) {name}\b", plain(block)), f"{name} leads elsewhere"


@chapters
def test_the_reference_leads_to_the_cells_that_build_it(path: Path, site: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html")]
    notes = "".join(note for page in pages for note in re.findall(r'<p class="built">.*?</p>', page))
    built = set(re.findall(rf'href="\.\./notebooks/{path.stem}\.html#([^"]+)"', notes))
    exporting = {cell.id for cell in code_cells(path) if cell.source.startswith("#| export ")}
    assert built <= exporting
    assert bool(built) == bool(exporting)


# --- in the browser ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with serve(site) as address:
        yield address


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A tab of the width of a desk."""
    context = browser.new_context(base_url=address, viewport={"width": DESKTOP, "height": 900}, color_scheme="light")
    yield context.new_page()
    context.close()


@dataclass
class Visit:
    """What happened while a page was open on a phone."""

    errors: list[str] = field(default_factory=list)  # in the console
    failures: list[str] = field(default_factory=list)  # requests that were answered by an error, or not at all
    requests: list[str] = field(default_factory=list)
    width: int = 0  # CSS pixels that the page takes
    blank_images: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)  # hints and solutions that did not open


BLANK_IMAGES = "[...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src)"
# What shows of a fold: its summary alone, or more.
SHOWS_CONTENT = "fold => fold.open && fold.clientHeight > fold.querySelector('summary').offsetHeight + 10"


class Watcher:
    """A tab of the width of a phone that visits pages and notes what happens."""

    def __init__(self, browser: Browser) -> None:
        self.page, self.visit = browser.new_page(viewport={"width": PHONE, "height": 844}), Visit()
        self.page.on("console", lambda message: self.note_error(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.note_error(str(error)))
        self.page.on("request", lambda request: self.visit.requests.append(request.url))
        self.page.on("requestfailed", lambda request: self.note_failure(request.url, request.failure))
        self.page.on("response", lambda got: self.note_failure(got.url, got.status) if got.status >= 400 else None)

    def note_error(self, message: str) -> None:
        self.visit.errors.append(message)

    def note_failure(self, url: str, why: object) -> None:
        if why != "net::ERR_ABORTED":  # the tab has gone on to the next page
            self.visit.failures.append(f"{url}: {why}")

    def go(self, url: str) -> Visit:
        self.visit = visit = Visit()
        self.page.goto(url)
        visit.closed = open_folds(self.page)
        visit.width = self.page.evaluate("document.scrollingElement.scrollWidth")
        visit.blank_images = self.page.evaluate(BLANK_IMAGES)
        return visit


def open_folds(page: Page) -> list[str]:
    """Click on every hint and solution; returns those that show nothing."""
    closed = []
    for fold in page.locator("article details").all():
        fold.locator("summary").first.click()
        if not fold.evaluate(SHOWS_CONTENT):
            closed.append(fold.inner_text())
    return closed


@pytest.fixture(scope="module")
def visits(browser: Browser, address: str, pages: dict[str, Parsed]) -> dict[str, Visit]:
    """Each page, opened once on a phone, with everything unfolded."""
    watcher = Watcher(browser)
    return {page: watcher.go(f"{address}/{page}") for page in pages}


def told(visits: dict[str, Visit], what: str) -> list[str]:
    return [f"{page}: {thing}" for page, visit in visits.items() for thing in getattr(visit, what)]


@needs_browser
def test_no_page_has_an_error(visits: dict[str, Visit]) -> None:
    assert told(visits, "errors") == []
    assert told(visits, "failures") == []


@needs_browser
def test_no_page_asks_another_machine(visits: dict[str, Visit], address: str) -> None:
    asked = [(page, url) for page, visit in visits.items() for url in visit.requests]
    assert asked
    assert [f"{page}: {url}" for page, url in asked if not url.startswith((f"{address}/", "data:"))] == []


@needs_browser
def test_every_page_fits_on_a_phone(visits: dict[str, Visit]) -> None:
    assert {page: visit.width for page, visit in visits.items() if visit.width > PHONE} == {}


@needs_browser
def test_every_image_is_shown(visits: dict[str, Visit]) -> None:
    assert told(visits, "blank_images") == []


@needs_browser
def test_every_hint_and_solution_opens(visits: dict[str, Visit], pages: dict[str, Parsed]) -> None:
    assert told(visits, "closed") == []


@needs_browser
def test_solutions_are_set_as_code(page: Page) -> None:
    page.goto("notebooks/03_block_manager.html")
    fold = page.locator("details", has_text="Solution").first
    expect(fold.locator(".highlight")).to_be_hidden()
    fold.locator("summary").click()
    expect(fold.locator(".highlight-python .highlight span.c1").first).to_be_visible()


@needs_browser
def test_search_finds_the_block_table_in_its_chapter(page: Page) -> None:
    page.goto("index.html")
    page.keyboard.press("Control+k")
    page.locator("dialog input[type=search]").fill("block table")
    page.keyboard.press("Enter")
    first = page.locator("#search-results li a").first
    expect(first).to_have_text("03 · The block manager", timeout=20_000)
    first.click()
    expect(page.locator("article h1")).to_contain_text("03 · The block manager")
    expect(page.locator("article strong", has_text="block table").first).to_be_attached()


def brightness(page: Page) -> float:
    """Of the page's background, from 0 to 255."""
    red, green, blue = re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    return (int(red) + int(green) + int(blue)) / 3


@needs_browser
def test_the_reader_can_switch_to_the_dark(page: Page) -> None:
    page.goto("notebooks/00_start_here.html")
    assert brightness(page) > 200
    page.locator("button.theme-switch-button:visible").click()
    page.locator(".theme-switch-container button:visible", has_text="Dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert brightness(page) < 60
    page.goto("notebooks/01_qwen3_from_scratch.html")
    assert brightness(page) < 60  # and it is remembered


@needs_browser
def test_a_system_in_the_dark_gets_dark_pages(browser: Browser, address: str) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(f"{address}/index.html")
    assert brightness(page) < 60
    page.close()


@needs_browser
def test_a_button_turns_the_page(page: Page) -> None:
    page.goto("notebooks/10_gpu_performance.html")
    page.locator("a.right-next").click()
    expect(page.locator("article h1")).to_contain_text("11 · The audit again")


@needs_browser
def test_an_export_note_opens_the_source_at_its_line(page: Page) -> None:
    page.goto("notebooks/03_block_manager.html")
    page.locator("p.exported a", has_text="slot_of").first.click()
    expect(page.locator("article h1")).to_contain_text("minivllm.core.block_manager")
    expect(page.locator(".linenos:target")).to_be_in_viewport()
