"""Chapter k runs on the package that chapters 00 to k − 1 export, and its exercises judge right.

Each chapter is executed once, without its `preview` cells (they show an end state with the finished package), with
every exercise tried in four ways or more: the stub as it stands, the planted wrong answers, the folded solution.
"""

import copy
import json
import os
from functools import cache
from pathlib import Path

import export
import nbformat
import pytest
from chapters import NOTEBOOKS, Exercise, exercises, read, tags
from nbclient import NotebookClient

ATTEMPTS = [
    pytest.param(path, exercise, kind, id=f"{exercise.number}-{kind}")
    for path in NOTEBOOKS
    for exercise in exercises(path)
    for kind, _ in exercise.attempts()
]
CHAPTERS = [pytest.param(path, id=path.stem) for path in NOTEBOOKS]


def graded(exercise: Exercise, kind: str, code: str) -> nbformat.NotebookNode:
    """A cell that tries an answer and prints its verdict as one line of JSON."""
    verdict = f"verdict = {exercise.grading}"
    printing = f"print('@@', json.dumps([{exercise.number!r}, {kind!r}, verdict.outcome.name, verdict.reason]))"
    lines = ["import json", "from minivllm.course.exercises import grade", code, verdict, printing]
    return nbformat.v4.new_code_cell("\n".join(lines))


def with_attempts(path: Path) -> nbformat.NotebookNode:
    """The chapter without its previews and outputs, every exercise followed by all that is tried on it."""
    notebook = copy.deepcopy(read(path))
    attempts = {exercise.cell_id: exercise for exercise in exercises(path)}
    cells = []
    for cell in notebook.cells:
        if cell.cell_type != "code" or "preview" in tags(cell):
            continue
        cells.append(cell)
        if exercise := attempts.get(cell.id):
            cells += [graded(exercise, kind, code) for kind, code in exercise.attempts()]
    notebook.cells = cells
    return notebook


@cache
def outcome_of(path: Path, stage: Path) -> dict[tuple[str, str], tuple[str, str]] | Exception:
    """The verdicts of a chapter, or what its execution raised: kept too, so that a failing chapter runs only once."""
    try:
        return run_on_earlier_chapters(path, stage)
    except Exception as error:
        return error


def verdicts_of(path: Path, stage: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """{(number, kind): (outcome, reason)} of a chapter. Raises what its execution raised."""
    outcome = outcome_of(path, stage)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def run_on_earlier_chapters(path: Path, stage: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Execute the chapter on the package of the chapters before it."""
    earlier = NOTEBOOKS[max(0, NOTEBOOKS.index(path) - 1)]
    export.export_through(earlier.name[:2], stage)
    environment = {**os.environ, "PYTHONPATH": str(stage)}
    notebook = with_attempts(path)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute(env=environment)
    verdicts = {}
    for cell in notebook.cells:
        printed = "".join(output.get("text", "") for output in cell.get("outputs", []))  # may come in pieces
        for line in printed.splitlines():
            if line.startswith("@@ "):
                number, kind, outcome, reason = json.loads(line[3:])
                verdicts[number, kind] = outcome, reason
    return verdicts


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    return {path: tmp_path_factory.mktemp(path.stem) for path in NOTEBOOKS}


@pytest.mark.parametrize("path", CHAPTERS)
def test_runs_on_the_chapters_before_it(path: Path, stages: dict[Path, Path]) -> None:
    verdicts = verdicts_of(path, stages[path])
    assert len(verdicts) == sum(len(exercise.attempts()) for exercise in exercises(path))


@pytest.mark.parametrize(("path", "exercise", "kind"), ATTEMPTS)
def test_exercise_judges(path: Path, exercise: Exercise, kind: str, stages: dict[Path, Path]) -> None:
    outcome, reason = verdicts_of(path, stages[path])[exercise.number, kind]
    expected = {"stub": "UNANSWERED", "solution": "RIGHT"}.get(kind, "WRONG")
    assert outcome == expected, reason
    assert reason or outcome != "WRONG", "a wrong answer must be told which case failed"


def test_the_package_is_what_the_notebooks_export() -> None:
    assert export.main(["--check"]) == 0
