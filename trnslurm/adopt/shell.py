"""Parses the commands of a batch script, as far as possible without running them.

A simple command becomes a Command with its words. Anything more complex, such as a loop, a
condition, a function or a here-document, stays one Block of text.
https://www.gnu.org/software/bash/manual/bash.html#Shell-Syntax
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_OPERATORS = ("&&", "||", ";;", "|&", "&>>", "&>", "|", ";", "&", "\n")
_OPENS = frozenset({"if", "for", "while", "until", "case", "select", "{", "("})
_CLOSES = frozenset({"fi", "done", "esac", "}", ")"})
_BEFORE_A_COMMAND = frozenset({"then", "else", "elif", "do", "!", "time"})
_PLAIN = re.compile(r"[\w./:=,+@%^-]+", re.ASCII)
_TESTS = ("[ ", "[[", "[[ ")
"""The beginning of a word that starts a test, with the next character."""
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = rf"({_NAME})(\+?)=(.*)"


class Part(NamedTuple):
    """A piece of a word: text, the name of a variable, or something that the shell computes."""

    kind: str
    """`text`, `name` or `other`."""
    text: str
    quoted: bool = False
    """Whether it is in double quotes, so that its value is never split into words."""


class Word(NamedTuple):
    """A word of a command."""

    raw: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str | None:
        """The word itself, if it contains nothing to expand."""
        if any(part.kind != "text" for part in self.parts):
            return None
        return "".join(part.text for part in self.parts)


class Command(NamedTuple):
    """A simple command."""

    line: int
    raw: str
    assignments: tuple[tuple[str, Word], ...]
    words: tuple[Word, ...]
    redirections: tuple[str, ...]
    after: str
    """The operator before it: `;`, `&&`, `||` or `|`."""
    background: bool

    @property
    def head(self) -> str:
        """Its first word; empty for an assignment, or for a word that the shell computes."""
        return (self.words[0].text or "") if self.words else ""


class Block(NamedTuple):
    """Lines that are not a simple command."""

    line: int
    raw: str
    after: str = ";"
    """As for a command."""


Statement = Command | Block


def statements(text: str, *, first_line: int = 1) -> list[Statement]:
    """Return the commands of a script in order."""
    return [*_Reader(text, first_line).read()]


class _Token(NamedTuple):
    kind: str
    """`word`, `operator`, `redirection` or `block`, which this reader leaves unparsed."""
    raw: str
    word: Word | None
    line: int
    begin: int = 0
    end: int = 0


class _Reader:
    """Reads a text from left to right."""

    def __init__(self, text: str, first_line: int) -> None:
        self._text, self._at = text, 0
        self._line = first_line
        self._documents: list[tuple[str, bool]] = []

    def read(self) -> Iterator[Statement]:
        tokens = [*self._tokens()]
        at, after = 0, ";"
        while at < len(tokens):
            token = tokens[at]
            if token.kind == "operator":
                after = ";" if token.raw in ("\n", "&") else token.raw
                at += 1
                continue
            end = _end_of_block(tokens, at)
            if end > at:
                yield Block(token.line, self.between(tokens[at:end]), after)
                at = end
                continue
            end = at
            while end < len(tokens) and tokens[end].kind != "operator":
                end += 1
            background = end < len(tokens) and tokens[end].raw == "&"
            yield _command(tokens[at:end], after, background=background)
            at = end

    def between(self, tokens: Sequence[_Token]) -> str:
        """Return the original text of tokens."""
        return self._text[tokens[0].begin : tokens[-1].end] if tokens else ""

    def _tokens(self) -> Iterator[_Token]:
        while self._at < len(self._text):
            begin = self._at
            for token in self._next():
                yield token._replace(begin=begin, end=self._at)
                begin = self._at

    def _next(self) -> Iterator[_Token]:
        character = self._text[self._at]
        if self._text.startswith("\\\n", self._at) or self._text[self._at :] == "\\":
            self._skip(2)  # bash also drops a backslash at the end of the file
        elif character in " \t\r":
            self._skip(1)
        elif character == "#":
            end = self._text.find("\n", self._at)
            self._skip((end if end >= 0 else len(self._text)) - self._at)
        elif found := self._redirection():
            yield found
        elif operator := self._operator():
            line = self._line
            self._skip(len(operator))
            yield _Token("operator", operator, None, line)
            if operator == "\n" and self._documents:
                yield self._documents_here()
        elif character in "()":
            self._skip(1)
            yield _Token("word", character, Word(character, (Part("other", character),)),
                         self._line)  # fmt: skip
        else:
            yield self._word_token()

    def _skip(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at = min(self._at + count, len(self._text))

    def _operator(self) -> str:
        return next((o for o in _OPERATORS if self._text.startswith(o, self._at)), "")

    def _redirection(self) -> _Token | None:
        found = re.compile(r"(?:\d*|&)(<<<|<<-?|>>|>&|<&|>\||<>|>|<)(?!\()").match(
            self._text, self._at
        )
        if not found:
            return None
        line, begin = self._line, self._at
        self._skip(found.end() - begin)
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._skip(1)
        target = self._word()
        if found[1] in ("<<", "<<-"):
            self._documents.append((re.sub(r"[\"'\\]", "", target.raw), found[1] == "<<-"))
            return _Token("block", self._text[begin : self._at], None, line)
        return _Token("redirection", self._text[begin : self._at], target, line)

    def _documents_here(self) -> _Token:
        """Return the here-documents that begin on this line."""
        line, begin = self._line, self._at
        for end, tabs in self._documents:
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at)
                stop = len(self._text) if stop < 0 else stop
                content = self._text[self._at : stop]
                self._skip(min(stop + 1, len(self._text)) - self._at)
                if (content.lstrip("\t") if tabs else content) == end:
                    break
        self._documents.clear()
        return _Token("block", self._text[begin : self._at], None, line)

    def _word_token(self) -> _Token:
        line, begin = self._line, self._at
        word = self._word()
        if self._at == begin:  # a character that cannot begin a word
            self._skip(1)
            word = Word(self._text[begin], (Part("other", self._text[begin]),))
        return _Token("word", word.raw, word, line)

    def _word(self) -> Word:
        begin, parts = self._at, list[Part]()
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t\r\n;&|<>()" and not self._text.startswith(("<(", ">("), self._at):
                is_array = character == "(" and self._text[self._at - 1] == "=" and self._at > begin
                if not is_array:
                    break
                parts.append(Part("other", self._balanced("(", ")")))
            elif character == "'":
                parts.append(Part("text", self._single()))
            elif character == '"':
                parts += self._double()
            elif self._text.startswith("\\\n", self._at) or self._text[self._at :] == "\\":
                self._skip(2)
            elif character == "\\":
                parts.append(Part("text", self._text[self._at + 1 : self._at + 2]))
                self._skip(2)
            elif character in "$`":
                parts.append(self._expansion())
            elif self._text.startswith(("<(", ">("), self._at):
                self._skip(1)
                parts.append(Part("other", f"{character}{self._balanced('(', ')')}"))
            elif self._at - begin < 2 and self._text[begin : self._at + 2] in _TESTS:
                parts.append(Part("text", character))
                self._skip(1)
            elif (character == "~" and self._at == begin) or character in "*?[":
                kind = "name" if character == "~" else "other"
                parts.append(Part(kind, "HOME" if kind == "name" else character))
                self._skip(1)
            else:
                run = _PLAIN.match(self._text, self._at)
                text = run[0] if run else character
                parts.append(Part("text", text))
                self._skip(len(text))
        return Word(self._text[begin : self._at], _joined(parts))

    def _single(self) -> str:
        end = self._text.find("'", self._at + 1)
        end = len(self._text) if end < 0 else end
        text = self._text[self._at + 1 : end]
        self._skip(end + 1 - self._at)
        return text

    def _double(self) -> list[Part]:
        parts = [Part("text", "")]
        self._skip(1)
        while self._at < len(self._text) and self._text[self._at] != '"':
            character = self._text[self._at]
            if character in "$`":
                parts.append(self._expansion()._replace(quoted=True))
            elif re.compile(r'\\[$`"\\\n]').match(self._text, self._at):
                escaped = self._text[self._at + 1]
                parts.append(Part("text", "" if escaped == "\n" else escaped))
                self._skip(2)
            else:
                parts.append(Part("text", character))
                self._skip(1)
        self._skip(1)
        return parts

    def _expansion(self) -> Part:
        text, begin = self._text, self._at
        for shown, variable in (("`pwd`", "PWD"), ("$(pwd)", "PWD"), ("$(whoami)", "USER")):
            if text.startswith(shown, begin):
                self._skip(len(shown))
                return Part("name", variable)
        if text[begin] == "`":
            end = text.find("`", begin + 1)
            self._skip((end + 1 if end >= 0 else len(text)) - begin)
            return Part("other", text[begin : self._at])
        if text.startswith("$(", begin):
            self._skip(1)
            return Part("other", f"${self._balanced('(', ')')}")
        if text.startswith("${", begin):
            self._skip(1)
            inner = self._balanced("{", "}")
            name = re.fullmatch(rf"\{{({_NAME}|\d+)\}}", inner)
            return Part("name", name[1]) if name else Part("other", f"${inner}")
        if found := re.compile(rf"\$({_NAME})").match(text, begin):
            self._skip(found.end() - begin)
            return Part("name", found[1])
        if found := re.compile(r"\$[\d@*#?$!-]").match(text, begin):
            self._skip(2)
            return Part(
                "name" if found[0][1].isdigit() else "other",
                found[0][1] if found[0][1].isdigit() else found[0],
            )
        self._skip(1)
        return Part("text", "$")

    def _balanced(self, opens: str, closes: str) -> str:
        """Return the text up to the matching bracket, ignoring quoted ones."""
        begin, depth = self._at, 0
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "'":
                self._single()
                continue
            if character == "\\":
                self._skip(2)
                continue
            if character == '"' and self._at > begin:
                self._double()
                continue
            depth += (character == opens) - (character == closes)
            self._skip(1)
            if depth == 0:
                break
        return self._text[begin : self._at]


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts, with adjacent text parts merged."""
    joined: list[Part] = []
    for part in parts:
        if part.kind == "text" and joined and joined[-1].kind == "text":
            joined[-1] = Part("text", joined[-1].text + part.text, joined[-1].quoted)
        else:
            joined.append(part)
    return tuple(joined)


