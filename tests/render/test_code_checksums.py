"""Checksums of a job's code: comments, docstrings and blank lines do not count."""

from __future__ import annotations

import hashlib

import pytest

from trnslurm.render import code

# Sources, and the text whose SHA-256 is the checksum: keys of compile caches are made of it.
SOURCES = {
    "no comment": ("x = 1\n", "x = 1"),
    "no end": ("x = 1  # a", "x = 1"),
    "blank": ("\n\n  # a\n\n", ""),
    "in strings": (
        """x = "#"; y = 'a"#' + "b'#"  # c "d" '\n""",
        """x = "#"; y = 'a"#' + "b'#\"""",
    ),
    "escaped": ('x = "\\"#"  # y\nz = r"\\d"  # w\n', 'x = "\\"#"\nz = r"\\d"'),
    "one row": ('x = """a # b"""  # c\n', 'x = """a # b"""'),
    # After a text of several rows, blanks before a comment stay.
    "several rows": ('x = """a  # b\n\n  c\n"""  # e\n', 'x = """a  # b\n\n  c\n"""  '),
    "bytes": ('x = b"""a  # b\n # c\n"""  # e\n', 'x = b"""a  # b\n # c\n"""'),
    "joined": ('x = ("a"  # b\n  "c # d")\n', 'x = ("a"  \n  "c # d")'),
    "continued": ("x = 'a \\\n# b'  # c\ny = \\\n  2  # d\n", "x = 'a \\\n# b'  \ny = \\\n  2"),
    "formatted": ("x = f'{1}#'  # a\n", "x = f'{1}#'"),
    "formatted over rows": ('x = f"""{1}  # a\n {2} """\n', 'x = f"""{1}  # a\n {2} """'),
    "docstrings": (
        '"""A # b\n\nc"""  # d\nclass E:\n    \'f\'  # g\n    h = 1\n    \'i\'\n',
        "class E:\n    h = 1",
    ),
    "strings next to code": (
        "if 1: 'a'  # b\n'c'; x = 1\n'é'; y = '''d\n # e\n'''\n",
        "if 1: 'a'\n'c'; x = 1\n'é'; y = '''d\n # e\n'''",
    ),
    "decorated": (
        "@f('''a # b\n # c''')\ndef g(): pass  # e\n",
        "@f('''a # b\n # c''')\ndef g(): pass",
    ),
    "branches": (
        "match x:\n  case 'a':  # b\n    '''c'''\n    y = 1\n",
        "match x:\n  case 'a':\n    y = 1",
    ),
    "other letters": ("x = 'é'  # é\né = 'ü # ö'  # ß\n", "x = 'é'\né = 'ü # ö'"),
    "another encoding": ("# coding: latin-1\nx = 'é'  # a\n", "x = 'é'"),
    "no Python": ('{"a": true, # b\n', '{"a": true, # b\n'),
    "a byte order mark": ("\ufeffx = 1  # a\n", "\ufeffx = 1  # a\n"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_checksum_leaves_out_comments_docstrings_and_blank_lines(name: str) -> None:
    source, counted = SOURCES[name]
    found = code.checksums({"code/project/a.py": source.encode()}, None)["project/a.py"]
    assert found == hashlib.sha256(counted.encode()).hexdigest()
