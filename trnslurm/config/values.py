"""What no type can say about values: names of variables, secrets, text that files can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trnslurm.config.tree import flatten
from trnslurm.errors import ConfigError

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)(_|$)", re.I)
_SWITCH_CHARS = 7  # DISABLE_NUMERIC_CC_TOKEN=1 is a switch, not a secret


def check_values(tree: Mapping[str, Any]) -> None:
    """Refuse a resolved tree with a value that must not reach a script."""
    for prefix, env in (("env", tree["env"]), ("neuron.env", tree["neuron"]["env"])):
        for name, value in env.items():
            _check_variable(f"{prefix}.{name}", name, value)
    for dotted, value in flatten(tree):
        if isinstance(value, str) and ("\0" in value or not _is_utf8(value)):
            raise ConfigError(f"{dotted} is not text in UTF-8, or holds a NUL character")
    for key in ("seq_len", "steps"):
        if tree[key] < 0:
            raise ConfigError(f"{key} is {tree[key]}; it cannot be negative")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that were no UTF-8
        return False
    return True


def _check_variable(dotted: str, name: str, value: str) -> None:
    if not _ENV_NAME.fullmatch(name):
        raise ConfigError(f"{dotted}: not a name of an environment variable")
    if _SECRET.search(name) and len(value) > _SWITCH_CHARS:
        raise ConfigError(
            f"{dotted} looks like a secret, and a run's files are no place for one: "
            "put it in a file of mode 0600 and set a variable to its path"
        )
