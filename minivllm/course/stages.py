"""The package as it stands after a chapter, and what the audit says about it."""

import functools
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from minivllm import audit


def find_checkout() -> Path:
    """The folder of the course: the first one upwards from here that holds `tools/export.py` and `notebooks/`.

    Raises FileNotFoundError outside a checkout: an installed package has no notebooks to export.
    """
    for folder in [Path.cwd(), *Path.cwd().parents]:
        if (folder / "tools" / "export.py").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise FileNotFoundError(
        f"no checkout of the course above {os.path.basename(Path.cwd())!r}: run this from notebooks/"
    )


def load_exporter(checkout: Path) -> ModuleType:
    """`tools/export.py` as a module: it is a tool beside the package, not a part of it."""
    spec = importlib.util.spec_from_file_location("minivllm_export", checkout / "tools" / "export.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def chapter_before(chapter: str) -> str:
    """The chapter that comes before this one in `notebooks/`; the first one is before itself."""
    numbers = sorted(path.name[:2] for path in (find_checkout() / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    return max((number for number in numbers if number < chapter), default=chapter)


@functools.cache
def rows_of_stage(chapter: str) -> tuple[audit.Row, ...]:
    """The audit's rows for the package as exported through a chapter ("00" … "11")."""
    checkout = find_checkout()
    with tempfile.TemporaryDirectory() as folder:
        package = load_exporter(checkout).export_through(chapter, Path(folder))
        return tuple(audit.rows(audit.audit(package)))


@functools.cache
def rows_of_inherited() -> tuple[audit.Row, ...]:
    """The audit's rows for the engine that the course starts from."""
    return tuple(audit.rows(audit.audit(find_checkout() / "notebooks" / "inherited")))


def audit_after(chapter: str) -> None:
    """Print the audit row by row: the inherited engine beside the package as exported through `chapter`.

    A row marked → reads differently from the package before this chapter; the last line counts what is still missing.
    """
    before = rows_of_stage(chapter_before(chapter))
    now = rows_of_stage(chapter)
    width = max(len(row.question) for row in now)
    print(f"  {'':{width}}  {'inherited':>16}  {'after ' + chapter:>16}")
    for old, earlier, row in zip(rows_of_inherited(), before, now, strict=True):
        mark = "→" if earlier.value != row.value else " "
        print(f"{mark} {row.question:{width}}  {_say(old.value):>16}  {_say(row.value):>16}")
    missing = [row.key.replace("_", " ") for row in now if row.blocker]
    noun = "blocker" if len(missing) == 1 else "blockers"
    print(f"\n{len(missing)} {noun}" + (f": {', '.join(missing)}" if missing else ": 已实现 paged attention"))


def _say(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
