"""The variables of a batch script: what is known of them without running it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from trnslurm.adopt.shell import Command, Part, Statement, Word, parts_of, statements

_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*|\d):?-(.*)\}", re.DOTALL)
_SET_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=(.*)\}", re.DOTALL)
OF_THE_RENDEZVOUS = frozenset({"MASTER_ADDR", "MASTER_PORT"})
"""Whose values are trnslurm's, whatever the script computes."""
_EVERY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_ARITHMETIC = re.compile(r"\$\(\((.*)\)\)", re.DOTALL)
_ASSIGNED = re.compile(
    r"(?:^|[\s;({])(?:(?:export|local|declare|read)(?: -\w+)* )?([A-Za-z_]\w*)\+?="
)
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


_SOME = "\ue003"
"""Stands for a value that is not known here, but surely not empty."""
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


_LONGEST, _MOST_WORDS = 64 << 10, 4096
"""Of a value: a script can double it line by line."""


class Variables:
    """What a script's variables are, one line after another.

    A name that stays a name is of the user's shell or of the job. What only the script's own shell
    would know is forgotten: its uses stay names, too.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        arguments: Sequence[str],
        numbers: Mapping[str, int],
        *,
        in_array: bool = False,
    ) -> None:
        self._environ, self._numbers, self._in_array = environ, numbers, in_array
        self._known: dict[str, tuple[Part, ...]] = {
            str(n): (Part("text", word),) for n, word in enumerate(arguments, 1)
        }
        self._arrays: dict[str, tuple[Word, ...]] = {
            "@": tuple(Word(word, (Part("text", word),)) for word in arguments)
        }
        self.computed: set[str] = set()
        """Those that only the script's shell knows."""
        self.used: set[str] = set()
        self.open = False
        """Whether a file that the script sources may have set others."""

    def assign(self, name: str, value: Word) -> bool:
        """Give a variable its value; return whether all of it is known."""
        self.computed.discard(name)
        if (items := _inside_array(value)) is not None:
            before = self._arrays.get(name, ())
            appends = value.parts[:1] == (Part("name", name),)
            words = [each for item in items for each in self.words(item)]
            if len(before) + len(words) > _MOST_WORDS:
                self.forget(name)
                return False
            self._arrays[name] = (*(before if appends else ()), *words)
            return not any(map(self.unknown, words))
        parts = self.expand(value).parts
        if sum(len(part.text) for part in parts) > _LONGEST:
            self.forget(name)
            return False
        self._known[name] = parts
        return not self.unknown(Word("", self._known[name]))

    def forget(self, name: str) -> None:
        """Note that only the script's shell knows a variable."""
        self._known.pop(name, None)
        self._arrays.pop(name, None)
        self.computed.add(name)

    def forget_assigned(self, raw: str) -> None:
        """Forget what a loop, a condition or a function may assign."""
        for name in re.findall(r"\b(?:for|read)(?: -\w+)* ([A-Za-z_]\w*)", raw):
            self.forget(name)
        for name in _ASSIGNED.findall(raw):
            self.forget(name)
        for inner in re.findall(r"\(\((.*?)\)\)|\blet ([^;\n]*)", raw):
            for name in re.findall(r"[A-Za-z_]\w*", " ".join(inner)):
                self.forget(name)

    def is_set(self, name: str) -> bool:
        """Check whether a variable is known to have a value."""
        return name in self._known or name in self._environ

    def _of_job(self, name: str) -> bool:
        """Check whether Slurm sets a variable in the job."""
        if name.startswith("SLURM_ARRAY_"):
            return self._in_array
        return name.startswith("SLURM") or name == "CUDA_VISIBLE_DEVICES"

    def has_value(self, name: str) -> bool:
        """Check whether a variable of the user's shell or of Slurm is surely not empty."""
        if name in self._known or name in self.computed:
            return False
        return bool(self._environ.get(name)) or name in self._numbers or self._of_job(name)

    def is_unset(self, name: str) -> bool:
        """Check whether a variable is empty, as nobody sets it."""
        known = self.is_set(name) or name in self.computed or name in self._numbers
        return not (known or self.open or self._of_job(name))

    def value(self, name: str) -> tuple[Part, ...] | None:
        """Return a variable's value, if the script gives it one that is known."""
        return self._known.get(name)

    def unknown(self, word: Word) -> bool:
        """Check whether a word has something that only the script's shell would know."""
        return any(
            part.kind == "other" or (part.kind == "name" and part.text in self.computed)
            for part in word.parts
        )

    def expand(self, word: Word) -> Word:
        """Return a word with the values of the variables that are known."""
        parts: list[Part] = []
        for part in word.parts:
            parts += self._value_of(part)
        return Word(word.raw, tuple(parts))

    def words(self, word: Word) -> list[Word]:
        """Return the words that the shell makes of one: several of an array, or of a text."""
        filled = [part for part in word.parts if part.text or part.kind != "text"]
        if len(filled) == 1 and filled[0].kind == "other":
            raw = filled[0].text
            every = _EVERY.fullmatch(raw)
            name = every[1] if every else "@" if raw in ("$@", "$*", "${@}") else ""
            if name in self._arrays and name not in self.computed:
                self.used.add(name)
                return [*self._arrays[name]]
        words: list[list[Part]] = [[]]
        for part in word.parts:
            for value in self._value_of(part):
                if part.kind != "text" and not part.quoted and value.kind == "text":
                    first, *others = re.split(r"\s+", value.text)
                    words[-1] += [Part("text", first)] if first else []
                    words += [[Part("text", other)] if other else [] for other in others]
                else:
                    words[-1].append(value)
        split = any(part.kind != "text" and not part.quoted for part in word.parts)
        return [Word(word.raw, tuple(parts)) for parts in words if parts or not split]

    def _value_of(self, part: Part) -> tuple[Part, ...]:
        if part.kind == "name":
            self.used.add(part.text)
            if part.text in OF_THE_RENDEZVOUS:
                return (part,)
            return self._known.get(part.text, (part,))
        if part.kind == "other" and (found := _SET_DEFAULT.fullmatch(part.text)):
            name = found[1]
            if name not in self._known and name not in self._environ:
                self._known[name] = tuple(v for p in parts_of(found[2]) for v in self._value_of(p))
            return self._value_of(Part("name", name, part.quoted))
        if part.kind == "other" and (found := _DEFAULT.fullmatch(part.text)):
            name = found[1]
            self.used.add(name)
            if name in self._known or name in OF_THE_RENDEZVOUS:
                return self._value_of(Part("name", name, part.quoted))
            if name in self._environ or name in self._numbers or self._of_job(name):
                return (Part("name", name, part.quoted),)
            if name in self.computed or self.open:
                return (part,)
            return tuple(v for p in parts_of(found[2]) for v in self._value_of(p))
        if part.kind == "other" and (found := _ARITHMETIC.fullmatch(part.text)):
            number = self._number(found[1])
            return (part,) if number is None else (Part("text", str(number)),)
        return (part,)

    def _number(self, text: str) -> int | None:
        """Return the value of an arithmetic expansion, if all in it is known."""

        def named(found: re.Match[str]) -> str:
            name = found[1]
            self.used.add(name)
            known = self._known.get(name, ())
            value = "".join(p.text if p.kind == "text" else "?" for p in known)
            return value or str(self._numbers.get(name, "?"))

        plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", named, text)
        if not re.fullmatch(r"[\d\s()+*/%-]{1,200}", plain):
            return None
        try:
            number = _evaluated(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None
        return number if abs(number) < 1 << 63 else None  # as many bits as bash has


def holds(test: Sequence[Statement], variables: Variables) -> bool | None:
    """Return whether the test of an `if` holds; None: only the job knows.

    https://www.gnu.org/software/bash/manual/bash.html#Bash-Conditional-Expressions
    """
    if len(test) != 1 or not isinstance(test[0], Command) or test[0].assignments:
        return None
    words: list[str] = []
    for word in test[0].words:
        text = ""
        for part in variables.expand(word).parts:
            if part.kind == "other":
                return None
            if part.kind == "text":
                text += part.text
            elif variables.has_value(part.text):
                text += _SOME
            elif not variables.is_unset(part.text):
                return None
        words.append(text)
    if words[:1] not in (["["], ["[["], ["test"]):
        return None
    words = words[1 : None if words[0] == "test" else -1]
    no = words[:1] == ["!"]
    found = _compared(words[no:])
    return found if found is None else found is not no


def _compared(words: Sequence[str]) -> bool | None:
    match words:
        case ["-z", text]:
            return not text
        case [text] | ["-n", text]:
            return bool(text)
        case [left, _, right] if _SOME in left + right:
            return None
        case [left, "=" | "==", right] if not set(right) & {"*", "?", "["}:
            return left == right
        case [left, "!=", right] if not set(right) & {"*", "?", "["}:
            return left != right
        case [left, sign, right] if sign in _NUMBERS:
            with suppress(ValueError):
                return _NUMBERS[sign](int(left), int(right))
    return None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError


def _inside_array(value: Word) -> tuple[Word, ...] | None:
    """Return the words of NAME=(…); None: the value is no array."""
    parts = [p for p in value.parts if p != Part("text", "")]
    if not parts or parts[-1].kind != "other" or not parts[-1].text.startswith("("):
        return None
    found = statements(parts[-1].text[1:-1].replace("\n", " "))
    if not found:
        return ()
    [first, *others] = found
    return first.words if isinstance(first, Command) and not others else None
