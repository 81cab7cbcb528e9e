"""What a job accepts in its `train` and `model` sections, checked by the launcher and the job.

A job on trnslurm.train declares its keys as annotated fields of its classes Settings and Model.
trnslurm/train/settings.py explains the marks. Launcher and job both read the source of these
classes, so the launcher does not import torch and does not run a recipe's code.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trnslurm.devices import DEVICES, DeviceType
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.frozen import Frozen

FREE, ON_OFF = "free", "on or off"
REFUSED = "REFUSED"
"""The class attribute that lists which values are incompatible, and why."""
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_TYPES = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
_RULE = r"(at least|more than|less than|divides) ([\w.]+)"
_COMPARED = r"(not a multiple of|less than) (\w+)(?: \+ (\d+))?"
# Conditions for the key device.
_OF_DEVICES: Mapping[str, Callable[[DeviceType], bool]] = {
    "by XLA": lambda device: device.by_xla,
    "not by XLA": lambda device: not device.by_xla,
    "not on GPUs": lambda device: not device.on_gpus,
    "without deepspeed": lambda device: "deepspeed" not in device.strategies,
}
_NEAREST = 10_000  # the search for the nearest divisor ends here

Read = Callable[[str], bytes | None]
"""Returns the content of a file such as jobs/NAME/train.py, or None if it does not exist."""
Refused = tuple[Mapping[str, Any], str]


class Field(Frozen):
    """What a key accepts."""

    kind: str = ""
    """int, float, bool or str. Empty if unknown, in which case the value is not checked."""
    choices: tuple[Any, ...] = ()
    marks: tuple[str, ...] = ()
    help: str = ""
    optional: bool = False
    """Whether it has a default, so that older recipes stay valid."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the rules for a number, which must be at least 0 unless a mark says otherwise."""
        rules = tuple(mark for mark in self.marks if mark not in (FREE, ON_OFF))
        has_least = any(rule.startswith(("at least", "more than")) for rule in rules)
        return rules if has_least or self.kind not in ("int", "float") else ("at least 0", *rules)


class Declaration(Frozen):
    """The keys of a section."""

    fields: Mapping[str, Field]
    refused: tuple[Refused, ...] = ()
    """Combinations of values, by key, that are rejected, and why. A list means any of its values.

    A value may also be a condition: "not empty", "not a multiple of KEY" or "less than KEY +
    NUMBER". For a device, it may be "by XLA", "not by XLA", "not on GPUs" or "without deepspeed".
    """
    whole: bool = True
    """Whether all base classes were found."""

    def marked(self, mark: str) -> set[str]:
        """Return the keys that have a mark."""
        return {key for key, field in self.fields.items() if mark in field.marks}


class Problem(Frozen, kw_only=False):
    """Why values are rejected."""

    text: str
    keys: tuple[str, ...]
    """The dotted keys of all values involved."""


def find_problem(
    declared: Declaration, section: str, values: Mapping[str, Any], around: Mapping[str, Any]
) -> Problem | None:
    """Return the first problem with a section's values, or None.

    Rules may also refer to keys `around` the section: seq_len, precision, device, data.path.
    """
    for key in values:
        if field := declared.fields.get(key):
            for problem in _wrong(field, key, section, values, around):
                return problem
    for together, why in declared.refused:
        bases = {_base(wanted) for wanted in together.values()}
        found = {key: _value(key, values, around) for key in (*together, *bases) if key}
        if all(_meets(found[key], wanted, found) for key, wanted in together.items()):
            names = [_name(key, section, values) for key in found]
            said = (f"{name} is {_shown(found[k])}" for name, k in zip(names, found, strict=True))
            return Problem(f"{' and '.join(said)}: {why}", tuple(names))
    return None


def _wrong(
    field: Field, key: str, section: str, values: Mapping[str, Any], around: Mapping[str, Any]
) -> Iterator[Problem]:
    value, name = values[key], f"{section}.{key}"
    is_it = f"{name} is {_shown(value)}"
    types = _TYPES.get(field.kind)
    if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
        yield Problem(f"{is_it}; it must be {WORDS[field.kind]}", (name,))
    elif field.choices and value not in field.choices:
        hint = did_you_mean(str(value), map(str, field.choices))
        known = ", ".join(str(c) or "empty" for c in field.choices)
        yield Problem(f"{is_it}{hint}; expected one of {known}", (name,))
    for rule in field.rules if types else ():
        match = re.fullmatch(_RULE, rule)
        if match is None:
            yield Problem(f"{name}: unknown mark {rule!r}", (name,))
            continue
        verb, other = match.groups()
        limit = _number(other)
        said = other
        if limit is None:
            limit = _value(other, values, around)
            said = f"{_name(other, section, values)}, {limit}"
        if isinstance(limit, int | float) and not _KEEPS[verb](value, limit):
            names = (name,) if said == other else (name, _name(other, section, values))
            must = f"it must {'divide' if verb == 'divides' else f'be {verb}'} {said}"
            near = _nearest(value, int(limit)) if verb == "divides" else ""
            yield Problem(f"{is_it}; {must}{near}", names)


_KEEPS: dict[str, Callable[[Any, Any], bool]] = {
    "at least": lambda value, limit: bool(value >= limit),
    "at most": lambda value, limit: bool(value <= limit),
    "more than": lambda value, limit: bool(value > limit),
    "less than": lambda value, limit: bool(value < limit),
    "divides": lambda value, limit: bool(value > 0 and limit % value == 0),
}