class Branch(NamedTuple):
    """A branch of an `if` or a `case`, or the body of a loop, a function or a group."""

    test: list[Statement]
    """The test of an `if`; empty if none is needed."""
    body: list[Statement]
    patterns: tuple[Word, ...] = ()
    """The patterns of a `case`. One of them must match its word."""


class Compound(NamedTuple):
    """The contents of a block."""

    kind: str
    """`if`, `case`, `for`, `function` or `group`."""
    branches: list[Branch]
    name: str = ""
    """The variable of a loop, or the function's name."""
    words: tuple[Word, ...] = ()
    """The word of a `case`, or the words of a loop."""


def parsed(block: Block) -> Compound | None:
    """Return the contents of a block, or None for another kind or if more surrounds it."""
    reader = _Reader(block.raw, block.line)
    tokens = [*reader._tokens()]
    while tokens and (tokens[-1].raw == "\n" or _is_output(tokens[-1])):
        del tokens[-1]
    raws = [token.raw for token in tokens]

    def read(some: Sequence[_Token]) -> list[Statement]:
        return statements(reader.between(some), first_line=some[0].line) if some else []

    if raws[:1] == ["function"] and raws[2:4] != ["(", ")"]:
        raws[2:2], tokens[2:2] = ["(", ")"], tokens[1:2] * 2
    start = int(raws[:1] == ["function"])
    if raws[start + 1 : start + 4] == ["(", ")", "\n"]:
        del raws[start + 3], tokens[start + 3]
    if raws[start + 1 : start + 4] == ["(", ")", "{"] and raws[-1] == "}":
        return Compound("function", [Branch([], read(tokens[start + 4 : -1]))], raws[start])
    pair = (raws[0], raws[-1]) if raws else ()
    if pair == ("{", "}") or (pair == ("(", ")") and raws.count("(") == 1):
        return Compound("group", [Branch([], read(tokens[1:-1]))])
    if pair == ("case", "esac") and raws[2:3] == ["in"] and tokens[1].word:
        return Compound("case", _cases(tokens[3:-1], read), words=(tokens[1].word,))
    parts = _at_the_top(tokens)
    if pair == ("for", "done") and [word for word, _ in parts] == ["for", "do", "done"]:
        name, *words = [t for t in parts[0][1] if t.kind == "word"] or tokens[:1]
        if [t.raw for t in words[:1]] != ["in"] or name.word is None or name.word.text is None:
            return None
        del words[0]
        body = [Branch([], read(parts[1][1]))]
        return Compound("for", body, name.raw, tuple(t.word for t in words if t.word))
    if pair == ("if", "fi"):
        found: list[Branch] = []
        test: list[Statement] = []
        for word, some in parts[:-1]:
            if word in ("if", "elif"):
                test = read(some)
            else:
                found.append(Branch(test if word == "then" else [], read(some)))
        return Compound("if", found)
    return None


