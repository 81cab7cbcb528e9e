"""The pages: their links lead somewhere, and the README names every page and every recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted(ROOT.glob("docs/*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, no marks, a dash for each blank."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(text_of(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_every_page_is_named_in_the_readme() -> None:
    linked = {link.partition("#")[0] for link in _LINK.findall(text_of(ROOT / "README.md"))}
    assert {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")} <= linked


def test_every_recipe_is_in_the_readme() -> None:
    recipes = {file.parent.name for file in ROOT.glob("jobs/*/recipe.yaml")}
    assert recipes == set(re.findall(r"^\| \[`(\w+)`\]", text_of(ROOT / "README.md"), re.MULTILINE))
