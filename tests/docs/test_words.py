"""One term, one meaning: all pages keep to the glossary of docs/concepts.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from trnslurm.contract.states import OF_A_RUN

ROOT = Path(__file__).parents[2]
CONCEPTS = ROOT / "docs/concepts.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
# What the glossary's last column names, as it is looked for. "A training run" is fine.
NOT = {
    "a training": r"\b(?:an?|each|every|another|one|any|no) training\b(?! (?:\[|run|job|step|"
    r"script|loop|set|data|process|code|recipe|library|loss|plan|state|sample|param|speed))",
    "trainings": r"\btrainings\b",
    "ranks": r"\branks\b",
    "started ahead": r"\b(?:started|compiled|start) ahead\b",
    "step of its own": r"\bstep of its own\b",
    "the numbers of a step": r"\bits numbers\b|\bthe numbers (?:of|that)\b",
    "unit": r"\bunits?\b(?!-)",
}
# British, archaic, or unclear at the first reading.
STYLE = (
    r"labell|signalled|modelled|behaviour|colour|neighbour|favour|whilst|"
    r"\bbeside\b|\bours\b|[;,] else\b|\b(?:is|are|was) told\b|\bmends?\b|(?<=\. )Nor\b"
)


def prose(page: Path) -> str:
    """Return the words of a page, without code and the addresses of links."""
    text = re.sub(r"^(?: {4}|<pre>).*$", "", page.read_text(encoding="utf-8"), flags=re.M)
    return words_of(re.sub(r"\]\([^)]*\)", "]", text))


def words_of(text: str) -> str:
    """Return a text in one line, without code."""
    return " ".join(re.sub(r"`[^`]*`", "`x`", text).split())


def glossary() -> list[list[str]]:
    rows = CONCEPTS.read_text(encoding="utf-8").partition("## Glossary")[2]
    return [row.strip("| ").split(" | ") for row in re.findall(r"^\| .*$", rows, re.M)][1:]


def test_the_glossary_names_each_term_once_and_what_it_is_not() -> None:
    terms = [term.strip() for row in glossary() for term in row[0].split(",")]
    assert len(terms) > 30 and len(terms) == len(set(terms))
    refused = {
        word.strip() for row in glossary() for word in "".join(row[2:]).strip(" |").split(",")
    }
    assert refused - {""} == set(NOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_one_word_for_one_idea(page: Path) -> None:
    text = prose(page)
    if page == CONCEPTS:
        text = text.partition("## Glossary")[0]
    assert not list(refused(text, [*NOT.values(), STYLE]))


def refused(text: str, patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        for found in re.finditer(pattern, text, re.I):
            yield f"{found[0]!r} in: {text[max(0, found.start() - 40) : found.end() + 40]}"


@pytest.mark.parametrize("room", ["cli", "runs", "plan", "node/triage"])
def test_messages_and_docstrings_do_too(room: str) -> None:
    """But for a rank, a unit and `mend`, which code has; and a format's name."""
    patterns = [pattern for word, pattern in NOT.items() if word not in ("ranks", "unit")]
    patterns.append(STYLE.replace(r"|\bmends?\b", "").replace("labell|", ""))
    hits = []
    for file in sorted((ROOT / "trnslurm" / room).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and len(str(node.value).split()) > 2:
                hits += [
                    f"{file.name}: {hit}" for hit in refused(words_of(str(node.value)), patterns)
                ]
    assert not hits


def test_every_state_is_in_the_diagram_and_explained() -> None:
    drawn = (ROOT / "docs/pictures/states.svg").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| ([A-Z_]+) \|", CONCEPTS.read_text(encoding="utf-8"), re.M))
    assert rows == {*map(str, OF_A_RUN), "RESTARTED"}
    assert all(f">{state}<" in drawn for state in rows)
