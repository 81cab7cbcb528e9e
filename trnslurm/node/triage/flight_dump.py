"""Reads dumps of PyTorch's flight recorder: which collectives a rank has entered.

When a collective times out, ProcessGroupNCCL writes a dump on every rank
(torch/csrc/distributed/c10d/FlightRecorderDetail.hpp and ProcessGroupNCCL.cpp, PyTorch 2.9.1). The
file is a pickle: a program for Python that may start anything. A JSON form exists, but it has no
stacks, and a timeout does not write it. So this module executes only those operations of a pickle
that build dicts, lists, tuples, strings and numbers, and refuses a file with any other operation.
pickletools.genops would need as much time just to name the operations.
"""

from __future__ import annotations

import math
import re
import struct
import textwrap
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from trnslurm.contract.files import read_file
from trnslurm.node.triage.evidence import clean
from trnslurm.node.triage.words import of_others

DEFAULT = "default_pg"

_MOST_BYTES = 4 << 20
"""The maximum size of a dump: 2,000 collectives with 30 frames each take 0.4 MB."""
_MOST_CONTAINERS = 500_000
_BEFORE = 32
"""How many collectives of a group are kept before the first one in which a rank waited."""
_MOST_DIMENSIONS = 8
_LONGEST = 60
_SAME_SIZE = {
    **dict.fromkeys(("all_reduce", "broadcast", "_all_gather_base"), "input"),
    "_reduce_scatter_base": "output",
}
"""Collectives whose tensors have the same size and type on all ranks: which tensors those are."""


class Work(NamedTuple):
    """A collective that a rank has entered, or a message to another rank."""

    group: tuple[str, str, str]
    """The group's name and description, and its ranks if the dump contains them."""
    number: int
    """The collective's number in its group, or 0 for a message."""
    logical: int
    """The number of the group's operations so far, including messages and parts of collectives."""
    op: str
    of_nccl: bool
    done: bool
    """Whether it is known to be complete. Gloo does not record that."""
    waits: bool
    """Whether it is known to be incomplete. Gloo records a failed collective as complete."""
    entered: float
    record: dict[str, Any]

    @property
    def place(self) -> str:
        """The line of the script's own code that called it, if known."""
        frames = self.record.get("frames")
        for frame in frames[:100] if isinstance(frames, list) else []:
            if isinstance(frame, dict):
                file, line = frame.get("filename"), frame.get("line")
                if isinstance(file, str) and isinstance(line, int) and not of_others(file):
                    return f"{short(PurePath(file).name)}:{line}"
        return ""

    @property
    def named(self) -> str:
        """The collective, its number and its group."""
        number = f" {self.number:,}" if self.number else ""
        return f"{short(self.op)}{number} of {name_of(self.group)}"

    @property
    def called(self) -> str:
        """The same with the line that called it."""
        return f"{self.named} at {self.place}" if self.place else self.named

    def kind(self) -> Kind:
        """Return the facts that must be equal on all ranks."""
        which = _SAME_SIZE.get(self.op)
        sizes, types = (self.record.get(f"{which}_{x}") for x in ("sizes", "dtypes"))
        if not (which and isinstance(sizes, list) and isinstance(types, list)):
            return Kind(self.op, "")
        told = []
        for size, type_ in zip(sizes[:_MOST_DIMENSIONS], types):
            size = size[:_MOST_DIMENSIONS] if isinstance(size, list) else [None]
            named = short(type_) if isinstance(type_, str) else ""
            if not (named and all(isinstance(length, int) for length in size)):
                return Kind(self.op, "")
            told.append(f"{math.prod(size):,} {named}")
        return Kind(self.op, " + ".join(told))


class Kind(NamedTuple):
    """The facts that must be equal on all ranks: operation, size and type, if known."""

    op: str
    of: str


