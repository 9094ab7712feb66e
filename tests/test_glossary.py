"""The glossary and the table of symbols say what the chapters and the code say.

Chapters put a word in bold or italics where they explain it. So a term belongs to the first chapter that does this; one
that no chapter emphasises belongs to the first chapter that uses it at all.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from chapter_times import FOLDED
from chapters import NOTEBOOKS, ROOT, read

import minivllm  # noqa: F401  (first: it chooses Triton's interpreter where there is no GPU)
from minivllm.utils.context import Context

GLOSSARY, SYMBOLS = ROOT / "notebooks" / "glossary.md", ROOT / "notebooks" / "symbols.md"
CHAPTERS = {path.name[:2]: path for path in NOTEBOOKS}
ENTRY = re.compile(r"^- \*\*(.+?)\*\*: (.+) \(\[(\d\d)\]\((\S+?)\)(?:, built in \[(\d\d)\]\((\S+?)\))?\)$")
EMPHASIS = re.compile(r"(?<![*\w])(\*{1,2})(?!\s)([^*\n]{2,50}?)(?<!\s)\1(?![*\w])")
MOST_WORDS = 3  # what is longer is a sentence, not a term


@dataclass(frozen=True)
class Term:
    """An entry: the chapter that explains it first, and the one that builds it, if that is another."""

    name: str
    meaning: str
    chapter: str
    built_in: str | None

    @property
    def pattern(self) -> re.Pattern[str]:
        """The term in running text, in the singular or the plural."""
        words = re.escape(self.name).replace(r"\ ", r"[\s-]+")
        return re.compile(rf"(?<![\w/]){words}(?:s|es)?(?!\w)", re.IGNORECASE)


def entries() -> list[Term]:
    found = []
    for line in GLOSSARY.read_text(encoding="utf-8").splitlines():
        if line.startswith("- "):
            match = ENTRY.match(line)
            assert match, f"not an entry: {line[:60]}"
            name, meaning, chapter, link, built_in, second = match.groups()
            assert link == CHAPTERS[chapter].name and (not built_in or second == CHAPTERS[built_in].name), name
            found.append(Term(name, meaning, chapter, built_in))
    return found


TERMS = entries()
terms = pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name.replace(" ", "-"))


def prose(path: Path) -> str:
    """What a chapter tells: its text without what is folded, and without tables, which list and do not explain."""
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    return "\n".join(line for line in FOLDED.sub("", text).splitlines() if not line.startswith("|"))


def without_emphasis(text: str) -> tuple[str, list[range]]:
    """The text without its asterisks, and where in it the short emphasised spans lie."""
    plain, spans, position = "", [], 0
    for match in EMPHASIS.finditer(text):
        if len(match[2].split()) <= MOST_WORDS:
            plain += text[position : match.start()]
            spans.append(range(len(plain), len(plain) + len(match[2])))
            plain, position = plain + match[2], match.end()
    return plain + text[position:], spans


PROSE = {chapter: without_emphasis(prose(path)) for chapter, path in CHAPTERS.items()}


def uses(term: Term, chapter: str) -> bool:
    return bool(term.pattern.search(PROSE[chapter][0]))


def emphasises(term: Term, chapter: str) -> bool:
    """Is there an emphasised span within the term, as in "**decode** step", or one that begins with it?"""
    plain, spans = PROSE[chapter]
    found = [match.span() for match in term.pattern.finditer(plain)]
    return any(
        start == span.start or (start <= span.start and span.stop <= end) for start, end in found for span in spans
    )


def test_there_are_enough_terms_and_not_too_many() -> None:
    assert 50 <= len(TERMS) <= 90


def test_each_term_stands_once_and_in_order() -> None:
    keys = [re.sub(r"[^a-z0-9]", "", term.name.lower()) for term in TERMS]
    assert keys == sorted(set(keys))


@terms
def test_a_term_belongs_to_the_chapter_that_explains_it(term: Term) -> None:
    assert uses(term, term.chapter), f"chapter {term.chapter} never says it"
    explain = [chapter for chapter in CHAPTERS if emphasises(term, chapter)]
    assert term.chapter == (explain or [chapter for chapter in CHAPTERS if uses(term, chapter)])[0]
    assert term.built_in is None or (term.built_in > term.chapter and uses(term, term.built_in))


@terms
def test_a_term_is_explained_in_one_or_two_sentences(term: Term) -> None:
    assert term.meaning.endswith(".") and len(re.findall(r"[.:;](?: |$)", term.meaning)) <= 4
    assert len(term.meaning) <= 240


def terms_in(text: str) -> set[str]:
    """The terms that a text uses; a longer one hides a shorter one in it."""
    found = set()
    for term in sorted(TERMS, key=lambda term: -len(term.name)):
        text, times = term.pattern.subn(" ", text)
        found |= {term.name} if times else set()
    return found


def test_no_term_is_explained_by_itself() -> None:
    """Not through others either: who looks up every term of an explanation comes to an end."""
    open_ = {term.name: terms_in(term.meaning) - {term.name} for term in TERMS}
    while done := {name for name, needs in open_.items() if not needs & open_.keys()}:
        open_ = {name: needs for name, needs in open_.items() if name not in done}
    assert not open_, "these go round in circles"


# --- symbols ---


@dataclass(frozen=True)
class Symbol:
    """A row of the table; a row may name a pair, such as `k` and `v`."""

    names: tuple[str, ...]
    shape: str
    type: str
    chapter: str
    note: str  # in brackets behind the name: which of two things of one name


def symbols() -> list[Symbol]:
    found = []
    for line in SYMBOLS.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| symbol"):
            name, shape, type_, _, _, link = (cell.strip() for cell in line.strip("|").split("|"))
            chapter, target = re.fullmatch(r"\[(\d\d)\]\((\S+)\)", link).groups()
            assert target == CHAPTERS[chapter].name
            note = "".join(re.findall(r"\((.*)\)", name))
            names = re.findall(r"[`*](\w+)[`*]", name)
            found.append(Symbol(tuple(names), shape.strip("`"), type_, chapter, note))
    return found


ROWS = symbols()


def test_each_symbol_stands_once_and_in_order() -> None:
    keys = [(row.names[0].lower(), row.note) for row in ROWS]
    assert keys == sorted(set(keys))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.names))
def test_a_symbol_occurs_in_its_chapter(row: Symbol) -> None:
    text = "\n".join(cell.source for cell in read(CHAPTERS[row.chapter]).cells)
    assert [name for name in row.names if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.names))
def test_what_a_shape_is_made_of_is_in_the_table(row: Symbol) -> None:
    known = {name for other in ROWS for name in other.names}
    assert set(re.findall(r"[a-z_]\w*", row.shape)) <= known


def test_every_field_of_the_context_has_a_row() -> None:
    named = {name for row in ROWS for name in row.names} | {"kv_cache", "backend"}  # the caches, and a glossary term
    assert {field.name for field in fields(Context)} <= named


def test_shapes_and_types_of_the_context_are_those_of_its_docstring() -> None:
    said = dict(re.findall(r"^ *(\w+): (\w+ \[.*?\])", Context.__doc__, re.MULTILINE))
    assert len(said) == 4
    assert {name: f"{row.type} {row.shape}" for row in ROWS for name in row.names if name in said} == said


def test_shapes_of_the_caches_are_those_of_the_code() -> None:
    text = (ROOT / "minivllm" / "core" / "kv_cache.py").read_text(encoding="utf-8")
    caches = [row for row in ROWS if row.names == ("k_cache", "v_cache")]
    assert len(caches) == 2
    assert [row.shape for row in caches if not re.search(rf"k_cache, v_cache:? {re.escape(row.shape)}", text)] == []


# --- links ---


@pytest.mark.parametrize("page", [GLOSSARY, SYMBOLS], ids=["glossary", "symbols"])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    assert links and [link for link in links if not (page.parent / link).exists()] == []
