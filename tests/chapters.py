"""The chapters as data: what the tests of form, of exercises and of stages read out of a notebook."""

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
SOLUTION = re.compile(r"^```python solution (\d+\.\d+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@cache
def read(path: Path) -> NotebookNode:
    """A notebook; not to be changed."""
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[NotebookNode]:
    """The code cells that are not empty, in order."""
    return [cell for cell in read(path).cells if cell.cell_type == "code" and cell.source.strip()]


def tags(cell: NotebookNode) -> list[str]:
    """The cell's tags."""
    return cell.metadata.get("tags", [])


def check_call(source: str) -> ast.Call | None:
    """The call `check("3.1", answer, …)` that ends an exercise's cell, if it is one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check" and node.args:
            return node
    return None


@dataclass(frozen=True)
class Exercise:
    """A stub's cell, its folded solution, and the planted wrong answers (code that assigns the answers)."""

    number: str
    cell_id: str
    grading: str  # the stub's check as an expression: `grade("3.1", slot, blocks)`
    solution: str | None
    wrong: tuple[str, ...]

    def attempts(self) -> list[tuple[str, str]]:
        """(kind, code) of everything that is graded: the stub as it stands, each wrong answer, the solution."""
        wrong = [(f"wrong {index}", code) for index, code in enumerate(self.wrong)]
        return [("stub", ""), *wrong, ("solution", self.solution or "")]


def exercises(path: Path) -> list[Exercise]:
    """The exercises of a chapter, in order."""
    solutions: dict[str, str] = {}
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            solutions.update(SOLUTION.findall(cell.source))
    planted = ROOT / "tests" / "wrong_answers" / f"{path.name[:2]}.toml"
    wrong = tomllib.loads(planted.read_text(encoding="utf-8")) if planted.exists() else {}
    found = []
    for cell in code_cells(path):
        call = check_call(cell.source)
        if call is None or not isinstance(call.args[0], ast.Constant):
            continue
        number = call.args[0].value
        call.func.id = "grade"
        answers = tuple(wrong.get(number, ()))
        found.append(Exercise(number, cell.id, ast.unparse(call), solutions.get(number), answers))
    return found
