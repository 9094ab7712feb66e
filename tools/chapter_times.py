#!/usr/bin/env python3
"""How long a chapter takes: to read, by counting; to run, as it was recorded.

    tools/chapter_times.py     a line per chapter: what its promise says, what was counted, what was recorded

Reading time is counted, not measured: prose at 180 words a minute, a line of code in 2 seconds, a look at a figure in
30. (The mean of silent reading is 238 words a minute for non-fiction, Brysbaert 2019,
https://doi.org/10.1016/j.jml.2019.104047; a text that one works through takes longer.) Hints and solutions are folded
and do not count, and neither does the time in which an exercise is solved: that is listed beside it, at a few minutes
for each kind. A chapter's promise names its reading time to five minutes.

Running time is measured: `tools/notebooks.py run --record` writes the seconds of each notebook that it runs to
figures/data/chapter_times.json. Record on a machine that does nothing else.
"""

import datetime
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
from export import chapters
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "figures" / "data" / "chapter_times.json"
COMMAND = "tools/notebooks.py run --record"
WORDS_PER_MINUTE, SECONDS_PER_LINE, SECONDS_PER_FIGURE = 180, 2, 30
MINUTES_PER_EXERCISE = {"predict": 3, "code": 8, "break it": 6, "stretch": 12}
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
EXERCISE = re.compile(r"^### Exercise \d+\.\d+ \((predict|code|break it|stretch)", re.MULTILINE)
PROMISE = re.compile(r"About (\d+) minutes to read, (\d+) seconds to run")


@dataclass(frozen=True)
class Reading:
    """What there is to read in a chapter."""

    words: int  # of prose, without what is folded
    lines: int  # of code, not counting blank ones
    figures: int
    exercises: tuple[str, ...]  # the kind of each

    @property
    def minutes(self) -> float:
        """Minutes to read, without solving the exercises."""
        seconds = self.lines * SECONDS_PER_LINE + self.figures * SECONDS_PER_FIGURE
        return self.words / WORDS_PER_MINUTE + seconds / 60

    @property
    def exercise_minutes(self) -> int:
        """Minutes to solve the exercises."""
        return sum(MINUTES_PER_EXERCISE[kind] for kind in self.exercises)


def read(notebook: NotebookNode) -> Reading:
    """Count what there is to read in a notebook."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    lines = [line for cell in code for line in cell.source.splitlines() if line.strip()]
    outputs = [output for cell in code for output in cell.outputs]
    return Reading(
        words=len(FOLDED.sub("", prose).split()),
        lines=len(lines),
        figures=sum("image/png" in output.get("data", {}) for output in outputs),
        exercises=tuple(EXERCISE.findall(prose)),
    )


def promise(notebook: NotebookNode) -> tuple[int, int]:
    """(minutes to read, seconds to run) as the first cell states them. Raises ValueError where it does not."""
    found = PROMISE.search(notebook.cells[0].source)
    if not found:
        raise ValueError("the first cell must say `About N minutes to read, M seconds to run`")
    return int(found[1]), int(found[2])


def machine() -> str:
    """The processor, the cores that this process may use, and Python."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {cores} cores, Python {platform.python_version()}"


def recorded(path: Path = RECORD) -> dict[str, dict[str, str | float]]:
    """{"03": {"seconds": …, "date": …, "machine": …}}: the record of each chapter; {} where there is none yet."""
    return json.loads(path.read_text(encoding="utf-8"))["chapters"] if path.exists() else {}


def record(seconds: dict[str, float], path: Path = RECORD) -> None:
    """Put the seconds of these chapters into the record; other chapters keep theirs."""
    today = datetime.date.today().isoformat()
    new = {
        chapter: {"seconds": round(each, 1), "date": today, "machine": machine()} for chapter, each in seconds.items()
    }
    content = {"command": COMMAND, "chapters": dict(sorted((recorded(path) | new).items()))}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    runs, to_read, to_solve = recorded(), 0.0, 0.0
    print("chapter  read: said  counted  exercises   run: said  recorded")
    for path in chapters():
        notebook, chapter = nbformat.read(path, as_version=4), path.name[:2]
        counts, (minutes, seconds) = read(notebook), promise(notebook)
        run = f"{runs[chapter]['seconds']:.1f} s" if chapter in runs else "–"
        read_columns = f"{minutes:8} min {counts.minutes:4.0f} min {counts.exercise_minutes:6} min"
        print(f"{chapter:7} {read_columns} {seconds:9} s {run:>9}")
        to_read, to_solve = to_read + counts.minutes, to_solve + counts.exercise_minutes
    print(f"all: {to_read / 60:.1f} hours to read, {to_solve / 60:.1f} for the exercises")


if __name__ == "__main__":
    main()