def keeps(rule: str, value: float) -> bool:
    """Check a value against a rule with a number, such as "at least 1". NaN satisfies no rule."""
    verb, _, limit = rule.rpartition(" ")
    return _KEEPS[verb](value, int(limit))


def _nearest(value: int, multiple: int) -> str:
    down = range(value - 1, max(0, value - _NEAREST), -1)
    up = range(value + 1, min(multiple, value + _NEAREST) + 1)
    near = [next((n for n in there if multiple % n == 0), None) for there in (down, up)]
    words = " or ".join(str(n) for n in near if n)
    return f"; nearest: {words}" if words else ""


def _number(text: str) -> float | None:
    try:
        return int(text)
    except ValueError:
        return None


def _value(key: str, values: Mapping[str, Any], around: Mapping[str, Any]) -> Any:
    return values[key] if key in values else around.get(key)


def _name(key: str, section: str, values: Mapping[str, Any]) -> str:
    return f"{section}.{key}" if key in values else key


def _base(wanted: Any) -> str:
    """Return the key that a condition compares with, or an empty string."""
    match = re.fullmatch(_COMPARED, wanted) if isinstance(wanted, str) else None
    return match[2] if match else ""


def _meets(value: Any, wanted: Any, values: Mapping[str, Any]) -> bool:
    """Check a condition, or check for equality, where true is not equal to 1."""
    if wanted == "not empty":
        return bool(value)
    if isinstance(wanted, str) and (match := re.fullmatch(_COMPARED, wanted)):
        base = values[match[2]]
        if match[1] == "less than":
            return base is not None and bool(value < base + int(match[3] or 0))
        return bool(value) and (not base or value % base != 0)
    if isinstance(wanted, str) and wanted in _OF_DEVICES:
        return value in DEVICES and _OF_DEVICES[wanted](DEVICES[value])
    any_of = wanted if isinstance(wanted, list | tuple) else [wanted]
    return any(type(value) is type(one) and value == one for one in any_of)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def read_declaration(read: Read, path: str, name: str) -> Declaration | None:
    """Return what a class in the file `path` declares, or None if the file has no such class.

    Its base classes and marks are looked up in the files from which they are imported.
    """
    try:
        found = _Module(read, path, _parse(read(path) or b"")).find(name)
        return _of_class(*found) if found and isinstance(found[1], ast.ClassDef) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the script cannot run either


class _Module(Frozen, kw_only=False):
    """A source file in which names are looked up."""

    read: Read
    path: str
    tree: ast.Module

    def find(self, name: str) -> tuple[_Module, ast.stmt] | None:
        """Return the statement that defines a name, and its file."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self, node
            if isinstance(node, ast.Assign) and _targets(node) == [name]:
                return self, node
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self._imported(node.module.replace(".", "/"), alias.name)
        return None

    def _imported(self, module: str, name: str) -> tuple[_Module, ast.stmt] | None:
        beside = self.path.rpartition("/")[0]
        for path in (module, f"{beside}/{module}"):
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if (data := self.read(file)) is not None:
                    return _Module(self.read, file, _parse(data)).find(name)
        return None

    def field(self, node: ast.expr, argument: Field | None = None) -> Field:
        """Return the field that an annotation declares. `argument` replaces a TypeVar."""
        if isinstance(node, ast.Name) and node.id in WORDS:
            return Field(kind=node.id)
        if isinstance(node, ast.Call):
            return argument or Field()
        if isinstance(node, ast.Name):
            return self._alias(node.id, argument)
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            return Field()
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id == "Literal":
            choices = tuple(ast.literal_eval(one) for one in inner)
            kind = type(choices[0]).__name__
            return Field(kind=kind if kind in WORDS else "", choices=choices)
        first = self.field(inner[0], argument)
        if node.value.id == "Annotated":
            marks = [one.value for one in inner[1:] if isinstance(one, ast.Constant)]
            return replace(first, marks=(*first.marks, *(m for m in marks if isinstance(m, str))))
        return self._alias(node.value.id, first)

    def _alias(self, name: str, argument: Field | None) -> Field:
        found = self.find(name)
        if found is None or not isinstance(found[1], ast.Assign):
            return Field()
        return found[0].field(found[1].value, argument)


def _of_class(module: _Module, node: ast.stmt) -> Declaration:
    assert isinstance(node, ast.ClassDef)
    fields: dict[str, Field] = {}
    refused: list[Refused] = []
    whole = True
    for base in node.bases:
        found = module.find(base.id) if isinstance(base, ast.Name) else None
        if found is None or not isinstance(found[1], ast.ClassDef):
            whole = False
            continue
        above = _of_class(*found)
        fields |= above.fields
        refused += above.refused
        whole = whole and above.whole
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            key = statement.target.id
            text = _docstring(after) or fields.get(key, Field()).help
            field = module.field(statement.annotation)
            fields[key] = replace(field, help=text, optional=statement.value is not None)
        elif isinstance(statement, ast.Assign) and _targets(statement) == [REFUSED]:
            refused += ast.literal_eval(statement.value)
    return Declaration(fields=fields, refused=tuple(refused), whole=whole)


def _targets(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _docstring(node: ast.stmt | None) -> str:
    """Return the docstring below a field, on one line."""
    value = node.value if isinstance(node, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else None
    return " ".join(text.split()) if isinstance(text, str) else ""


@functools.cache
def _parse(data: bytes) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(data)


def check_python(data: bytes, where: str) -> None:
    """Reject a file that is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Python shows them when the script runs
            compile(data, where, "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{where}:{error.lineno}" if error.lineno else where
        raise ConfigError(f"{place}: not valid Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{where}: not valid Python: {error or 'too large'}") from None
