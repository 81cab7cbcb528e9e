"""The pages: links, paths and names are real; every page, recipe and key is documented."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from trnslurm.config import schema

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks/README.md", *sorted(ROOT.glob("docs/*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
# A path in a page, such as `trnslurm/cli/plan.py` or `docs/`; with NAME in it one of no file.
_PATH = re.compile(r"`((?:trnslurm|templates|jobs|cluster-config|tests|benchmarks|docs)/[\w./-]*)`")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    """Return what GitHub makes of the headings: lower case, no marks, a dash for each blank."""
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_lead_somewhere(page: Path) -> None:
    for path in _PATH.findall(text_of(page)):
        assert "NAME" in path or (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_a_table_have_as_many_cells(page: Path) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", text_of(page), re.M):
        rows = table.splitlines()
        assert re.fullmatch(r"(\|---)+\|", rows[1]), rows[1]
        for row in rows:
            assert len(re.findall(r"(?<!\\)\|", row)) == rows[1].count("|"), row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_pages_imports_what_there_is(page: Path) -> None:
    for module, names in re.findall(r"^ +from (trnslurm[\w.]*) import (.*)$", text_of(page), re.M):
        file = ROOT / f"{module.replace('.', '/')}.py"
        source = text_of(file if file.is_file() else file.with_suffix("") / "__init__.py")
        for name in names.split(", "):
            assert re.search(rf"^(def|class) {name}\b|\b{name}\b( =|,$)", source, re.M), name


def test_every_page_is_named_in_the_readme() -> None:
    linked = {link.partition("#")[0] for link in _LINK.findall(text_of(ROOT / "README.md"))}
    assert {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")} <= linked
    assert {"CONTRIBUTING.md", "CHANGELOG.md"} <= linked


def test_every_recipe_is_in_the_readme_and_has_a_page() -> None:
    recipes = {file.parent.name for file in ROOT.glob("jobs/*/recipe.yaml")}
    assert recipes == set(re.findall(r"^\| \[`(\w+)`\]", text_of(ROOT / "README.md"), re.MULTILINE))
    assert all((ROOT / f"docs/{recipe}.md").is_file() for recipe in recipes)


def code_words(*pages: str) -> set[str]:
    """Return the words of all code spans."""
    spans = [span for page in pages for span in re.findall(r"`([^`]+)`", text_of(ROOT / page))]
    return {word for span in spans for word in re.findall(r"\w+", span)}


@pytest.mark.parametrize(
    "part", ["Cluster", "Slurm", "Recipe", "Batch", "Data", "Neuron", "Container", "Notify"]
)
def test_every_key_of_profiles_and_recipes_is_documented(part: str) -> None:
    keys = {field.name for field in dataclasses.fields(getattr(schema, part))}
    assert keys <= code_words("docs/profiles.md", "docs/recipes.md", "docs/containers.md")


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("jobs/*/recipe.yaml")), ids=lambda file: file.parent.name
)
def test_every_key_of_train_is_documented(file: Path) -> None:
    train = yaml.safe_load(text_of(file))["train"]
    assert set(train) <= code_words(
        "docs/recipes.md", "docs/memory.md", f"docs/{file.parent.name}.md"
    )


def test_tests_that_pages_name_exist() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    names = {f.name for f in files}
    names |= {n for f in files for n in re.findall(r"^def (test_\w+)", text_of(f), re.MULTILINE)}
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+(?:\.py)?)`", text_of(page))}
    assert named and named <= names, named - names
