"""Frozen dataclasses that are cheap to define, so that the command line starts fast.

@dataclass generates and compiles methods for every class at import. Here, all classes share the
methods of one base class.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from typing import Any, ClassVar, NoReturn

if sys.version_info >= (3, 11):
    from typing import dataclass_transform
else:

    def dataclass_transform(**_facts: Any) -> Any:
        return lambda cls: cls


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Frozen:
    """Base class of frozen dataclasses. With kw_only=False, fields may be positional.

    Functions of the dataclasses module, such as replace and asdict, accept the instances.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        inherited, known = cls.__match_args__, getattr(cls, "__dataclass_fields__", {})
        dataclass(init=False, repr=False, eq=False)(cls)
        own = () if kw_only else (f.name for f in fields(cls) if f.name not in known)
        cls.__match_args__ = (*inherited, *own)  # type: ignore[misc]

    def __init__(self, *arguments: Any, **values: Any) -> None:
        cls = type(self)
        for name, value in zip(cls.__match_args__, arguments):
            if name in values:
                raise TypeError(f"{cls.__name__}: {name} is given twice")
            values[name] = value
        if len(arguments) > len(cls.__match_args__):
            raise TypeError(f"{cls.__name__}: {len(arguments)} positional arguments; use keywords")
        own = self.__dict__
        for name, known in self.__dataclass_fields__.items():
            if name in values:
                own[name] = values.pop(name)
            elif known.default_factory is not MISSING:
                own[name] = known.default_factory()
            elif known.default is not MISSING:
                own[name] = known.default
            else:
                raise TypeError(f"{cls.__name__}: {name} is missing")
        if values:
            raise TypeError(f"{cls.__name__} has no field {', '.join(values)}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and _values(self) == _values(other))

    def __hash__(self) -> int:
        return hash((type(self), *_values(self)))

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__]
        return f"{type(self).__qualname__}({', '.join(shown)})"


def _values(frozen: Any) -> list[Any]:
    fields = frozen.__dataclass_fields__.items()
    return [getattr(frozen, name) for name, known in fields if known.compare]
