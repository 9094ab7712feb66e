#!/usr/bin/env python3
"""Count the house: lines, functions, comments, types, docstrings and tests, beside engines of the same kind.

    tools/count_house.py            print the table
    tools/count_house.py --write    put it into CONTRIBUTING.md, between its two markers
    tools/count_house.py --check    write nothing; exit 1 where CONTRIBUTING.md is stale

How it counts. A line is a line of the file, blank or not. A function is every `def`, methods and inner functions
included, from its `def` to its last line; the docstring counts. The comment share is the share of the lines that are
not blank and hold a `#` comment, on a line of its own or behind code; docstrings are no comments, and the line that
names the notebook of a generated module is none either. A function is fully typed when each parameter but self and
cls, and the result, has a type; what Triton compiles is left out, since its pointers have no Python type. Public is
what lies at the top of a module or of a public class and has a name that begins with a letter; what a script's `main`
does stands in the docstring of the script.
"""

import argparse
import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- counts: written by tools/count_house.py -->", "<!-- end of counts -->"
AUDITS = ("audit.py", "audit_trace.py")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

MOST_LINES, MOST_FILES, MOST_MEDIAN, MOST_LONGEST = 3_000, 35, 8, 50
LEAST_COMMENTS, MOST_COMMENTS = 0.05, 0.10
ROWS = (
    "lines / files",
    "median / longest function, lines",
    "lines with a comment",
    "functions fully typed",
    "public definitions with a docstring",
    "tests",
)
ANCHORS_READ = "November 2026"
# Read from the projects' own files; in the order of ROWS.
ANCHORS = {
    "nano-vllm": ("1,385 / 19", "8 / 55", "0.2 %", "37 %", "0", "none"),
    "mini-sglang": ("8,086 / 90", "5 / 215", "2.4 %", "84 %", "few", "yes"),
    "tiny-llm, reference": ("5,326 / 30, and 2.6k C++/Metal", "12 / 239", "1.4 %", "84 %", "few", "30+ files"),
    "gpt-fast": ("3,564 / 16", "6 / 166", "7.4 %", "32 %", "few", "yes"),
    "we aim at": (
        f"≤ {MOST_LINES:,} / ≤ {MOST_FILES}",
        f"≤ {MOST_MEDIAN} / ≤ {MOST_LONGEST}",
        f"{LEAST_COMMENTS:.0%} to {MOST_COMMENTS:.0%}".replace("%", " %"),
        "100 %",
        "all",
        "yes, with invariants after every step",
    ),
}


@dataclass
class Counts:
    """What was counted in a set of files."""

    lines: Counter[str] = field(default_factory=Counter)  # file → its lines
    filled: int = 0  # lines that are not blank
    commented: int = 0
    documented: int = 0  # lines of docstrings
    lengths: dict[str, int] = field(default_factory=dict)  # "file: function" → its lines
    typed: list[bool] = field(default_factory=list)  # an entry per function that Triton does not compile
    described: dict[str, bool] = field(default_factory=dict)  # "file: public name" → has it a docstring?

    @property
    def longest(self) -> str:
        """`file: function` of the longest function."""
        return max(self.lengths, key=self.lengths.__getitem__)

    def cells(self) -> tuple[str, ...]:
        """The counts as text, in the order of ROWS but for the tests."""
        return (
            f"{self.lines.total():,} / {len(self.lines)}",
            f"{statistics.median(self.lengths.values()):g} / {self.lengths[self.longest]}",
            f"{100 * self.commented / self.filled:.1f} %",
            share(sum(self.typed), len(self.typed)),
            share(sum(self.described.values()), len(self.described)),
        )


def share(part: int, whole: int) -> str:
    """A share in percent; 100 % only where nothing is missing."""
    return f"{100 * part // whole} %"


def is_compiled(function: FUNCTION) -> bool:
    """Is it a kernel, which Triton compiles?"""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_typed(function: FUNCTION) -> bool:
    """Has each parameter a type, and the result?"""
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    untyped = [each for each in parameters if each and each.annotation is None and each.arg not in ("self", "cls")]
    return not untyped and function.returns is not None


def public(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, FUNCTION | ast.ClassDef]]:
    """(name, node) of the public functions and classes of a module, and of the methods of its public classes."""
    for node in body:
        if not isinstance(node, FUNCTION | ast.ClassDef) or not node.name[0].isalpha():
            continue
        yield owner + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public(node.body, f"{owner}{node.name}.")


