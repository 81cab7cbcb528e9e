"""Hostile texts, and every field of the configuration that can be given one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from trnslurm.config.schema import Cluster, Recipe
from trnslurm.config.tree import fields_of

# A command in any of them would make this file.
MARK = "PWNED"
HOSTILE = {
    "substitution": "$(touch PWNED)",
    "backticks": "`touch PWNED`",
    "double quote": '"; touch PWNED; #',
    "single quote": "'; touch PWNED; '",
    "newline": "a\ntouch PWNED\n",
    "directive": "a\r\n#SBATCH --wrap=true",
    "patterns": "%j %N %%",
    "IFS": ";touch${IFS}PWNED",
    "arithmetic": "a[$(touch PWNED)]",
    "dash": "--wrap=touch PWNED",
    "blank": "",
    "long": "x" * 1500,
    "separators": "a\u2028touch PWNED\u2029\x85b",
    "direction": "\u202eDENWP hcuot",
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "terminal": "\x1b]0;owned\x07",
    "expression": "{{ 7 * 7 }}",
    "raw": "{% raw %}{% include '/etc/passwd' %}",
    "template comment": "#} {# '\\",
    "shell's own": "~ * !! & | \\ > PWNED",
    "above": "../../etc",
}
# Shell lines that a profile or recipe brings, to be run.
TRUSTED = {"activate", "notify.command"}
# They must begin so, or are refused at once.
_BELOW = {"run_root", "data_root", "compile_cache", "python", "slurm.bin_dir"}


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field below a dataclass by its dotted key, with its type."""
    for name, hint in fields_of(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}", hint


FIELDS = {
    cls: {dotted: hint for dotted, hint in leaves(cls) if dotted not in TRUSTED}
    for cls in (Cluster, Recipe)
}


def filled(dotted: str, hint: Any, text: str, home: Path) -> Any:
    """A value of the field's type, as far as there is one, with the text in it."""
    if dotted in _BELOW:
        return f"{home}/{text}"
    if dotted in ("slurm.sbatch", "slurm.srun"):
        return [f"--comment={text}"]
    origin = get_origin(hint)
    if dataclasses.is_dataclass(hint):
        kinds = fields_of(hint)
        return {k: text if kind is str else 1 for k, kind in kinds.items()}
    if origin is tuple:
        return [filled(dotted, get_args(hint)[0], text, home)]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        nested = {"nested": {text: [text]}} if get_args(hint)[1] is Any else {}
        return {"A_VALUE": text} | nested
    return text
