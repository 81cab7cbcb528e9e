"""Make the site of the pages, in site/. They are copied to .make/site as its generator reads them.

    python docs/make/site.py [DIRECTORY]

The pages are written for a viewer of the repository. In the copies, links between directories lead
to pages of the site; a linked file that is no page becomes one; and code is marked as what it is.
"""

from __future__ import annotations

import html
import math
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

MAKE = Path(__file__).resolve().parent
ROOT = MAKE.parents[1]
# Where pages outside docs/ are in the site.
NAMES = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}  # fmt: skip
_LINK = re.compile(r"(\]\()([^)\s#]+)")
# Blocks of code, as pages have them: four blanks before each line.
_INDENTED = re.compile(r"(?<=\n\n)(?:(?: {4}.*)?\n)*? {4}.*\n(?=\n(?! {4}|\n)|\Z)")
# By the first line; what matches none is a program's output.
_LANGUAGES = (
    (r"\$ ", "console"),
    (r">>> ", "pycon"),
    (r"(trnslurm|make|pip|git|uv|uvx|python3|export|sudo|salloc|srun|cd|eval(?= \")) ", "bash"),
    (r'(import|from) \w|class \w+\(|"""|[\w, ]+ = [\w.]+\(|[\w.]+\(', "python"),
    (r'\{"', "json"),
    (r"# \w+\.yaml|(- \{)?[\w.]+:($| [\[{])|(description|stage_python): |- \{", "yaml"),
    (r"[+-] {4}", "diff"),
)
# Lines of code as the generator writes them.
_CODE = re.compile(r'(?<=<div class="highlight"><pre><span></span><code>).*?(?=</code>)', re.DOTALL)
_LONG = 88
# Choices between |, which may begin a new line.
_CHOICES = re.compile(r"<code>[^<\n]*\|[^<\n]*</code>")
_OPTION = re.compile(r"<code>(?=--?[\w-]{1,24}</code>)")
_PICTURES = (".png", ".svg")
# Nobody reads these from top to bottom.
_LOOKED_UP = (
    "CHANGELOG.md", "docs/api.md", "docs/commands.md", "docs/environment.md", "docs/keys.md",
)  # fmt: skip
_WORDS_PER_MINUTE, _PATIENCE_MIN = 230, 10
_LEXERS = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "bash"}


def main(root: Path, output: Path) -> int:
    """Make the site, and return the exit code: not 0 where a link leads nowhere."""
    staged = root / ".make/site"
    shutil.rmtree(staged, ignore_errors=True)
    if dead := stage(root, staged / "docs"):
        print("\n".join(dead), file=sys.stderr)
        return 1
    shutil.copytree(MAKE / "assets", staged / "docs/assets")
    settings = (MAKE / "zensical.toml").read_text(encoding="utf-8")
    write(staged / "zensical.toml", settings.replace("VERSION", version(root)))
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(
        command, cwd=staged, env={**os.environ, "NO_COLOR": "1"}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout.partition("Traceback")[0], file=sys.stderr)
        return 1
    for page in staged.glob("site/*.html"):
        text = _CODE.sub(wrapping, page.read_text("utf-8"))
        text = _CHOICES.sub(lambda code: code[0].replace("|", "|<wbr>"), text)
        page.write_text(_OPTION.sub('<code class="option">', text), "utf-8")
    shutil.rmtree(output, ignore_errors=True)
    shutil.move(staged / "site", output)
    print(f"Wrote {output}/index.html")
    return 0


def stage(root: Path, staged: Path) -> list[str]:
    """Write the copies of all pages and of what they link; return the links that lead nowhere.

    Warn about long pages.
    """
    pages = [*NAMES, *(f"docs/{page.name}" for page in sorted(root.glob("docs/*.md")))]
    dead: list[str] = []
    linked: list[str] = []
    for page in pages:
        text = (root / page).read_text(encoding="utf-8")
        if page not in _LOOKED_UP and (needs := math.ceil(minutes(text))) > _PATIENCE_MIN:
            print(f"warning: {page}: takes {needs} minutes to read: split it", file=sys.stderr)
        files = files_in(text, page)
        dead += [f"{page}: there is no {file}" for file in files if not (root / file).is_file()]
        linked += files
        write(staged / place(page), head(page) + noted(fenced(piped(moved(text, page)))))
    for file in {*linked} - {*pages}:
        if not (root / file).is_file():
            continue
        if place(file).endswith(".md"):
            write(staged / place(file), as_page(root / file, file))
        else:
            (staged / place(file)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file, staged / place(file))
    return dead


