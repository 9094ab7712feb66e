"""Checks of chapter 00: letters and calls, a decoy, a block manager under another name, which chapter removes what."""

import ast
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from minivllm.audit import (
    GIVING_BACK,
    KEYWORDS,
    PACKAGE,
    TAKING,
    Report,
    audit,
    find,
    is_about_blocks,
    methods_of,
    rows,
    touches,
)
from minivllm.course.exercises import Case, exercise
from minivllm.course.stages import find_checkout

WORDS = sorted({word for words in KEYWORDS.values() for word in words})


def inherited() -> Path:
    return find_checkout() / "notebooks" / "inherited" / PACKAGE


@cache
def audit_with(name: str, text: str) -> Report:
    """The audit of the inherited engine with one module added."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.copytree(inherited(), Path(folder) / PACKAGE))
        (package / f"{name}.py").write_text(text, encoding="utf-8")
        return audit(package)


def changed_rows(report: Report) -> list[str]:
    """Rows that read differently from those of the inherited engine."""
    before = {row.key: row.value for row in rows(audit(inherited()))}
    return [row.key.replace("_", " ") for row in rows(report) if row.value != before[row.key]]


def is_module(text: object) -> Iterator[Case]:
    """The cases that every answer must pass which is the text of a module."""
    yield isinstance(text, str), f"the answer is of type {type(text).__name__}; it should be the text of a module"
    try:
        ast.parse(str(text))
    except (SyntaxError, ValueError) as error:
        yield False, f"Python cannot read your module: {error}"


@exercise("0.1")
def lines_with_the_letters(first: int, second: int) -> Iterator[Case]:
    lines = (inherited() / "utils" / "context.py").read_text(encoding="utf-8").splitlines()
    found = [number for number, line in enumerate(lines, start=1) if "set_context" in line]
    for name, answer in (("first", first), ("second", second)):
        yield isinstance(answer, int), f"the {name} line: {answer!r} is not a whole number"
        yield 1 <= answer <= len(lines), f"the {name} line: the file has lines 1 to {len(lines)}"
        reason = f"the {name} line: line {answer} is {lines[answer - 1].strip()!r}, without the letters set_context"
        yield answer in found, reason
    yield first != second, "twice the same line: look further for the letters, inside of longer names too"


@exercise("0.2")
def decoy(text: str) -> Iterator[Case]:
    yield from is_module(text)
    report = audit_with("decoy", text)
    entry = next((e for e in report["file_scan_results"] if e["file"] == f"{PACKAGE}/decoy.py"), {})
    code, comments = (
        {word: n for group in entry.get(key, {}).values() for word, n in group.items()}
        for key in ("hits", "hits_in_comments")
    )
    for word in WORDS:
        yield word in code, f"grep does not find {word!r} in your module"
        yield word not in comments, f"{word!r} stands in a comment or a docstring, where a smarter grep would not look"
    changed = ", ".join(changed_rows(report))
    yield not changed, f"grep is fooled, but this is more than a decoy: the audit's answer changed too ({changed})"


def missing_in(cls: ast.ClassDef) -> str:
    """The first thing for which the audit does not take a class for a block manager."""
    methods = methods_of(cls)
    if not is_about_blocks(cls):
        return f"no name in class {cls.name} contains 'block'"
    for verbs, part in ((TAKING, "takes blocks"), (GIVING_BACK, "gives them back")):
        known = " or ".join(f"'{verb}'" for verb in verbs)
        if not any(name.startswith(verbs) for name in methods):
            return f"no method of {cls.name} has a name that begins with {known}, so none {part}"
        if not touches(methods, verbs, "free"):
            data = "data of `self` with 'free' in its name, methods not counted"
            return f"the method of {cls.name} that {part} touches no {data}"
    return "its parts are in different classes"


@exercise("0.3")
def manager_by_another_name(text: str) -> Iterator[Case]:
    yield from is_module(text)
    for word in WORDS:
        yield word not in text, f"grep finds {word!r} in your module"
    classes = list(find(ast.parse(text), ast.ClassDef))
    yield bool(classes), "there is no class in your module"
    changed = changed_rows(audit_with("shelf", text))
    yield "block manager" in changed, f"the audit sees no block manager: {missing_in(classes[0])}"
    others = ", ".join(row for row in changed if row != "block manager")
    yield not others, f"another row of the audit changed too ({others})"


# The rows of a later chapter's package are what proves these (tests/test_first_chapter.py).
FALLS_AFTER = {"block_manager": 3, "scheduler": 8, "set_context": 5, "block_tables": 5}


@exercise("0.4")
def chapters_of_blockers(block_manager: int, scheduler: int, set_context: int, block_tables: int) -> Iterator[Case]:
    for answer in (block_manager, scheduler, set_context, block_tables):
        yield isinstance(answer, int | float), f"{answer!r} is not a number"
    on_map = "the number in its box on the map is the chapter that builds it"
    yield block_manager == FALLS_AFTER["block_manager"], f"the block manager: {on_map}"
    yield scheduler == FALLS_AFTER["scheduler"], f"the scheduler: {on_map}"
    yield set_context == FALLS_AFTER["set_context"], "set_context: who has something to put into the Context first?"
    yield (
        block_tables > FALLS_AFTER["block_manager"],
        "block_tables: from there on there are tables, but no layer sees one",
    )
    yield block_tables == FALLS_AFTER["block_tables"], "block_tables: attention can read it before any kernel does"
