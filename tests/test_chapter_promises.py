"""Each chapter's promise tells the truth about the minutes to read it and the seconds to run it."""

from pathlib import Path

import chapter_times
import pytest
from chapters import NOTEBOOKS, read

chapters = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@chapters
def test_the_promised_reading_time_is_the_counted_one_to_five_minutes(path: Path) -> None:
    (stated, _), counted = chapter_times.promise(read(path)), chapter_times.read(read(path)).minutes
    assert stated % 5 == 0, f"{stated} minutes: state it to five minutes"
    # Rounding alone would move with every sentence that is mended: 37.4 is 35, 37.6 is 40.
    assert abs(stated - counted) <= 4, f"{stated} minutes are promised, {counted:.0f} were counted"


@chapters
def test_no_chapter_ran_longer_than_it_promises(path: Path) -> None:
    recorded = chapter_times.recorded()
    if not recorded:
        pytest.skip(f"nothing was recorded yet: {chapter_times.COMMAND}")
    _, stated = chapter_times.promise(read(path))
    assert path.name[:2] in recorded, f"never recorded: {chapter_times.COMMAND} {path.name[:2]}"
    assert recorded[path.name[:2]]["seconds"] <= stated


def test_the_record_names_no_chapter_that_is_not_there() -> None:
    assert set(chapter_times.recorded()) <= {path.name[:2] for path in NOTEBOOKS}
