"""Reading times are counted and running times recorded as `tools/chapter_times.py` says."""

import datetime
from pathlib import Path

import chapter_times
import pytest
from nbformat import NotebookNode, v4


@pytest.fixture
def notebook() -> NotebookNode:
    promise = "# 03 · Blocks\n\n> About 35 minutes to read, 10 seconds to run on a laptop."
    hint = "<details><summary>Hint</summary>\n\nThree\n\n</details>"
    exercise = f"### Exercise 3.1 (predict, then check)\n\nOne two.\n\n{hint}"
    code = v4.new_code_cell("a = 1\n\nb = 2")
    code.outputs = [v4.new_output("display_data", {"image/png": "", "text/plain": "figure"})]
    return v4.new_notebook(cells=[v4.new_markdown_cell(promise), code, v4.new_markdown_cell(exercise)])


def test_what_there_is_to_read_is_counted_without_what_is_folded(notebook: NotebookNode) -> None:
    counts = chapter_times.read(notebook)
    assert counts == chapter_times.Reading(words=25, lines=2, figures=1, exercises=("predict",))
    assert counts.minutes == pytest.approx(25 / 180 + (2 * 2 + 30) / 60)
    assert counts.exercise_minutes == 3


def test_the_promise_is_read_from_the_first_cell(notebook: NotebookNode) -> None:
    assert chapter_times.promise(notebook) == (35, 10)
    notebook.cells[0].source = "# 03 · Blocks\n\n> About half an hour."
    with pytest.raises(ValueError, match="About N minutes to read"):
        chapter_times.promise(notebook)


def test_a_new_record_keeps_the_other_chapters(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    assert chapter_times.recorded(path) == {}
    chapter_times.record({"03": 9.87, "02": 5.0}, path)
    chapter_times.record({"03": 8.04}, path)
    found = chapter_times.recorded(path)
    assert {chapter: each["seconds"] for chapter, each in found.items()} == {"02": 5.0, "03": 8.0}
    assert [*found] == ["02", "03"]
    assert found["03"]["date"] == datetime.date.today().isoformat()
    assert "Python" in found["03"]["machine"]
