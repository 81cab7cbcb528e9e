"""Every key of a recipe or a profile, with its accepted values, its value, and its help line."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from trnslurm.config.schema import Config, Recipe
from trnslurm.config.tree import fields_of, lookup
from trnslurm.declared import WORDS, Field, Read, read_declaration
from trnslurm.frozen import Frozen
from trnslurm.plan.values import SECTIONS, declarations, reader

_SCHEMA = "trnslurm/config/schema.py"


class Key(Frozen):
    """One key of a recipe or a profile."""

    key: str
    type: str
    choices: tuple[Any, ...]
    rules: tuple[str, ...]
    """Rules such as "at least 1", "less than 1" or "divides n_embd"."""
    default: Any
    help: str

    @property
    def accepts(self) -> str:
        """The type, choices and range, in words."""
        if self.choices:
            return ", ".join(str(choice) or "empty" for choice in self.choices)
        return ", ".join([self.type, *self.rules])


def keys_of(config: Config) -> list[Key]:
    """Return a recipe's keys in schema order. The keys of `model` and `train` come from its job."""
    read = reader(config.recipe_name, Path(config.recipe_dir))
    return [*keys_of_class(Recipe, read, partial(lookup, config.tree)), *_of_job(config)]


def keys_of_class(
    cls: Any, read: Read, value_of: Callable[[str], Any], above: str = ""
) -> Iterator[Key]:
    """Yield the keys of a class of the schema, without those of `model` and `train`."""
    declared = read_declaration(read, _SCHEMA, cls.__name__)
    assert declared is not None
    for name, hint in fields_of(cls).items():
        dotted = f"{above}{name}"
        if dotted in SECTIONS:
            continue
        if is_dataclass(hint):
            yield from keys_of_class(hint, read, value_of, f"{dotted}.")
            continue
        words, choices = _accepted(hint)
        yield Key(
            key=dotted,
            type=words,
            choices=choices,
            rules=declared.fields[name].marks,
            default=value_of(dotted),
            help=declared.fields[name].help,
        )


def _accepted(hint: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the words for a type, and the choices that it allows."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        words, choices = _accepted(args[0])
        return f"{words} or null", choices
    if origin is Literal:
        return "text", args
    if origin is tuple:
        return "list", ()
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping", ()
    return WORDS[hint.__name__].removeprefix("a "), ()


def _of_job(config: Config) -> Iterator[Key]:
    declared = declarations(config)
    for section in SECTIONS:
        fields = declared[section].fields if section in declared else {}
        for name, value in config.tree[section].items():
            field = fields.get(name, Field(kind=type(value).__name__))
            yield Key(
                key=f"{section}.{name}",
                type=WORDS.get(field.kind, field.kind).removeprefix("a "),
                choices=field.choices,
                rules=field.rules if name in fields else (),
                default=value,
                help=field.help,
            )
