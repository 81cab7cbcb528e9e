"""The site of the pages: it is made without a dead link, and loads nothing from elsewhere."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..browser import Browser, browser
from ..processes import Done, run_process

ROOT = Path(__file__).parents[2]
MAKE = "docs/make/site.py"
# Words that people search for, and the page that must be one of the first three results.
WORDS = {
    "max_nodes": "profiles", "gpu": "scripts", "OOM": "faq", "FAQ": "faq", "migration": "migration",
    "quickstart": "index", "preemption": "faq", "requeue": "faq", "EFA": "faq", "wandb": "watch",
    "NCCL timeout": "faq", "resume": "guide", "checkpoint": "checkpoints", "submit": "api",
}  # fmt: skip
_TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# The search's window and its fields are in a tree of its own.
_SEARCH = "[...document.querySelectorAll('body > div')].map(e => e.shadowRoot).find(e => e)"


def made(root: Path, output: Path) -> Done:
    return run_process([sys.executable, root / MAKE, output])


def copy_of_the_repository(place: Path) -> Path:
    """Return a directory with the pages, in which tests may make mistakes."""
    shutil.copytree(ROOT / "docs", place / "docs")
    for entry in ROOT.iterdir():
        if entry.name != "docs" and not entry.name.startswith("."):
            (place / entry.name).symlink_to(entry)
    return place


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("docs")
    done = made(copy_of_the_repository(place), place / "made")
    assert done.code == 0, done.err
    assert done.out == f"Wrote {place}/made/index.html\n"
    return place / "made"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The site's address on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_page_is_in_the_navigation() -> None:
    nav = tomllib.loads((ROOT / "docs/make/zensical.toml").read_text())["project"]["nav"]
    entries = [entry for section in nav for part in section.values() for entry in part]
    named = [page for entry in entries for page in entry.values()]
    others = {"index.md", "contributing.md", "changelog.md", "benchmarks.md"}
    assert sorted(named) == sorted({page.name for page in ROOT.glob("docs/*.md")} | others)


def test_every_picture_is_made_by_its_command_and_shown() -> None:
    """`make pictures` makes those there are but one, and some page shows each; they stay small."""
    source = (ROOT / "docs/make/pictures.py").read_text()
    made = re.findall(r'"([\w-]+\.(?:svg|png))"', source.partition("\nMADE = ")[2])
    made += ["recovery.svg"]  # drawn, not recorded
    files = {file.name: file for file in (ROOT / "docs/pictures").iterdir()}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"]
    shown = {
        Path(link).name
        for page in pages
        for link in re.findall(r"!\[[^\]]+\]\(([^)]*pictures/[^)]+)\)", page.read_text())
    }
    assert sorted(made) == sorted(files) == sorted(shown)
    for file in files.values():
        assert file.stat().st_size < 150_000
        if file.suffix == ".svg":  # nothing is loaded from elsewhere
            assert "http" not in file.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("nowhere.md", "docs/data.md: there is no docs/nowhere.md"),
        ("../README.md#nowhere", "anchor does not exist"),
    ],
)
def test_a_dead_link_is_refused(tmp_path: Path, link: str, said: str) -> None:
    root = copy_of_the_repository(tmp_path)
    with (root / "docs/data.md").open("a") as page:
        page.write(f"\n[there]({link})\n")
    done = made(root, root / "made")
    assert done.code == 1 and said in done.err and "Traceback" not in done.err
    assert not (root / "made").exists()


def test_pages_link_what_is_there(site: Path) -> None:
    """Their links of this site are files of it, and the anchors theirs."""
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    ids = {page: set(re.findall(r' id="?([^"\s>]+)', text)) for page, text in pages.items()}
    assert len(ids) > 30
    for page, text in pages.items():
        if page.name == "404.html":  # its links begin at the root of the server
            continue
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            path, _, anchor = link.partition("#")
            if re.match(r"https?:|data:|javascript:", link):
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in ids[target] or anchor.startswith("__"), (page, link)


def test_a_browser_reads_it_in_light_in_dark_and_on_a_phone(
    site: Path, served: str, chromium: Browser
) -> None:
    shades = []
    for page, width, dark in (
        ("index", 1280, False), ("index", 390, False), ("guide", 390, True),
        ("tutorial", 390, False), ("files/jobs/gpt2_zero1/train.py", 390, False),
    ):  # fmt: skip
        chromium.open(f"{served}/{page}.html", width=width, dark=dark)
        # What is wide, as code and tables, scrolls by itself.
        assert chromium.run(_TOO_WIDE) <= 0, (page, width)
        shade = chromium.run("getComputedStyle(document.body).backgroundColor")
        shades.append(min(int(part) for part in re.findall(r"\d+", shade)[:3]) > 200)
    assert shades == [True, True, False, True, True]
    assert chromium.said == []
    assert chromium.requested and all(
        address.startswith((f"{served}/", "data:")) for address in chromium.requested
    )


def test_a_phone_breaks_no_name_and_shows_terminals_readably(
    served: str, chromium: Browser
) -> None:
    chromium.open(f"{served}/recipes.html", width=390)
    names = "[...document.querySelectorAll('td code')].filter(c => /^[\\w.]+$/.test(c.textContent))"
    assert chromium.run(f"{names}.length") > 50
    assert chromium.run(f"{names}.filter(c => c.getClientRects().length > 1).length") == 0
    chromium.open(f"{served}/watch.html", width=390)
    widths = "[...document.querySelectorAll('p > img[src$=\".svg\"]')].map(i => i.clientWidth)"
    assert min(chromium.run(widths)) > 600
    assert chromium.run(_TOO_WIDE) <= 0


def open_search(chromium: Browser, root: str) -> None:
    chromium.open(f"{root}/index.html")
    chromium.until(f"!!(document.querySelector('.md-search__button') && {_SEARCH})")
    chromium.run("document.querySelector('.md-search__button').click()")
    chromium.until(f"{_SEARCH}.activeElement?.tagName === 'INPUT'")


def search(chromium: Browser, root: str, words: str) -> list[str]:
    """Type words into the open search, and return where the results lead, best first."""
    links = f"[...{_SEARCH}.querySelectorAll('a')].map(a => a.href)"
    chromium.run(f"{_SEARCH}.activeElement.select()")
    chromium.ask("Input.dispatchKeyEvent", type="keyDown", key="Backspace", windowsVirtualKeyCode=8)
    chromium.until(f"{links}.length === 0")
    chromium.ask("Input.insertText", text=words)
    chromium.until(f"{links}.length > 0")
    asked = f"?h={words.replace(' ', '+')}"
    return [link.removeprefix(f"{root}/").replace(asked, "") for link in chromium.run(links)]


@pytest.mark.parametrize("place", ["server", "disk"])
def test_the_search_finds_a_word(site: Path, served: str, chromium: Browser, place: str) -> None:
    root = served if place == "server" else site.as_uri()
    chromium.said.clear()
    chromium.requested.clear()
    open_search(chromium, root)
    assert any(a.startswith("review.html#how-a-run") for a in search(chromium, root, "preemption"))
    assert chromium.said == []
    assert all(a.startswith((f"{root}/", "data:")) for a in chromium.requested)


def test_the_search_puts_the_fitting_page_first(served: str, chromium: Browser) -> None:
    open_search(chromium, served)
    for words, page in WORDS.items():
        first = [link.partition(".html")[0] for link in search(chromium, served, words)[:3]]
        assert page in first, words


def test_a_phone_reads_tables_from_top_to_bottom(served: str, chromium: Browser) -> None:
    """Two columns of code come one after the other; each key of the reference is an entry."""
    chromium.open(f"{served}/index.html", width=390)
    cells = "[...document.querySelector('table:has(pre)').querySelectorAll('th, td')]"
    lefts = chromium.run(f"{cells}.map(c => Math.round(c.getBoundingClientRect().left))")
    tops = chromium.run(f"{cells}.map(c => c.getBoundingClientRect().top)")
    assert len({*lefts}) == 1 and tops[0] < tops[2] < tops[4] < tops[1] < tops[3] < tops[5]
    for page in ("keys", "commands", "environment", "api"):
        chromium.open(f"{served}/{page}.html", width=390)
        rights = "[...document.querySelectorAll('td')].map(c => c.getBoundingClientRect().right)"
        assert max(chromium.run(rights)) <= 390, page
        assert chromium.run(_TOO_WIDE) <= 0, page


def test_warnings_are_boxes_and_code_has_colors(site: Path) -> None:
    front, api = (site / "index.html").read_text(), (site / "api.html").read_text()
    assert re.search(r'class="admonition warning">\s*<p class="admonition-title">Status</p>', front)
    assert "[!WARNING]" not in "".join(page.read_text() for page in site.glob("*.html"))
    assert 'class="kc">None</span>' in api and "<code>str |<wbr> None</code>" in api
    assert re.search(r"trnslurm \d+\.\d+\.\d+, Apache-2.0", front)


def test_a_page_of_more_than_ten_minutes_is_a_warning(tmp_path: Path) -> None:
    root = copy_of_the_repository(tmp_path)
    code, link = "    code of no reader\n" * 4000, "[is](a-link-with-many-words-in-it.md)"
    for name, words in (("data", 2301), ("keys", 9999), ("watch", 2299)):
        (root / f"docs/{name}.md").write_text(f"{link} {'word ' * (words - 1)}\n\n{code}")
    done = made(root, root / "made")  # it ends at the dead link
    assert "warning: docs/data.md: takes 11 minutes to read: split it\n" in done.err
    assert "docs/keys.md: takes" not in done.err and "docs/watch.md: takes" not in done.err


def test_a_long_message_wraps(served: str, chromium: Browser) -> None:
    chromium.open(f"{served}/troubleshooting.html", width=390)
    ends = "[...document.querySelectorAll('.message')].map(m => m.getBoundingClientRect().right)"
    assert len(chromium.run(ends)) > 5 and max(chromium.run(ends)) <= 390