def _is_output(token: _Token) -> bool:
    """Check whether a token redirects the output of a block."""
    return token.kind == "redirection" and ">" in token.raw and "<" not in token.raw


def _at_the_top(tokens: Sequence[_Token]) -> list[tuple[str, list[_Token]]]:
    """Return the tokens after each keyword of the outermost `if` or loop."""
    parts: list[tuple[str, list[_Token]]] = []
    stack: list[str] = []
    begins = True
    for token in tokens:
        word = token.raw if token.kind == "word" and begins else ""
        if word in _OPENS or (token.kind == "word" and token.raw == "("):
            stack.append(token.raw)
        elif (word in _CLOSES - {")"}) or (token.raw == ")" and stack[-1:] == ["("]):
            stack = stack[:-1]
        top = len(stack) == 1 and word in ("if", "elif", "else", "then", "for", "do")
        if top or (not stack and word):
            parts.append((word, []))
        elif parts:
            parts[-1][1].append(token)
        begins = token.kind == "operator" or token.raw in _OPENS | _BEFORE_A_COMMAND
    return parts


def _cases(
    tokens: Sequence[_Token], read: Callable[[Sequence[_Token]], list[Statement]]
) -> list[Branch]:
    found: list[Branch] = []
    patterns: list[Word] = []
    body: list[_Token] | None = None
    depth = 0
    for token in tokens:
        if body is None:
            if token.raw == ")":
                body = []
            elif token.kind == "word" and token.word and token.raw != "(":
                patterns.append(token.word)
            continue
        depth += (token.raw in ("case", "(")) - (token.raw in ("esac", ")"))
        if token.raw == ";;" and depth == 0:
            found.append(Branch([], read(body), tuple(patterns)))
            patterns, body = [], None
        else:
            body.append(token)
    return [*found, Branch([], read(body), tuple(patterns))] if body is not None else found


