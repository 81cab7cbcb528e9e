"""Checksums of a job's code: what is cut out of it, and that it is done without its tokens."""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from pathlib import Path

import pytest

from trnslurm.render import code

ROOT = Path(__file__).resolve().parents[2]
OURS = [f for d in ("trnslurm/node", "trnslurm/train", "jobs") for f in (ROOT / d).rglob("*.py")]
CODE = {f"code/{file.relative_to(ROOT)}": file.read_bytes() for file in OURS}
QUOTES = '"""'

TRICKY = {
    "no comment": "x = 1\n",
    "in strings": """x = "#"; y = 'a"#' + "b'#"  # c "d" '\n""",
    "escaped": 'x = "\\"#"  # y\nz = r"\\"  # w\n'.replace('r"\\"', 'r"\\d"'),
    "one line": f"x = {QUOTES}a # b{QUOTES}  # c\ny = 'a''b'  # d\n",
    "several lines": f"x = {QUOTES}a  # b\n\n  c  # d\n{QUOTES}  # e\n",
    "bytes": f"x = b{QUOTES}a  # b\n # c\n{QUOTES}  # e\n",
    "joined": 'x = ("a"  # b\n  "c # d")\n',
    "continued": "x = 'a \\\n# b'  # c\ny = 1 + \\\n  2  # d\n",
    "formatted": "x = f'{1}#'  # a\n",
    "formatted over lines": f"x = f{QUOTES}{{1}}  # a\n {{2}} {QUOTES}  # b\n",
    "docstring": f"{QUOTES}A # b\n\nc{QUOTES}  # d\nclass E:\n    'f'  # g\n    h = 1\n    'i'\n",
    "no docstring": f"if 1: 'a'  # b\nx = 1; {QUOTES}c # d\n e{QUOTES}  # f\n",
    "docstring and more": f"'a'; x = 1  # b\n{QUOTES}c{QUOTES}; y = {QUOTES}d\n # e\n{QUOTES}\n",
    "decorated": "@f('''a # b\n # c''')  # d\ndef g(): pass  # e\n",
    "lambda": "f = lambda: [\n    'a',  # b\n    '''c\n  # d\n''']\n",
    "branches": "match x:\n    case 'a':  # b\n        '''c'''\ntry: pass\nexcept E:\n    '# d'\n",
    "other letters": "x = 'é'  # é\né = '''ü # ö\nä'''  # ß\n'ü'; y = 1\n",
    "other line ends": "x = 1  # a\x0c\ny = '\x1c'  # b\r\nif y: 'c'\n",
    "no end": "x = 1  # a",
    "blank": "\n\n  # a\n\n",
    "no Python": '{"a": true, # b\n',
    "another encoding": "# coding: latin-1\nx = 'é'  # a\n",
    "a mark": "\ufeffx = 1  # a\n",
}


def reference(data: bytes) -> str:
    """Return the checksum by all tokens and nodes: keys of caches have been made of it."""
    try:
        text = data.decode()
        tree, lines = ast.parse(text), text.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    except (SyntaxError, ValueError, tokenize.TokenError):
        return hashlib.sha256(data).hexdigest()
    dropped: set[int] = set()
    inside: set[int] = set()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if is_text and not lines[value.lineno - 1][: value.col_offset].strip():
            dropped |= {*range(value.lineno, value.end_lineno + 1)}
        text_node = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if text_node or isinstance(node, ast.JoinedStr):
            rows = range(node.lineno, node.end_lineno + 1)
            inside |= {*rows} if len(rows) > 1 else set()
    kept = [
        line if row in inside else line.rstrip()
        for row, line in enumerate(lines, 1)
        if row not in dropped and (row in inside or line.strip())
    ]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def checksum(data: bytes) -> str:
    return code.checksums({"code/project/a.py": data}, None)["project/a.py"]


@pytest.mark.parametrize("name", TRICKY)
def test_the_checksum_is_that_by_all_tokens(name: str) -> None:
    data = TRICKY[name].encode()
    assert checksum(data) == reference(data)


def test_the_checksums_of_our_own_files_are_too() -> None:
    assert len(CODE) > 100
    for data in CODE.values():
        assert checksum(data) == reference(data)


def test_our_own_files_are_parsed_once_and_never_made_tokens(monkeypatch) -> None:
    parsed = []
    parse = ast.parse

    def count(source):
        parsed.append(source)
        return parse(source)

    monkeypatch.setattr(ast, "parse", count)
    monkeypatch.setattr(tokenize, "generate_tokens", None)
    for cached in (code._all_modules, code._checksum, code._parse):
        cached.cache_clear()
    found = code.checksums(CODE, "jobs/gpt2_zero1/train.py")
    assert len(found) > 40
    assert len(parsed) == len({*parsed})
