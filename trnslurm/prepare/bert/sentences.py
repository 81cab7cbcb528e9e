"""Splits text into sentences, by rules that need no model and no language data."""

import re
from collections.abc import Iterator

# Marks that can end a sentence, the closing marks after them, and the first letter after a blank.
# Chinese and Japanese marks need no blank.
_END = re.compile(r"""[.!?…]+["'”’»)\]]*\s+(?=["'“‘«(\[]*([^\s"'“‘«(\[]))|[。！？]["”’」』]*()""")
_LAST_WORD = re.compile(r"[^\s(\[\"'“‘«]*$")
# Abbreviations, whose period seldom ends a sentence.
_ABBREVIATIONS = frozenset(
    """
    mr mrs ms messrs dr prof st sr jr rev hon gov sen rep pres gen col maj capt lt sgt adm cmdr
    mt ft vs cf viz ca approx fig figs eq vol vols ed eds pp nos ch sec
    jan feb mar apr jun jul aug sep sept oct nov dec
    """.split()  # noqa: SIM905
)
_BEFORE_NUMBERS = frozenset(("no", "p", "c", "art"))
# A letter, or letters with periods between them: initials, e.g., U.S.
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_BLANK_LINES = re.compile(r"\n\s*\n")


def split(text: str, *, wrapped: bool) -> Iterator[str]:
    """Yield the sentences. A line break ends a sentence, unless lines are wrapped."""
    for paragraph in _BLANK_LINES.split(text) if wrapped else text.split("\n"):
        first = 0
        for match in _END.finditer(paragraph):
            if _ends(paragraph, first, match):
                yield paragraph[first : match.end()].strip()
                first = match.end()
        if last := paragraph[first:].strip():
            yield last


def _ends(paragraph: str, first: int, match: re.Match[str]) -> bool:
    behind = match[1]
    if behind is None:
        return True
    if behind.islower():
        return False
    if paragraph[match.start() : match.start() + 2].rstrip() != ".":
        return True
    # The word before a single period with no quotation mark or bracket after it.
    found = _LAST_WORD.search(paragraph, first, match.start())
    word = found[0] if found else ""
    if word.lower() in _ABBREVIATIONS or (word.lower() in _BEFORE_NUMBERS and behind.isdigit()):
        return False
    return word == "I" or not _INITIALS.fullmatch(word)
