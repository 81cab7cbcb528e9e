"""Documents are the same wherever a file is cut, and their text is the file's."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnslurm.prepare.text.documents import Rule, TextFile

RULES = [
    Rule(per="line"),
    Rule(per="blank-line"),
    Rule(per="file"),
    Rule(per="start", start="^= .* =$"),
]
# Foreign line ends, blank lines of many kinds, headings, letters of one to four bytes.
WRITTEN = ("a", "bb ccc", " é", "𝄞 x", "= H =", "x\r", "u\u2028v")
BLANK = ("", " ", "\t", "\u3000", "\r", "\x0c")
LINES = st.lists(st.sampled_from(WRITTEN + BLANK), min_size=1, max_size=30)


def documents(path: Path, rule: Rule, chunk_bytes: int = 1 << 20) -> list[str]:
    lines = TextFile(path=path, rule=rule)
    cuts = lines.cuts(chunk_bytes)
    assert cuts[0] == 0 and cuts[-1] == path.stat().st_size and cuts == sorted(set(cuts))
    return [d for i in range(len(cuts) - 1) for d in lines.documents(cuts[i], cuts[i + 1])]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.per)
@pytest.mark.parametrize("rows", [False, True], ids=["text", "rows"])
@given(lines=LINES, chunk_bytes=st.integers(1, 60), final=st.booleans())
@settings(deadline=None)
def test_where_a_file_is_cut_makes_no_difference(
    tmp_path_factory, rule, rows, lines, chunk_bytes, final
):
    path = tmp_path_factory.getbasetemp() / ("cut.jsonl" if rows else "cut.txt")
    written = [json.dumps({"text": line}) for line in lines] if rows else lines
    path.write_text("\n".join(written) + "\n" * final, newline="")
    assert documents(path, rule, chunk_bytes) == documents(path, rule)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.per)
@given(lines=LINES)
@settings(deadline=None)
def test_nothing_but_blanks_between_documents_is_lost(tmp_path_factory, rule, lines):
    path = tmp_path_factory.getbasetemp() / "lost.txt"
    path.write_text("\n".join(lines), newline="")
    found = documents(path, rule)
    assert "".join("".join(found).split()) == "".join("".join(lines).split())
    assert all(document.strip() for document in found)


def test_the_three_ways_to_cut_a_text(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes("\ufeffone\n two \r\n\n  \nthree\n\u2028\n".encode())
    assert documents(path, Rule(per="line")) == ["one", " two ", "three"]
    assert documents(path, Rule(per="blank-line")) == ["one\n two ", "three"]
    assert documents(path, Rule(per="file")) == ["one\n two \r\n\n  \nthree\n\u2028\n"]


def test_a_line_that_matches_begins_a_document(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("intro\n= A =\n\ntext\n= B =\n= = sub = =\nmore")
    rule = Rule(per="start", start="^= [^=]")
    assert documents(path, rule) == ["intro\n", "= A =\n\ntext\n", "= B =\n= = sub = =\nmore"]


def test_rows_alone_are_taken_as_they_are_and_joined_rows_get_line_ends(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [" = A = \n", "", "text \n", " = B = \n", "no end", "last"]
    path.write_text("".join(json.dumps({"text": row, "n": 1}) + "\n" for row in rows) + "\n")
    assert documents(path, Rule(per="line")) == [row for row in rows if row]
    assert documents(path, Rule(per="start", start="^ = [^=].* = $")) == [
        " = A = \n\ntext \n",
        " = B = \nno end\nlast\n",
    ]