class Dump(NamedTuple):
    """The collectives that a rank had entered when it wrote the dump."""

    written: float
    whole: bool
    """Whether the dump has everything from the start, and not only the newest records."""
    works: dict[tuple[str, str, str], dict[int, Work]]
    """The collectives by group and number."""
    messages: frozenset[tuple[str, str, str]]
    """The groups in which the rank has sent or received messages."""
    waits: Work | None
    """The collective in which the rank is known to have waited."""
    newest: Work | None


def read_dump(file: Path) -> Dump | None:
    """Read a rank's dump; return None if it cannot be read or is not a plain dump."""
    try:
        value = plain_value(read_file(file, _MOST_BYTES))
        return _dump_of(value, file.stat().st_mtime)
    except (OSError, ValueError):
        return None


def _dump_of(value: Any, written: float) -> Dump:
    """Return the parts of a dump that are compared; raise a ValueError if it is not a dump."""
    try:
        records, status = value["entries"], value["pg_status"]
        ranks = {name: _text(told["ranks"]) for name, told in value["pg_config"].items()}
        works = [_work_of(record, ranks) for record in records]
        first = records[0]["record_id"] if records else 0
        # TORCH_INCLUDE_ONLY_ACTIVE omits completed collectives, and the dump does not say so.
        if records and records[-1]["record_id"] - first + 1 != len(records):
            raise ValueError("not all records")
        messages = {
            work.group
            for work, record in zip(works, records)
            if not work.number or record["p2p_seq_id"]
        }
        # The parts of a coalesced collective have its number, and no events of their own. The last
        # record with the number is for the complete collective.
        last: dict[tuple[Any, ...], Work] = {}
        for work, record in zip(works, records):
            numbers = _number(record["collective_seq_id"]), _number(record["p2p_seq_id"])
            last[(work.group, *numbers)] = work
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"not a dump: {error!r}") from None
    by_group: dict[tuple[str, str, str], dict[int, Work]] = {}
    for work in last.values():
        if work.number:
            by_group.setdefault(work.group, {})[work.number] = work
    return Dump(
        written=written,
        whole=first == 0 and bool(records or not status),
        works={group: _needed(own) for group, own in by_group.items()},
        messages=frozenset(messages),
        waits=next((work for work in last.values() if work.waits), None),
        newest=next((work for work in reversed(works) if work.number), None),
    )


def _needed(own: dict[int, Work]) -> dict[int, Work]:
    """Return what a rank waited in, and some before. A thousand full dumps take gigabytes."""
    begin = min((number for number, work in own.items() if work.waits), default=max(own)) - _BEFORE
    return {number: work for number, work in own.items() if number >= begin}


def _work_of(record: Any, ranks: Mapping[str, str]) -> Work:
    name, description = map(_text, record["process_group"])
    library, _, op = _text(record["profiling_name"]).partition(":")
    if not (op.strip() and op.isprintable()):
        raise TypeError("no operation")
    done, of_nccl = record["state"] == "completed", library != "gloo"
    return Work(
        group=(name, description, ranks.get(name, "")),
        number=0 if record["is_p2p"] else _number(record["collective_seq_id"]),
        logical=_number(record["op_id"]),
        op=op,
        of_nccl=of_nccl,
        done=done,
        waits=not done and (of_nccl or record["retired"] is False),
        entered=_number(record["time_created_ns"]) / 1e9,
        record=record,
    )


def _text(value: Any) -> str:
    # Lists in lists have a text that no memory holds, and tuples in tuples a hash that may take all
    # of the C stack: no other type goes further.
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError("no number")
    return value


def name_of(group: tuple[str, str, str]) -> str:
    """Return a group's name, with its ranks unless it contains all ranks."""
    name, description, ranks = group
    if description == DEFAULT:
        return description
    told = description if description not in ("", "undefined") else f"group {name}"
    return short(f"{told} {ranks}" if ranks else told)


def short(text: str) -> str:
    """Return a dump's text in a form that is safe to show."""
    return textwrap.shorten(clean(text[:1000]), _LONGEST, placeholder="…")


