"""Reads what surrounds the training command: containers, shells, and dropped options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from trnslurm.adopt.texts import UNKNOWN
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen

_IMAGE_FLAGS = frozenset({"--nv", "--cleanenv", "-e", "--no-home", "--writable-tmpfs"})


class Image(Frozen):
    """A command in an image."""

    container: Mapping[str, str]
    rest: tuple[str, ...]
    environment: tuple[str, ...]


def read_apptainer(words: Sequence[str]) -> Image:
    """Return the meaning of `apptainer exec`; `apptainer run` has the same options.

    https://apptainer.org/docs/user/latest/cli/apptainer_exec.html
    """
    name, rest = Path(words[0]).name, [*words[1:]]
    if rest[:1] not in (["exec"], ["run"]):
        raise ConfigError(f"{name}: only `{name} exec` and `{name} run` are supported")
    del rest[0]
    mounts: list[str] = []
    environment: list[str] = []
    found = {"runtime": "apptainer"}
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option in _IMAGE_FLAGS:
            continue
        if not equals and not rest:
            raise ConfigError(f"{name}: {option} needs a value")
        value = value if equals else rest.pop(0)
        if option in ("-B", "--bind"):
            mounts += value.split(",")
        elif option == "--env" and "=" in value:
            environment += value.split(",")
        elif option in ("--pwd", "--cwd"):
            found["workdir"] = value
        else:
            raise ConfigError(f"{name}: the section container has no key for {option}")
    if len(rest) < 2:
        raise ConfigError(f"{name}: it does not start a command in an image")
    if mounts:
        found["mounts"] = ",".join(mounts)
    return Image(
        container=found | {"image": rest[0]}, rest=tuple(rest[1:]), environment=tuple(environment)
    )


def runs_text(words: Sequence[str]) -> bool:
    """Check for `bash -c TEXT` without arguments for the text."""
    shell = Path(words[0]).name in ("bash", "sh")
    options = words[1:-1]
    return (
        shell
        and bool(options)
        and all(o.startswith("-") for o in options)
        and any(o.endswith("c") and not o.startswith("--") for o in options[-1:])
    )


def without_labels(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command without a --role of torchrun that only the job knows, and that option."""
    rest, lost = [*words], list[str]()
    for n, word in enumerate(words):
        several = word == "--role" and n + 1 < len(words)
        if UNKNOWN in " ".join(words[n : n + 2] if several else words[n : n + 1]) and (
            several or word.startswith("--role=")
        ):
            del rest[n : n + 1 + several]
            return without_labels(rest)[0], [*lost, "--role"]
        if word.endswith(".py"):
            break
    return rest, lost


def without_options(words: Sequence[str], left_out: Sequence[str]) -> tuple[str, ...]:
    """Return a command without the options that trnslurm replaces."""
    rest = [*words]
    for text in left_out:
        if text in ("--use_env", "--use-env"):
            continue  # it also determines what the script gets
        gone = shlex.split(text)
        places = (n for n in range(len(rest)) if rest[n : n + len(gone)] == gone)
        if (at := next(places, None)) is not None:
            del rest[at : at + len(gone)]
    return tuple(rest)
