"""Chapter 11 maps every module of the engine to vLLM: none is forgotten, and none is named that does not exist."""

import re

from chapters import NOTEBOOKS, ROOT, read

PACKAGE = ROOT / "minivllm"


def test_every_module_is_on_the_map() -> None:
    chapter = next(path for path in NOTEBOOKS if path.name.startswith("11_"))
    cell = next(cell for cell in read(chapter).cells if "## Where everything is in vLLM" in cell.source)
    ours = {
        name for row in cell.source.splitlines() for name in re.findall(r"`([\w/]+(?:\.py|/\*))`", row.split(" | ")[0])
    }
    named = {path.relative_to(PACKAGE).as_posix() for name in ours for path in PACKAGE.glob(name)}
    modules = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    modules = {name for name in modules if name.split("/")[0] not in ("course", "assets")}
    assert {name for name in named if not name.endswith("__init__.py")} == modules
