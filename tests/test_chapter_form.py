"""Every chapter keeps its form: executed in order, small cells, figures with a text and a caption, working links."""

import itertools
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from chapters import NOTEBOOKS, ROOT, check_call, code_cells, exercises, read, tags

MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|tmp|work|Users|opt|usr|var|mnt)/\w|\b[A-Z]:\\\\?\w")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|<img[^>]+src=\"([^\"]+)\"")
KNOWN_TAGS = {"preview", "nbval-ignore-output"}

chapters = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def sizes(path: Path) -> list[int]:
    return [len(cell.source.rstrip().splitlines()) for cell in code_cells(path)]


def test_there_are_chapters() -> None:
    assert NOTEBOOKS and NOTEBOOKS[0].name == "00_start_here.ipynb"
    assert [path.name[:2] for path in NOTEBOOKS] == sorted({path.name[:2] for path in NOTEBOOKS})


@chapters
def test_every_code_cell_was_executed_in_order(path: Path) -> None:
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))


@chapters
def test_no_cell_failed_or_wrote_to_stderr(path: Path) -> None:
    for cell in code_cells(path):
        for output in cell.outputs:
            assert output.output_type != "error", f"{cell.id}: {output.get('evalue')}"
            assert output.get("name") != "stderr", f"{cell.id}: {output.text[:200]}"


@chapters
def test_cells_are_small(path: Path) -> None:
    lines = sizes(path)
    assert statistics.median(lines) <= 8
    assert sorted(lines)[int(0.9 * (len(lines) - 1))] <= 20
    assert max(lines) <= 40, f"the longest cell: {code_cells(path)[lines.index(max(lines))].id}"


@chapters
def test_at_most_three_code_cells_without_prose(path: Path) -> None:
    for kind, run in itertools.groupby(read(path).cells, key=lambda cell: cell.cell_type):
        cells = list(run)
        assert kind != "code" or len(cells) <= 3, f"{len(cells)} code cells in a row from {cells[0].id}"


@chapters
def test_figures_have_a_text_and_a_caption(path: Path) -> None:
    cells = read(path).cells
    for cell, following in itertools.pairwise([*cells, None]):
        images = [o for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
        for output in images:
            assert len(output.metadata.get("image/png", {}).get("alt", "")) >= 20, f"{cell.id}: no alt text"
        if images:
            caption = following is not None and following.cell_type == "markdown" and following.source.startswith("*")
            assert caption, f"{cell.id}: the next cell must begin with the caption in italics"


@chapters
def test_metadata_is_portable(path: Path) -> None:
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert set(tags(cell)) <= KNOWN_TAGS, f"{cell.id}: unknown tags {tags(cell)}"


@chapters
def test_a_cell_that_is_not_compared_says_why(path: Path) -> None:
    for cell in code_cells(path):
        if "nbval-ignore-output" in tags(cell) or "NBVAL_" in cell.source:
            assert "# not compared:" in cell.source, f"{cell.id}: say why in a comment `# not compared: …`"


@chapters
def test_no_path_of_a_machine(path: Path) -> None:
    for cell in read(path).cells:
        texts = [cell.source, *(o.get("text", "") for o in cell.get("outputs", []))]
        for text in texts:
            assert not MACHINE_PATH.search(text), f"{cell.id}: {MACHINE_PATH.search(text)}"


@chapters
def test_relative_links_and_images_exist(path: Path) -> None:
    for cell in read(path).cells:
        if cell.cell_type != "markdown":
            continue
        for target in (a or b for a, b in LINK.findall(cell.source)):
            if not re.match(r"https?://|mailto:|data:|attachment:", target):
                assert (path.parent / target).exists(), f"{cell.id}: {target} does not exist"


@chapters
def test_the_chapter_has_all_its_parts(path: Path) -> None:
    sources = [cell.source for cell in read(path).cells]
    text = "\n".join(sources)
    assert sources[0].startswith(f"# {path.name[:2]} · ")
    assert "At the end of this chapter" in sources[0]
    assert "except ModuleNotFoundError" in code_cells(path)[0].source
    assert "show_map(" in text and "audit" in text
    assert "## Recap" in text
    assert 3 <= len(exercises(path)) <= 5


@chapters
def test_exercises_are_numbered_and_folded(path: Path) -> None:
    found = exercises(path)
    assert [e.number for e in found] == [f"{int(path.name[:2])}.{k}" for k in range(1, len(found) + 1)]
    for exercise in found:
        assert exercise.solution, f"{exercise.number} has no folded solution"
        assert len(exercise.wrong) >= 2, f"{exercise.number} has {len(exercise.wrong)} planted wrong answers"
    stubs = [cell for cell in code_cells(path) if check_call(cell.source)]
    for cell in stubs:
        printed = "".join(output.get("text", "") for output in cell.outputs)
        assert "not answered yet" in printed, f"{cell.id} is not an unsolved stub"


def test_ruff_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_python_files_are_formatted() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
