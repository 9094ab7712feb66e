"""What a newcomer meets first: the two commands, the pins, the conda environment, the README and its tables."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from chapters import NOTEBOOKS, ROOT, read
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)#\s]+)\)")


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def ranges() -> dict[str, Requirement]:
    """Every requirement of the project, in all extras, but for the project itself."""
    extras = PROJECT["optional-dependencies"].values()
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    found = {canonicalize_name(Requirement(text).name): Requirement(text) for text in texts}
    return {name: requirement for name, requirement in found.items() if name != PROJECT["name"]}


# --- versions ---


def test_every_requirement_is_pinned_and_every_pin_is_required() -> None:
    assert pins().keys() == ranges().keys()


@pytest.mark.parametrize("name", sorted(ranges()))
def test_a_pin_is_one_version_inside_the_range(name: str) -> None:
    pin, wanted = pins()[name], ranges()[name]
    (only,) = pin.specifier
    assert only.operator == "==" and only.version in wanted.specifier
    assert str(pin.marker) == str(wanted.marker)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_python_is_supported(version: str) -> None:
    assert version in SpecifierSet(PROJECT["requires-python"])
    assert ("3.10" in SpecifierSet(PROJECT["requires-python"])) is False
    assert ("3.14" in SpecifierSet(PROJECT["requires-python"])) is False


# --- conda ---


@pytest.fixture(scope="module")
def environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def test_environment_has_the_python_of_the_project(environment: dict) -> None:
    packages = [Requirement(package) for package in environment["dependencies"] if isinstance(package, str)]
    by_name = {package.name: package.specifier for package in packages}
    assert by_name.keys() == {"python", "pip", "make"}
    assert by_name["python"] == SpecifierSet(PROJECT["requires-python"])
    assert environment["name"] == PROJECT["name"]


def test_environment_installs_what_make_installs(environment: dict) -> None:
    """The Makefile's pip lines, and the pip section, name the same things in the same order."""
    (section,) = [part["pip"] for part in environment["dependencies"] if isinstance(part, dict)]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    installs = re.findall(r"pip install --quiet -c (\S+) (.+)", makefile)
    assert {constraints for constraints, _ in installs} == {"constraints.txt"}
    assert section == ["-c constraints.txt", *(what.replace("'", "") for _, what in installs)]
    extra = re.fullmatch(r"-e \.\[(\w+)\]", section[-1])
    assert extra and extra[1] in PROJECT["optional-dependencies"]
    assert (ROOT / "constraints.txt").is_file() and section[1] in ranges()


# --- make ---

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is set up: nothing is installed in it, but make thinks so."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    ready = tmp_path / ".venv" / ".installed"
    ready.parent.mkdir()
    ready.touch()
    return tmp_path


def commands(checkout: Path, target: str) -> str:
    """What `make` would do, without doing it."""
    return subprocess.run(
        ["make", "-n", target], cwd=checkout, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    ).stdout


@needs_make
@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("lab", "jupyter lab notebooks/00_start_here.ipynb"),
        ("test", "pytest --nbval"),
        ("test", "export.py --check"),
        ("export", "tools/export.py"),
        ("export", "tools/count_house.py --write"),
        ("notebooks", "tools/notebooks.py run"),
        ("lint", "ruff check"),
    ],
)
def test_make_does_what_is_promised_and_installs_once(checkout: Path, target: str, command: str) -> None:
    done = commands(checkout, target)
    assert command in done
    assert "pip" not in done
    assert f"make {target} " in (README if target in ("lab", "test") else GUIDE)


@needs_make
@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "constraints.txt", None], ids=["ranges", "pins", "nothing there"]
)
def test_make_installs_when_it_must(checkout: Path, changed: str | None) -> None:
    ready = checkout / ".venv" / ".installed"
    if changed is None:
        shutil.rmtree(checkout / ".venv")
    else:
        new = ready.stat().st_mtime + 10
        os.utime(checkout / changed, (new, new))
    done = commands(checkout, "test")
    assert done.index("torch") < done.index(".[dev]") < done.index("pytest")


def test_ci_runs_the_same_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.splitlines()[-1] == "make test"


# --- what is kept, what is not ---


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def test_nothing_that_is_kept_is_ignored() -> None:
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


@pytest.mark.parametrize(
    "path", [".venv/bin/python", "minivllm/__pycache__/a.pyc", "notebooks/.ipynb_checkpoints/a", "build/a"]
)
def test_what_is_made_here_is_ignored(path: str) -> None:
    assert git("check-ignore", "--no-index", path) == [path]


def test_license_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text[:200] and "Version 2.0" in text[:300]
    assert PROJECT["license"] == "Apache-2.0"


# --- README, and the table of chapter 00 ---


def title(path: Path) -> str:
    """`00 · Start here`."""
    return read(path).cells[0].source.splitlines()[0].removeprefix("# ")


def test_readme_lists_every_chapter() -> None:
    rows = re.findall(r"^\| \[(.+?)\]\((notebooks/\S+?)\) \| (.+?) \| (.+?) \|$", README, re.MULTILINE)
    assert [(name, link) for name, link, _, _ in rows] == [
        (title(path), f"notebooks/{path.name}") for path in NOTEBOOKS
    ]
    assert all(question.endswith("?") for _, _, question, _ in rows)


def test_chapter_00_links_every_chapter() -> None:
    text = "\n".join(cell.source for cell in read(NOTEBOOKS[0]).cells)
    linked = re.findall(r"^\| \[(\d\d) .+?\]\((\S+?)\) \|", text, re.MULTILINE)
    assert linked == [(path.name[:2], path.name) for path in NOTEBOOKS[1:]]


@pytest.mark.parametrize(
    "file",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "minivllm/assets/storyteller/README.md"],
    ids=["README", "CONTRIBUTING", "card"],
)
def test_links_lead_somewhere(file: Path) -> None:
    links = [link for link in LINK.findall(file.read_text(encoding="utf-8")) if "://" not in link]
    assert links
    assert [link for link in links if not (file.parent / link).exists()] == []


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "CONTRIBUTING"])
def test_files_that_are_named_exist(text: str) -> None:
    named = re.findall(r"`((?:tools|notebooks|figures|tests|minivllm)/[\w/.]*)`|\b(tools/\w+\.py)", text)
    assert named
    paths = [ROOT / (quoted or bare) for quoted, bare in named]
    made_later = {ROOT / "figures/data/chapter_times.json", ROOT / "notebooks/12_its_name.ipynb"}
    assert [path for path in paths if not path.exists() and path not in made_later] == []


def test_the_guide_says_what_is_written_by_hand() -> None:
    import export

    names = [name for name in export.HANDWRITTEN if (ROOT / "minivllm" / name).exists()]
    (sentence,) = re.findall(r"only (`__init__.*?) are written by hand", GUIDE, re.DOTALL)
    assert re.findall(r"`([\w.]+?)/?`", sentence) == names


def test_readme_code_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time") and "\nThe little fox" in done.stdout
