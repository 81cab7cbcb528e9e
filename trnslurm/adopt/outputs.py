"""Computes what commands print, if their output is known without running them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

_GPUS = "SLURM_GPUS_ON_NODE"


def printed(
    words: Sequence[str | None], given: str | int | None, numbers: Mapping[str, int]
) -> str | int | None:
    """Return what a command that reads `given` prints, or None if only the job knows.

    A number stands for that many lines of unknown content.
    """
    match [word if word is not None else "\0" for word in words]:
        case [head, "show", "hostname" | "hostnames", *_] if head == "scontrol":
            return numbers.get("SLURM_NNODES")
        case ["nvidia-smi", *options]:
            lists = options in (["-L"], ["--list-gpus"]) or (
                any(o.startswith("--query-gpu=") for o in options) and "noheader" in str(options)
            )
            return numbers.get(_GPUS) if lists else None
        case ["wc", "-l" | "-w" as what]:
            if isinstance(given, str):
                return str(given.count("\n") if what == "-l" else len(given.split()))
            return None if given is None else str(given)
        case ["grep", "-c", "GPU" | "^GPU" | "UUID" | "."] if isinstance(given, int):
            return str(given)  # of nvidia-smi -L
        case ["sort" | "uniq" | "xargs" | "cat", *_] if isinstance(given, int):
            return given
        case other if "\0" in "".join(other):
            return None
        case ["echo", *rest]:
            while rest[:1] in (["-n"], ["-e"]):
                del rest[0]
            return " ".join(rest) + "\n"
        case ["printf", "%s" | "%s\\n" as form, text]:
            return text + "\n" * (form != "%s")
        case ["seq", *rest] if 1 <= len(rest) <= 3 and all(
            re.fullmatch(r"-?\d{1,4}", word) for word in rest
        ):
            first, *others = map(int, rest)
            step = others[0] if len(rest) == 3 else 1
            begin, end = (first, others[-1]) if others else (1, first)
            every = range(begin, end + (1 if step > 0 else -1), step) if step else ()
            return "".join(f"{n}\n" for n in every)
        case ["expr", left, "+" | "-" | "*" | "/" | "%" as sign, right]:
            if not re.fullmatch(r"-?\d{1,9} -?\d{1,9}", f"{left} {right}"):
                return None
            a, b = int(left), int(right)
            if sign in "/%":
                return f"{a // b if sign == '/' else a % b}\n" if b > 0 <= a else None
            return f"{a + b if sign == '+' else a - b if sign == '-' else a * b}\n"
        case ["bc"] if isinstance(given, str):
            found = re.fullmatch(r"\s*(\d{1,9})\s*([*+/-])\s*(\d{1,9})\s*", given)
            return printed(["expr", *found.groups()], None, numbers) if found else None
        case ["basename", path, *end]:
            name = PurePosixPath(path).name
            return f"{name.removesuffix(''.join(end)) or name}\n"
        case ["dirname", path]:
            return f"{PurePosixPath(path).parent}\n"
        case ["tr", old, new] if isinstance(given, str) and len(old) == 1 and len(new) in (1, 2):
            return given.replace(old, "\n" if new == "\\n" else new[0])
        case ["cut", *options] if isinstance(given, str):
            found = re.fullmatch(r"-d ?(.) -f ?(\d+)", " ".join(options))
            if not found or given.count("\n") != 1:
                return None
            fields = given.rstrip("\n").split(found[1])
            return (
                "".join(fields[int(found[2]) - 1 : int(found[2])]) + "\n"
                if len(fields) > 1
                else given
            )
        case ["head" | "tail" as head, *options] if isinstance(given, str):
            found = re.fullmatch(r"-n? ?(\d+)", " ".join(options))
            lines = given.splitlines(keepends=True)
            many = int(found[1]) if found else 0
            return "".join(lines[:many] if head == "head" else lines[-many:]) if many else None
    return None
