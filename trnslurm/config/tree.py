"""Nested mappings, as in YAML and JSON: merged, checked, and converted to dataclasses."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.frozen import Frozen

T = TypeVar("T")


class Layer(Frozen):
    """A partial tree and where it was set."""

    name: str
    source: str
    tree: Mapping[str, Any]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every leaf; an empty mapping is a leaf."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def merge(base: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by `layer`; mappings are merged key by key."""
    merged = dict(base)
    for key, value in layer.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, dict):
            merged[key] = merge(below, value)
        else:
            merged[key] = dict(value) if isinstance(value, Mapping) else value
    return merged


def nest(dotted: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for "a.b"."""
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return dict(value)


def lookup(tree: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a dotted key, or None."""
    node: Any = tree
    for key in dotted.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return None
        node = node[key]
    return node


def fields_of(cls: Any) -> Mapping[str, Any]:
    """Return the type hint of every field of a dataclass."""
    return _fields_of(cls)


@functools.cache  # it evaluates strings, and a configuration calls it hundreds of times
def _fields_of(cls: type) -> Mapping[str, Any]:
    hints = {field.name: field.type for field in dataclasses.fields(cls)}
    if any(isinstance(hint, str) for hint in hints.values()):
        every = get_type_hints(cls)
        hints = {name: every[name] for name in hints}
    return types.MappingProxyType({name: _bare(hint) for name, hint in hints.items()})


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


@functools.cache
def marks_of(cls: type) -> Sequence[tuple[str, str]]:
    """Return (dotted key, mark) for every mark in the annotations of a dataclass."""
    found: list[tuple[str, str]] = []
    for field in dataclasses.fields(cls):
        found += [(field.name, mark) for mark in getattr(field.type, "__metadata__", ())]
        section: Any = _bare(field.type)
        if hasattr(section, "__dataclass_fields__"):
            found += [(f"{field.name}.{key}", mark) for key, mark in marks_of(section)]
    return found


# YAML 1.1 requires a point and a sign: 1.0e-4. It reads 1e-4 and 1.5e4 as strings.
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


def with_numbers(value: Any) -> Any:
    """Return `value` with every string such as 1e-4 converted to a number."""
    if isinstance(value, Mapping):
        return {k: with_numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [with_numbers(v) for v in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def check(tree: Any, hints: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Return `tree` with every value converted, or raise an error that names the file and key."""
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{where}: {prefix.rstrip('.') or 'it'} must be a mapping, found {tree!r}"
        )
    checked: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {dotted}{did_you_mean(str(key), hints)}")
        checked[key] = convert(value, hints[key], where, dotted)
    return checked


def is_list(hint: Any) -> bool:
    """Check whether a key's values are lists."""
    return tuple in (get_origin(hint), *map(get_origin, get_args(hint)))


def convert(value: Any, hint: Any, where: str, dotted: str) -> Any:
    """Return `value` as the type required by `hint`, still plain, or raise a ConfigError."""
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        section = check(value, fields_of(hint), where, f"{dotted}.")
        if missing := lacking(hint, section):
            raise ConfigError(f"{where}: {dotted} has no {', '.join(missing)}")
        return section
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        inner = next(a for a in args if a is not type(None))
        return convert(value, inner, where, dotted)
    if origin is Literal:
        if value is None and "" in args:  # `name:` with nothing after it
            return ""
        if value in args:
            return value
        hint_text = did_you_mean(str(value), map(str, args))
        expected = ", ".join(map(str, filter(None, args))) + (", or empty" if "" in args else "")
        raise ConfigError(f"{where}: {dotted} is {value!r}{hint_text}; expected one of {expected}")
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value in [*hint]:
            return value
        raise ConfigError(f"{where}: {dotted} is {value!r}; expected one of {', '.join(hint)}")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(
                f"{where}: {dotted} must be a list such as [{value}], found {value!r}"
            )
        return [convert(v, args[0], where, f"{dotted}[{i}]") for i, v in enumerate(value)]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(value, args[1], where, dotted)
    if hint is float:
        value = float(value) if type(value) is int else with_numbers(value)
    if isinstance(value, hint) and not (hint in (int, float) and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}: {dotted} must be {_WORDS[hint]}, found {value!r}")


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _mapping(value: Any, hint: Any, where: str, dotted: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {dotted} must be a mapping, found {value!r}")
    converted = {}
    for key, inner in value.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"{where}: {dotted} has a key that is not a string: {key!r} (quote it)"
            )
        if hint is str:
            # YAML reads `FI_PROVIDER_COUNT: 1` as a number; environment variables are strings.
            if isinstance(inner, bool) or not isinstance(inner, str | int | float):
                raise ConfigError(
                    f"{where}: {dotted}.{key} must be a string, found {inner!r} (quote it)"
                )
            inner = str(inner)
        converted[key] = convert(inner, hint, where, f"{dotted}.{key}")
    return converted


def lacking(cls: Any, tree: Mapping[str, Any]) -> list[str]:
    """Return the fields of a dataclass that have no default and are missing from `tree`."""
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in tree
    ]


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """Return the dataclass `cls` built from a checked tree; absent keys keep their defaults."""
    hints = fields_of(cls)
    return cls(**{k: _instance(v, hints[k]) for k, v in tree.items() if k in hints})


def _instance(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return tuple(_instance(v, get_args(hint)[0]) for v in value)
    if isinstance(origin := get_origin(hint), type) and issubclass(origin, Mapping):
        return {k: _instance(v, get_args(hint)[1]) for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    return value


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the default values of a dataclass as a plain tree."""
    tree: dict[str, Any] = plain(dataclasses.asdict(cls()))
    return tree


def plain(value: Any) -> Any:
    """Return `value` with tuples as lists and mappings as dicts, which YAML and JSON can hold."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
