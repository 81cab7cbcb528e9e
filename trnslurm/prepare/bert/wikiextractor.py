"""Reads WikiExtractor's output: directories of files with articles between <doc …> and </doc>."""

from pathlib import Path

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.text.documents import Rule
from trnslurm.prepare.text.sources import InputFile, files_below

RULE = Rule(per="start", start="^<doc ")
_BEGIN, _END = "<doc ", "</doc>"
_FILES = "wiki_*"


def is_output(path: Path) -> bool:
    """Check whether a path is WikiExtractor's output, by the names of its files."""
    return path.is_dir() and any(file.is_file() for file in path.rglob(_FILES))


def article_files(directories: list[Path]) -> list[InputFile]:
    """Return the files, such as AA/wiki_00; each must begin with an article."""
    found = []
    for directory in directories:
        if not directory.is_dir():
            raise PrepareError(f"--wikiextractor {directory}: no such directory")
        found += files_below(directory, _FILES)
    for file in found:
        _check(file.path)
    if not found:
        raise PrepareError(
            f"--wikiextractor {', '.join(map(str, directories))}: contains no wiki_* files: pass "
            "the "
            "directory that was WikiExtractor's -o"
        )
    return found


def article(document: str, path: Path) -> str:
    """Return the text of an article, without its title."""
    head, _, rest = document.partition("\n")
    text, end, _ = rest.rpartition(_END)
    if not end:
        raise PrepareError(
            f"{path}: the article {head[:80]} has no {_END}: the file is truncated, so extract it "
            "again"
        )
    return text.partition("\n")[2]


def _check(path: Path) -> None:
    with path.open("rb") as stream:
        begin = stream.read(len(_BEGIN))
    if not begin:
        raise PrepareError(f"{path} is empty: extract it again, or remove it")
    if begin != _BEGIN.encode():
        hint = "extract without --json" if begin.startswith(b"{") else "is it WikiExtractor's?"
        raise PrepareError(f"{path} does not start with {_BEGIN}…>: {hint}")
