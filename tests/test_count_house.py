"""The counts of CONTRIBUTING.md are those of the code, and the counting counts right."""

from pathlib import Path

import count_house
import pytest

SOURCE = '''# Generated from notebooks/03_block_manager.ipynb by tools/export.py; edit there.
"""Blocks."""

A = 1  # of four tokens


class Blocks:
    """Counts blocks."""

    def take(self, number: int) -> int:
        # the last one first

        return number

    def _give(self, block):
        return block


class _Hidden:
    def go(self) -> None: ...


@triton.jit
def kernel(pointer, SIZE: tl.constexpr):
    """Loads # numbers."""
    tl.load(pointer)
'''


@pytest.fixture
def counts(tmp_path: Path) -> count_house.Counts:
    path = tmp_path / "blocks.py"
    path.write_text(SOURCE, encoding="utf-8")
    return count_house.count([path], tmp_path)


def test_the_counts_in_contributing_are_those_of_now() -> None:
    page = count_house.PAGE.read_text(encoding="utf-8")
    assert count_house.updated(page) == page, "run tools/count_house.py --write"


def test_lines_and_comments_are_counted_without_the_header_and_without_strings(counts: count_house.Counts) -> None:
    assert dict(counts.lines) == {"blocks.py": 26}
    assert counts.filled == 16
    assert counts.commented == 2
    assert counts.documented == 3


def test_functions_have_a_length_and_kernels_need_no_types(counts: count_house.Counts) -> None:
    assert sorted(counts.lengths.values()) == [1, 2, 3, 4]
    assert counts.longest.startswith("blocks.py: take")
    assert sorted(counts.typed) == [False, True, True]


def test_public_is_what_lies_in_public_places(counts: count_house.Counts) -> None:
    described = {"blocks.py: Blocks": True, "blocks.py: Blocks.take": False, "blocks.py: kernel": True}
    assert counts.described == described


def test_what_is_missed_is_said(counts: count_house.Counts) -> None:
    assert count_house.missed(counts) == [
        "12.5 % of its lines have a comment.",
        "1 functions lack a type.",
        "1 public definitions lack a docstring.",
    ]


@pytest.mark.parametrize(("part", "whole", "said"), [(199, 200, "99 %"), (200, 200, "100 %"), (1, 3, "33 %")])
def test_a_share_is_rounded_down(part: int, whole: int, said: str) -> None:
    assert count_house.share(part, whole) == said


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="the counts go between them"):
        count_house.updated("# Contributing\n")


def test_the_table_has_a_cell_for_each_row_and_engine() -> None:
    assert {len(column) for column in count_house.ANCHORS.values()} == {len(count_house.ROWS)}