def _end_of_block(tokens: Sequence[_Token], at: int) -> int:
    """Return where the block that begins here ends, or `at` itself for a simple command."""
    raw = tokens[at].raw
    function = raw == "function" or [t.raw for t in tokens[at + 1 : at + 3]] == ["(", ")"]
    stack: list[str] = []
    begins, end = True, at
    if raw == "[[":
        closing = next((n for n in range(at, len(tokens)) if tokens[n].raw == "]]"), at)
        joins = any(token.kind == "operator" for token in tokens[at:closing])
        return closing + 1 if joins else at
    if not function and raw not in _OPENS and not raw.startswith("(("):
        # A here-document makes the command a block, with everything that belongs to it.
        stop = next((n for n in range(at, len(tokens)) if tokens[n].raw == "\n"), len(tokens))
        has_document = any(t.kind == "block" for t in tokens[at:stop])
        return min(stop + 2, len(tokens)) if has_document else at
    while end < len(tokens):
        token = tokens[end]
        if token.kind == "word":
            if (begins and token.raw in _OPENS) or token.raw == "(":
                stack.append(token.raw)
            elif token.raw == ")":
                stack = (
                    stack[:-1] if stack[-1:] == ["("] else stack
                )  # otherwise it belongs to a case
            elif begins and token.raw in _CLOSES:
                stack = stack[:-1]
            begins = token.raw in _OPENS | _BEFORE_A_COMMAND or token.raw in "()"
        elif token.kind == "operator":
            begins = True
        end += 1
        if (
            not stack
            and token.kind == "word"
            and token.raw in _CLOSES
            and (not function or token.raw in ("}", "fi", "done", "esac"))
        ):
            break
    while end < len(tokens) and tokens[end].kind != "operator":  # its redirections
        end += 1
    return end


def _command(tokens: Sequence[_Token], after: str, *, background: bool) -> Command:
    words = [token.word for token in tokens if token.kind == "word" and token.word]
    assignments: list[tuple[str, Word]] = []
    while words and (found := re.fullmatch(_ASSIGNMENT, words[0].raw, re.DOTALL)):
        assignments.append((found[1], value_of(words.pop(0), found[2] == "+")))
    return Command(
        tokens[0].line, " ".join(token.raw for token in tokens), tuple(assignments), tuple(words),
        tuple(t.raw for t in tokens if t.kind == "redirection"), after, background,
    )  # fmt: skip


def parts_of(text: str) -> tuple[Part, ...]:
    """Return the parts of a text, read as if in double quotes."""
    if len(text) > 1 and text[0] == text[-1] == "'":
        return (Part("text", text[1:-1]),)
    quoted = text if len(text) > 1 and text[0] == text[-1] == '"' else f'"{text}"'
    return _joined(_Reader(quoted, 1)._double())


def value_of(word: Word, appends: bool = False) -> Word:
    """Return the value in a word NAME=VALUE."""
    first, *rest = word.parts
    name, _, text = first.text.partition("=")
    parts = [Part("name", name.rstrip("+"))] if appends else []
    return Word(word.raw.partition("=")[2], _joined([*parts, Part("text", text), *rest]))