def place(file: str) -> str:
    """Return where a file of the repository is in the site's sources."""
    if file in NAMES:
        return NAMES[file]
    path = PurePosixPath(file)
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    return f"files/{file}" if path.suffix in _PICTURES else f"files/{file}.md"


def minutes(text: str) -> float:
    """Return how long it takes to read a page, without its code and the targets of its links."""
    prose = re.sub(r"\]\([^)]*\)|<pre>.*?</pre>", " ", _INDENTED.sub("", text), flags=re.DOTALL)
    return sum(any(map(str.isalnum, word)) for word in prose.split()) / _WORDS_PER_MINUTE


def files_in(text: str, page: str) -> list[str]:
    """Return the files of the repository that a page links."""
    links = [link for _, link in _LINK.findall(text) if "://" not in link]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in links]


def moved(text: str, page: str) -> str:
    """Return a page with its links as they are in the site."""

    def link_of(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), found[2]))
        start = posixpath.dirname(place(page))
        return found[1] + posixpath.relpath(place(file), start or ".")

    return _LINK.sub(link_of, text)


def version(root: Path) -> str:
    """Return the version of the package."""
    source = (root / "trnslurm/__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE)[0]


def head(page: str) -> str:
    """Return what comes before a page: the front page has no lists of pages beside it."""
    return "---\nhide: [navigation, toc]\n---\n" if page == "README.md" else ""


def piped(text: str) -> str:
    """Return a page in whose tables code has plain |. Other viewers need \\|, which shows here."""

    def row(found: re.Match[str]) -> str:
        return re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), found[0])

    return re.sub(r"^\|.*$", row, text, flags=re.MULTILINE)


def noted(text: str) -> str:
    """Return a page whose `> [!WARNING]`, as other viewers have it, is a box.

    It has the title that its text begins with, in bold.
    """

    def box(found: re.Match[str]) -> str:
        kind, title, lines = found[1].lower(), found[2], found[3].replace("\n> ", "\n    ")
        return f'!!! {kind} "{title}"\n\n    {lines}'

    return re.sub(
        r"^> \[!(\w+)\]\n> \*\*(.+?)[.:]\*\* (.*\n(?:>.*\n)*)", box, text, flags=re.MULTILINE
    )


def fenced(text: str) -> str:
    """Return a page whose code is fenced, and named where its language shows."""

    def fence(found: re.Match[str]) -> str:
        lines = [line[4:] for line in found[0].splitlines()]
        first = next(filter(None, lines))
        language = next((name for start, name in _LANGUAGES if re.match(start, first)), "text")
        return "\n".join([f"```{language}", *lines, "```", ""])

    return _INDENTED.sub(fence, text)


def wrapping(found: re.Match[str]) -> str:
    """Return code in which long messages wrap, as in a terminal. Lines with columns scroll."""

    def wrap(line: str) -> str:
        text = html.unescape(re.sub(r"<[^>]+>", "", line)).strip()
        whole = line.count("<span") == line.count("</span>")
        if len(text) > _LONG and "  " not in text and whole:
            return f'<span class="message">{line}</span>'
        return line

    return "\n".join(map(wrap, found[0].split("\n")))


def as_page(file: Path, name: str) -> str:
    """Return a page that shows a file; the search leaves it out."""
    head = "---\nsearch:\n  exclude: true\n---\n"
    text = file.read_text(encoding="utf-8")
    return f"{head}# {name}\n\n````{_LEXERS.get(file.suffix, 'text')}\n{text}````\n"


def write(file: Path, text: str) -> None:
    """Write a file of the site's sources."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(ROOT, Path(sys.argv[1]) if sys.argv[1:] else Path("site")))
