"""What chapter 00 promises: that the words it explains are the audit's, and that each blocker falls where it says."""

from pathlib import Path

import pytest
from chapters import NOTEBOOKS, ROOT, read

from minivllm.audit import BLOCKERS, KEYWORDS, Row
from minivllm.course.checks.ch00 import FALLS_AFTER, WORDS
from minivllm.course.stages import rows_of_inherited, rows_of_stage

CHAPTERS = {path.name[:2] for path in NOTEBOOKS}
PROSE = "\n".join(cell.source for cell in read(NOTEBOOKS[0]).cells if cell.cell_type == "markdown")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "notebooks")


def standing(rows: tuple[Row, ...]) -> set[str]:
    return {row.key for row in rows if row.blocker}


@pytest.mark.parametrize(("blocker", "chapter"), FALLS_AFTER.items(), ids=list(FALLS_AFTER))
def test_a_blocker_falls_in_its_chapter(blocker: str, chapter: int) -> None:
    before, after = f"{chapter - 1:02d}", f"{chapter:02d}"
    if not {before, after} <= CHAPTERS:
        pytest.skip(f"chapters {before} and {after} are not both there")
    assert blocker in standing(rows_of_stage(before))
    assert blocker not in standing(rows_of_stage(after))


def test_all_four_stand_in_the_inherited_engine() -> None:
    assert standing(rows_of_inherited()) == FALLS_AFTER.keys() == BLOCKERS.keys()


@pytest.mark.parametrize("text", [*BLOCKERS.values(), "结论", "实现状态", "阻塞项", "不是", "未实现", "已实现"])
def test_each_chinese_phrase_is_explained(text: str) -> None:
    assert text in PROSE


def test_chapter_counts_the_words_right() -> None:
    assert len(WORDS) == 8 and len(KEYWORDS) == 3
    assert "Here are eight of them, in three groups" in PROSE


def test_the_inherited_tree_is_not_touched_by_the_checks() -> None:
    from minivllm.course.exercises import Outcome, grade

    before = {path: path.stat().st_mtime_ns for path in Path("inherited").rglob("*.py")}
    assert grade("0.2", "block_size = 16").outcome is Outcome.WRONG
    assert {path: path.stat().st_mtime_ns for path in Path("inherited").rglob("*.py")} == before