def commented_lines(text: str) -> set[int]:
    """The numbers of the lines with a comment, without the header of a generated module and the `#!` of a tool."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    body = (number for number, comment in found.items() if not comment.startswith("#!"))
    return set(body) - (set(range(1, ast.parse(text).body[0].lineno)) if text.startswith("# Generated") else set())


def docstring_lines(tree: ast.Module) -> int:
    """How many lines the docstrings of a module have together."""
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | FUNCTION)]
    texts = [node.body[0] for node in owners if ast.get_docstring(node) is not None]
    return sum(text.end_lineno - text.lineno + 1 for text in texts)


def count(paths: list[Path], base: Path) -> Counts:
    """Counts over some files, which are named from `base`."""
    counts = Counts()
    for path in paths:
        name, text = path.relative_to(base).as_posix(), path.read_text(encoding="utf-8")
        tree, lines = ast.parse(text), text.splitlines()
        counts.lines[name] = len(lines)
        counts.filled += sum(bool(line.strip()) for line in lines)
        counts.commented += len(commented_lines(text))
        counts.documented += docstring_lines(tree)
        for what, node in public(tree.body):
            described = node if what != "main" else tree  # what a script does stands at its top
            counts.described[f"{name}: {what}"] = bool(ast.get_docstring(described))
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION):
                counts.lengths[f"{name}: {node.name}, line {node.lineno}"] = node.end_lineno - node.lineno + 1
                counts.typed += [] if is_compiled(node) else [is_typed(node)]
    return counts


def engine_files() -> list[Path]:
    """The engine: the package without course/ and assets/, and without the two audits."""
    package = ROOT / "minivllm"
    paths = [path for path in sorted(package.rglob("*.py")) if not {"course", "assets"} & set(path.parts)]
    return [path for path in paths if path.name not in AUDITS]


def count_tests() -> str:
    """How many tests there are, in round numbers, so that not every new test makes the page stale."""
    paths = [*(ROOT / "tests").glob("test_*.py")]
    names = [
        node.name
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, FUNCTION) and node.name.startswith("test_")
    ]
    return f"{len(paths) // 10 * 10}+ files, {len(names) // 100 * 100}+ functions, and every notebook"


def table(engine: Counts, tools: Counts) -> list[str]:
    """The Markdown table: ours in front, the anchors behind."""
    columns = {
        "minivllm": (*engine.cells(), count_tests()),
        "its `tools/`": (*tools.cells(), "with the others"),
        **ANCHORS,
    }
    rows = [[row, *(column[number] for column in columns.values())] for number, row in enumerate(ROWS)]
    lines = [["", *columns], ["---"] * (len(columns) + 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def missed(counts: Counts) -> list[str]:
    """The aims that the engine does not reach, a sentence each."""
    lines, files = counts.lines.total(), len(counts.lines)
    median, comments = statistics.median(counts.lengths.values()), counts.commented / counts.filled
    undescribed = [name for name, done in counts.described.items() if not done]
    wrong = {
        f"It has {lines:,} lines, {lines - MOST_LINES:,} more than the aim.": lines > MOST_LINES,
        f"It has {files} files, {files - MOST_FILES} more than the aim.": files > MOST_FILES,
        f"Its median function has {median:g} lines.": median > MOST_MEDIAN,
        f"Its longest function has {counts.lengths[counts.longest]} lines.": (
            counts.lengths[counts.longest] > MOST_LONGEST
        ),
        f"{100 * comments:.1f} % of its lines have a comment.": not LEAST_COMMENTS <= comments <= MOST_COMMENTS,
        f"{counts.typed.count(False)} functions lack a type.": not all(counts.typed),
        f"{len(undescribed)} public definitions lack a docstring.": bool(undescribed),
    }
    return [sentence for sentence, is_missed in wrong.items() if is_missed]


def where(counts: Counts) -> list[str]:
    """A Markdown table of the lines and files of each part of the engine, the largest first."""
    parts: dict[str, list[int]] = {}
    for name, lines in counts.lines.items():
        part = f"`{name.split('/')[0]}/`" if "/" in name else "`*.py` at the top"
        parts.setdefault(part, []).append(lines)
    ordered = sorted(parts.items(), key=lambda item: -sum(item[1]))
    rows = [f"| {part} | {sum(lines):,} | {len(lines)} |" for part, lines in ordered]
    return ["| part | lines | files |", "|---|---|---|", *rows]


def longest_sentence(engine: Counts, tools: Counts) -> str:
    """Names the longest functions."""

    def place(counts: Counts) -> str:
        return f"`{counts.longest.rsplit(',', 1)[0]}`"

    return f"The longest function of the engine is {place(engine)}, the longest of the tools {place(tools)}."


def report() -> str:
    """All that stands between the markers of CONTRIBUTING.md."""
    engine, tools = count(engine_files(), ROOT / "minivllm"), count([*(ROOT / "tools").glob("*.py")], ROOT / "tools")
    audits = count([ROOT / "minivllm" / name for name in AUDITS], ROOT / "minivllm")
    note = (
        "`minivllm/` is counted without `course/` and `assets/`, which serve the notebooks, and without the audit "
        f"(`{'`, `'.join(AUDITS)}`), which adds {audits.lines.total():,} lines in {len(audits.lines)} files. Of the "
        f"engine's lines {engine.lines.total() - engine.filled:,} are blank and {engine.documented:,} are docstrings. "
        f"The other engines' numbers were read from their own files in {ANCHORS_READ}."
    )
    misses = missed(engine)
    verdict = "**Missed.** " + " ".join(misses) if misses else "Every aim is reached."
    parts = ["\n".join(table(engine, tools)), note, longest_sentence(engine, tools), verdict, "\n".join(where(engine))]
    return "\n\n".join(parts)


def updated(page: str) -> str:
    """CONTRIBUTING.md with the counts of now. Raises ValueError when a marker is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} must have the lines `{BEGIN}` and `{END}`: the counts go between them")
    return f"{before}{BEGIN}\n\n{report()}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update CONTRIBUTING.md")
    parser.add_argument("--check", action="store_true", help="is CONTRIBUTING.md up to date?")
    options = parser.parse_args()
    if not (options.write or options.check):
        print(report())
        return 0
    page = PAGE.read_text(encoding="utf-8")
    fresh = updated(page)
    if options.check and fresh != page:
        print(f"the counts in {PAGE.name} are stale: run tools/count_house.py --write", file=sys.stderr)
        return 1
    if options.write and fresh != page:
        PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