# -- the pickle


def plain_value(data: bytes) -> Any:
    """Return a pickle's value; raise a ValueError if it is damaged or not a plain value.

    The operations are those of Lib/pickletools.py, CPython 3.11. PyTorch writes protocol 2, and
    Python programs write protocol 4.
    """
    try:
        return _value(data)
    except (IndexError, KeyError, struct.error, TypeError) as error:
        raise ValueError(f"damaged: {error!r}") from None


_GETS = re.compile(rb"(?:h.)+", re.DOTALL)
_INT, _SHORT, _LENGTH, _FLOAT = map(struct.Struct, ("<i", "<H", "<I", ">d"))
_CONSTANTS = {b"N"[0]: None, 0x88: True, 0x89: False}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}


def _value(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    push, at, containers = stack.append, 0, 0
    while True:
        code = data[at]
        at += 1
        if code == 0x68:  # BINGET: most of a dump, so a row of them at once
            row = _GETS.match(data, at - 1)
            if not row:
                raise ValueError("damaged")
            stack.extend(map(memo.__getitem__, data[at : row.end() : 2]))
            at = row.end()
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code == 0x65 or code == 0x61:  # APPENDS, APPEND
            items = _cut(stack, marks.pop() if code == 0x65 else len(stack) - 1)
            if type(stack[-1]) is not list:
                raise ValueError("damaged")
            stack[-1].extend(items)
        elif code == 0x5D or code == 0x7D:  # EMPTY_LIST, EMPTY_DICT
            containers += 1
            if containers > _MOST_CONTAINERS:
                raise ValueError("too large")
            push([] if code == 0x5D else {})
        elif code == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif code == 0x4D:  # BININT2
            push(_SHORT.unpack_from(data, at)[0])
            at += 2
        elif code == 0x4A:  # BININT
            push(_INT.unpack_from(data, at)[0])
            at += 4
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
        elif code == 0x75 or code == 0x73:  # SETITEMS, SETITEM
            items = _cut(stack, marks.pop() if code == 0x75 else len(stack) - 2)
            names = items[::2]
            # Texts only, for their hash: see _text.
            if type(stack[-1]) is not dict or not all(type(name) is str for name in names):
                raise ValueError("damaged")
            stack[-1].update(zip(names, items[1::2]))
        elif code == 0x8A:  # LONG1
            if data[at] > 8:
                raise ValueError("a number of more than 64 bits")
            push(int.from_bytes(data[at + 1 : at + 1 + data[at]], "little", signed=True))
            at += 1 + data[at]
        elif code == 0x6A:  # LONG_BINGET
            push(memo[_LENGTH.unpack_from(data, at)[0]])
            at += 4
        elif code in _TUPLES:
            push(tuple(_cut(stack, len(stack) - _TUPLES[code])))
        elif code == 0x58 or code == 0x8C:  # BINUNICODE, SHORT_BINUNICODE
            length, begin = data[at], at + 1
            if code == 0x58:
                length, begin = _LENGTH.unpack_from(data, at)[0], at + 4
            at = begin + length
            push(data[begin:at].decode())
        elif code == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[_LENGTH.unpack_from(data, at)[0]] = stack[-1]
            at += 4
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x47:  # BINFLOAT
            push(_FLOAT.unpack_from(data, at)[0])
            at += 8
        elif code == 0x80:  # PROTO
            at += 1
        elif code == 0x95:  # FRAME
            at += 8
        elif code == 0x2E:  # STOP
            if len(stack) != 1:
                raise ValueError("damaged")
            return stack[0]
        else:
            raise ValueError(f"operation {code:#x} is not plain")


def _cut(stack: list[Any], begin: int) -> list[Any]:
    """Remove the end of a stack, and return it."""
    if not 0 <= begin <= len(stack):
        raise ValueError("damaged")
    items = stack[begin:]
    del stack[begin:]
    return items
