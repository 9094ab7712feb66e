#!/usr/bin/env python3
"""Build and execute the notebooks.

    tools/notebooks.py run [03 04 …]        execute notebooks in place (all when none is named), figures into figures/
    tools/notebooks.py run --record …       the same, and note how long each took, in figures/data/chapter_times.json
    tools/notebooks.py script 03            print a notebook as a percent script, which is easier to edit
    tools/notebooks.py build draft.py …     write the notebook from such a script, export the package, execute it

A script named `03_block_manager.py` becomes `notebooks/03_block_manager.ipynb`. The notebook is what is committed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from chapter_times import record
from export import chapters
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def tidy(notebook: NotebookNode, chapter: str) -> NotebookNode:
    """Metadata and cell ids that do not change from machine to machine and from run to run."""
    notebook.metadata = NotebookNode(kernelspec=KERNEL, language_info={"name": "python"})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells):
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode({"tags": tags} if tags else {})
        cell.id = f"c{chapter}-{index:03d}"
    return notebook


def execute(path: Path) -> float:
    """Run a notebook in place from a fresh kernel, in how many seconds; where a cell fails, keep what was printed."""
    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    os.environ["MINIVLLM_FIGURES"] = str(ROOT / "figures")
    # The engine's console scripts and the audit are called from cells: let them find this checkout's interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # a text that was printed piece by piece is one output
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute()
    finally:
        nbformat.write(tidy(notebook, path.name[:2]), path)
    seconds = time.perf_counter() - start
    print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} code cells, {seconds:.1f} s")
    return seconds


def build(script: Path) -> Path:
    """Write the notebook of a percent script, with no outputs yet."""
    notebook = tidy(jupytext.read(script, fmt="py:percent"), script.name[:2])
    path = NOTEBOOKS / f"{script.stem}.ipynb"
    nbformat.write(notebook, path)
    return path


def find(names: list[str]) -> list[Path]:
    """The notebooks of the named chapters, or all of them, in order."""
    return [path for path in chapters() if not names or path.name[:2] in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "script", "build"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--record", action="store_true", help="keep the times; the machine should do nothing else")
    arguments = parser.parse_intermixed_args()  # `run --record 03` as well as `run 03 --record`
    if arguments.command == "script":
        for path in find(arguments.names):
            print(jupytext.writes(nbformat.read(path, as_version=4), fmt="py:percent"))
        return
    if arguments.command == "build":
        paths = [build(Path(name)) for name in arguments.names]
        subprocess.run([sys.executable, str(ROOT / "tools" / "export.py")], check=True)
    else:
        paths = find(arguments.names)
    seconds = {path.name[:2]: execute(path) for path in paths}
    if arguments.record:
        record(seconds)


if __name__ == "__main__":
    main()
