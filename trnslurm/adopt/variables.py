"""The variables of a batch script, as far as they are known without running it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from trnslurm.adopt.outputs import printed
from trnslurm.adopt.shell import Command, Part, Word, parts_of, statements

OF_THE_RENDEZVOUS = frozenset({"MASTER_ADDR", "MASTER_PORT"})
"""Variables whose values trnslurm sets, whatever the script computes."""
# ${#NAME}, ${NAME[1]} and ${NAME%.*}: a sign, the name, a subscript and an operator.
_BRACES = re.compile(r"\$\{(#?)([A-Za-z_]\w*|\d+|[@*])(?:\[([^\]]*)\])?(.*)\}", re.DOTALL)
_OPERATOR = re.compile(r"(:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:)(.*)", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\((.*)\)\)", re.DOTALL)
_SUBSTITUTED = re.compile(r"\$\((?!\()(.*)\)|`(.*)`", re.DOTALL)
# Slurm sets these if the file has the option: https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT
# and env_array_for_batch_job in src/common/env.c.
IF_GIVEN = {
    "SLURM_NTASKS": "ntasks", "SLURM_NPROCS": "ntasks", "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task", "SLURM_GPUS": "gpus",
    "SLURM_GPUS_PER_NODE": "gpus-per-node", "SLURM_GPUS_PER_TASK": "gpus-per-task",
    "SLURM_MEM_PER_NODE": "mem", "SLURM_MEM_PER_CPU": "mem-per-cpu",
    "SLURM_MEM_PER_GPU": "mem-per-gpu",
}  # fmt: skip
# Variables that bash or a site's prolog sets in every job.
_IN_EVERY_JOB = re.compile(r"SLURM\w*|CUDA_VISIBLE_DEVICES|TMPDIR|BASH\w*|EPOCH\w*|HOST\w+|E?UID"
                           r"|RANDOM|SECONDS|LINENO|PPID|PWD|OLDPWD|SHLVL|IFS|OPT\w+")  # fmt: skip
_ASSIGNED = re.compile(
    r"(?:^|[\s;({])(?:(?:export|local|declare|read)(?: -\w+)* )?([A-Za-z_]\w*)\+?="
)
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


SOME = "\ue003"
"""Stands for a value that is unknown here, but certainly not empty."""
_HERE = {
    Part("name", name, quoted) for name in ("PWD", "SLURM_SUBMIT_DIR") for quoted in (False, True)
}
WILDCARDS = ("*", "?", "[")
_LONGEST, _MOST_WORDS = 64 << 10, 4096
"""The size limit of a value, because a script can double it line by line."""


class Variables:
    """The values of a script's variables, line by line.

    A name that stays a name belongs to the user's shell or to the job. Values that only the
    script's own shell would know are forgotten, and their uses stay names, too.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        arguments: Sequence[str],
        numbers: Mapping[str, int],
        *,
        texts: Mapping[str, str] | None = None,
        assigned: Collection[str] = (),
        in_array: bool = False,
    ) -> None:
        self._environ, self._numbers, self._in_array = environ, numbers, in_array
        self._assigned = assigned
        self._arrays: dict[str, tuple[Word, ...]] = {}
        self._known: dict[str, tuple[Part, ...]] = {
            name: (Part("text", text),) for name, text in (texts or {}).items()
        }
        self.give(arguments)
        self.computed: set[str] = set()
        """Variables that only the script's shell knows."""
        self.used: set[str] = set()
        self.open = False
        """Whether a file that the script sources may have set other variables."""
        self.loads = False
        """Whether a module may have set other variables."""

    def give(self, arguments: Sequence[str | Word]) -> None:
        """Set the arguments of the script or of a function."""
        words = [w if isinstance(w, Word) else Word(w, (Part("text", w),)) for w in arguments]
        for name in [name for name in self._known if name.isdecimal()]:
            del self._known[name]
        self._known |= {str(n): word.parts for n, word in enumerate(words, 1)}
        self._arrays["@"] = tuple(words)

    @property
    def arguments(self) -> tuple[Word, ...]:
        """The current arguments."""
        return self._arrays["@"]

    def assign(self, name: str, value: Word) -> bool:
        """Set the value of a variable; return whether it is completely known."""
        if (items := _inside_array(value)) is not None:
            before = self._arrays.get(name, ())
            appends = value.parts[:1] == (Part("name", name),)
            words = [each for item in items for each in self.words(item)]
            if len(before) + len(words) > _MOST_WORDS:
                self.forget(name)
                return False
            self.computed.discard(name)
            self._arrays[name] = (*(before if appends else ()), *words)
            return not any(map(self.unknown, words))
        parts = self.expand(value).parts
        if sum(1 + len(part.text) for part in parts) > _LONGEST:
            self.forget(name)
            return False
        self.computed.discard(name)
        self._known[name] = parts
        return not self.unknown(Word("", self._known[name]))

    def move(self, before: str) -> None:
        """Note that the script leaves the directory `before`, which values may refer to."""
        text = Part("text", before)
        for name, parts in self._known.items():
            self._known[name] = tuple(text if p in _HERE else p for p in parts)
        for name, words in self._arrays.items():
            self._arrays[name] = tuple(
                Word(w.raw, tuple(text if p in _HERE else p for p in w.parts)) for w in words
            )
        self._known.setdefault("SLURM_SUBMIT_DIR", (text,))

    def forget(self, name: str) -> None:
        """Note that only the script's shell knows a variable."""
        self._known.pop(name, None)
        self._arrays.pop(name, None)
        self.computed.add(name)

    def forget_assigned(self, raw: str) -> None:
        """Forget variables that a loop, a condition or a function may assign."""
        for name in re.findall(r"\b(?:for|read)(?: -\w+)* ([A-Za-z_]\w*)", raw):
            self.forget(name)
        for name in _ASSIGNED.findall(raw):
            self.forget(name)
        for inner in re.findall(r"\(\((.*?)\)\)|\blet ([^;\n]*)", raw):
            for name in re.findall(r"[A-Za-z_]\w*", " ".join(inner)):
                self.forget(name)

    def _of_job(self, name: str) -> bool:
        """Check whether a variable is set in the job to a value that is unknown here."""
        if name.startswith("SLURM_ARRAY_"):
            return self._in_array
        if name in IF_GIVEN:
            return name in self._numbers
        return _IN_EVERY_JOB.fullmatch(name) is not None

    def has_value(self, name: str) -> bool:
        """Check whether a variable of the user's shell or of Slurm is certainly not empty."""
        if name in self._known or name in self.computed:
            return False
        return bool(self._environ.get(name)) or name in self._numbers or self._of_job(name)

    def is_unset(self, name: str) -> bool:
        """Check whether a variable is empty because nothing sets it."""
        known = name in self._known or name in self._arrays or name in self._environ
        known |= name in self.computed or name in self._numbers
        return not (known or self.open or self._of_job(name) or name.isdecimal())

    def value(self, name: str) -> tuple[Part, ...] | None:
        """Return a variable's value, if the script sets it to a known one."""
        return self._known.get(name)

    def items(self, name: str) -> tuple[Part, ...]:
        """Return the parts of all words of an array."""
        return tuple(part for word in self._arrays.get(name, ()) for part in word.parts)

    def unknown(self, word: Word) -> bool:
        """Check whether a word contains something that only the script's shell would know."""
        return any(
            (part.kind == "other" and part.text not in WILDCARDS)
            or (part.kind == "name" and part.text in self.computed)
            for part in word.parts
        )

    def expand(self, word: Word) -> Word:
        """Return a word with the values of known variables."""
        parts: list[Part] = []
        for part in word.parts:
            parts += self._value_of(part)
        return Word(word.raw, tuple(parts))

    def words(self, word: Word) -> list[Word]:
        """Return the words that the shell makes from one word, such as an array or a string."""
        filled = [part for part in word.parts if part.text or part.kind != "text"]
        if len(filled) == 1 and (every := self._every(filled[0])) is not None:
            return every
        words: list[list[Part]] = [[]]
        for part in word.parts:
            several = self._every(part) if part.quoted else None
            for value in (part,) if several and len(several) > 1 else self._value_of(part):
                if part.kind != "text" and not part.quoted and value.kind == "text":
                    first, *others = re.split(r"\s+", value.text)
                    words[-1] += [Part("text", first)] if first else []
                    words += [[Part("text", other)] if other else [] for other in others]
                else:
                    words[-1].append(value)
        split = any(part.kind != "text" and not part.quoted for part in word.parts)
        return [Word(word.raw, tuple(parts)) for parts in words if parts or not split]

    def _every(self, part: Part) -> list[Word] | None:
        """Return the words of an array, or of a list that only the job knows."""
        found = _BRACES.fullmatch(_with_braces(part.text)) if part.kind == "other" else None
        start = re.fullmatch(r"(?:: *(\d+))?", found[4]) if found and not found[1] else None
        if found and start:
            name, sign = found[2], found[2] if found[2] in "@*" else found[3]
            if sign == "@" or (sign == "*" and not part.quoted):
                items = self._items(name)
                begin = max(0, int(start[1] or 0) - (found[2] in "@*"))
                return None if items is None else [*items[begin:]]
        if not part.quoted:
            [*values] = self._value_of(part)
            lines = self._output(values[0]) if len(values) == 1 else None
            if isinstance(lines, int):
                return [Word("", (Part("other", f"{values[0].text}"),))] * min(lines, _MOST_WORDS)
        return None

    def _items(self, name: str) -> tuple[Word, ...] | None:
        name = "@" if name == "*" else name
        self.used.add(name)
        return None if name in self.computed else self._arrays.get(name)

    def plain(self, word: Word) -> str | None:
        """Return the text of a word, if the file and the user's shell determine it."""
        text = ""
        for part in self.expand(word).parts:
            value: str | int | None = part.text if part.kind == "text" else None
            if part.kind == "name" and part.text not in self.computed:
                value = self._numbers.get(part.text)
                if value is None and not part.text.startswith("SLURM"):
                    value = self._environ.get(part.text)
                if value is None and self.is_unset(part.text):
                    value = ""
            if value is None:
                return None
            text += str(value)
        return text

    def _value_of(self, part: Part) -> tuple[Part, ...]:
        if part.kind == "name":
            self.used.add(part.text)
            if part.text in OF_THE_RENDEZVOUS:
                return (part,)
            if part.text not in self._known and (items := self._arrays.get(part.text)):
                return items[0].parts
            empty = part.text in self._assigned and self.is_unset(part.text)
            return self._known.get(part.text, () if empty else (part,))
        if part.kind != "other":
            return (part,)
        value: str | int | tuple[Part, ...] | None = None
        if found := _ARITHMETIC.fullmatch(part.text):
            value = self.number(found[1])
            value = None if value is None else str(value)
        elif found := _BRACES.fullmatch(_with_braces(part.text)):
            value = self._braces(found, part)
        else:
            value = self._output(part)
        if isinstance(value, str):
            return (Part("text", value),)
        return (part,) if value is None or isinstance(value, int) else value

    def _braces(self, found: re.Match[str], part: Part) -> str | tuple[Part, ...] | None:
        """Return the value of `${…}`, or None if it is unknown here.

        https://www.gnu.org/software/bash/manual/bash.html#Shell-Parameter-Expansion
        """
        sign, name, subscript, rest = found.groups()
        if name in "@*":
            name, subscript = "@", name
        value: tuple[Part, ...] = ()
        if subscript is None:
            if sign or name in self.computed:
                return None
            self.used.add(name)
        else:
            items = self._items(name)
            if items is not None and subscript in ("@", "*"):
                if sign:
                    return str(len(items))
                if start := re.fullmatch(r": *(\d+)", rest):
                    items, rest = items[max(0, int(start[1]) - (name == "@")) :], ""
                spaced = [p for item in items for p in (Part("text", " "), *item.parts)]
                return None if rest else tuple(spaced[1:])
            number = self.number(subscript)
            if sign or rest or number is None or items is None or not 0 <= number < len(items):
                return None
            return items[number].parts
        operator = _OPERATOR.fullmatch(rest)
        if not operator:
            return self._value_of(Part("name", name, part.quoted)) if not rest else None
        mark, word = operator[1], Word("", parts_of(operator[2]))
        value = self._value_of(Part("name", name, part.quoted))
        given = value != (Part("name", name, part.quoted),)
        if mark.strip(":") in ("-", "=", "+", "?") and mark != ":":
            there = given or name in OF_THE_RENDEZVOUS or self.has_value(name)
            if not there and self.open and name not in self._environ:
                return None
            if there and given and mark[0] == ":" and not "".join(p.text for p in value):
                there = False
            if mark[-1] == "+":
                return self.expand(word).parts if there else ()
            if there or mark[-1] == "?":
                return value
            value = self.expand(word).parts
            if mark[-1] == "=":
                self._known[name] = value
            return value
        if not given and self.is_unset(name):
            return None
        text, pattern = self.plain(Word("", value)), self.plain(word)
        return None if text is None or pattern is None else _edited(text, mark, pattern)

    def seen(self, word: Word) -> str | None:
        """Return a word of a test, with its wildcards, and a mark for anything that has a value."""
        text = ""
        for part in self.expand(word).parts:
            if part.kind == "other" and part.text in WILDCARDS:
                text += part.text
            elif (plain := self.plain(Word("", (part,)))) is not None:
                text += plain
            elif part.kind == "name" and self.has_value(part.text):
                text += SOME
            else:
                return None
        return text

    def number(self, text: str) -> int | None:
        """Return the value of an arithmetic expansion, if everything in it is known."""

        def named(found: re.Match[str]) -> str:
            return self.plain(Word("", (Part("name", found[0]),))) or "?"

        inside = self.expand(Word("", parts_of(text))).parts
        texts = [named(m) if p.kind == "name" and (m := re.fullmatch(r"\w+", p.text)) else p.text
                 for p in inside]  # fmt: skip
        plain = re.sub(r"[A-Za-z_]\w*", named, "".join(texts))
        if not re.fullmatch(r"[\d\s()+*/%<>=!&|-]{1,200}", plain):
            return None
        try:
            plain = plain.replace("&&", " and ").replace("||", " or ").strip()
            number = _evaluated(ast.parse(plain, mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None
        return number if abs(number) < 1 << 63 else None  # as many bits as bash has

    def _output(self, part: Part) -> str | int | None:
        """Return what a substitution prints, or as a number how many lines only the job knows."""
        found = _SUBSTITUTED.fullmatch(part.text) if part.kind == "other" else None
        if not found:
            return None
        stream: str | int | None = None
        for n, command in enumerate(statements(found[1] or found[2] or "")):
            if not isinstance(command, Command) or command.assignments:
                return None
            if (command.after == "|") != bool(n):
                return None
            here = [word for word in command.redirections if word.startswith("<<<")]
            if any("/dev/null" not in w for w in command.redirections if w not in here):
                return None
            if here:
                stream = self.plain(Word("", parts_of(here[0].removeprefix("<<<").strip())))
            words = [self.plain(each) for word in command.words for each in self.words(word)]
            stream = printed(words, stream, self._numbers)
            if stream is None:
                return None
        return stream.rstrip("\n") if isinstance(stream, str) else stream


def _with_braces(text: str) -> str:
    """Return `$@` as `${@}`."""
    return (
        f"${{{text[1]}}}" if text in ("$@", "$*") else "${#@}" if text in ("$#", "${#}") else text
    )


def _edited(text: str, mark: str, pattern: str) -> str | None:
    """Return a text after `#`, `%`, `/`, `:` or a change of case."""
    size = len(text)
    if size > 4096 or len(pattern) > 256:
        return None
    if mark[0] in "^,":
        change = str.upper if mark[0] == "^" else str.lower
        return change(text) if len(mark) == 2 else change(text[:1]) + text[1:]
    if mark[0] in "#%":
        ends = range(size, -1, -1) if len(mark) == 2 else range(size + 1)
        if mark[0] == "#":
            return next((text[n:] for n in ends if fnmatchcase(text[:n], pattern)), text)
        return next(
            (text[: size - n] for n in ends if fnmatchcase(text[size - n :], pattern)), text
        )
    if mark[0] == "/":
        old, _, new = pattern.partition("/")
        if set(old) & {"*", "?", "[", "\\"} or not old:
            return None
        return text.replace(old, new, -1 if len(mark) == 2 else 1)
    if found := re.fullmatch(r" *(-?\d+)(?:: *(-?\d+))?", pattern):
        begin = int(found[1])
        rest = text[begin:] if abs(begin) <= size else ""
        return rest if found[2] is None else rest[: int(found[2])]
    return None


def _evaluated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_evaluated(left), _evaluated(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return int(_COMPARISONS[type(op)](_evaluated(left), _evaluated(right)))
        case ast.BoolOp(op=op, values=values):
            every = [_evaluated(value) != 0 for value in values]
            return int(all(every) if isinstance(op, ast.And) else any(every))
    raise ValueError


def _inside_array(value: Word) -> tuple[Word, ...] | None:
    """Return the words of NAME=(…), or None if the value is not an array."""
    parts = [p for p in value.parts if p != Part("text", "")]
    if not parts or parts[-1].kind != "other" or not parts[-1].text.startswith("("):
        return None
    found = statements(parts[-1].text[1:-1].replace("\n", " "))
    if not found:
        return ()
    [first, *others] = found
    return first.words if isinstance(first, Command) and not others else None
