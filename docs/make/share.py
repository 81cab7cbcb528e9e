"""Make share/: the man page and the shells' completion, which the wheel installs as they are.

    make goldens

They are made of the commands themselves; a test compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from trnslurm.cli import cli
from trnslurm.cli.site import completion_script

SHARE = Path(__file__).resolve().parents[2] / "share"
# Where each shell looks, below the share/ of an installation.
_COMPLETION = {
    "bash": "bash-completion/completions/trnslurm",
    "zsh": "zsh/site-functions/_trnslurm",
    "fish": "fish/vendor_completions.d/trnslurm.fish",
}
_EXIT = """\
0: done. 1: an error, in one line on standard error, or a run that did not complete. 2: wrong usage.
130: interrupted.
"""
_FILES = {
    "./trnslurm.yaml, ~/.config/trnslurm/trnslurm.yaml": "The default cluster, and directories in "
    "which recipes, cluster profiles and templates are looked for.",
    "~/.config/trnslurm/cluster-config/NAME.yaml": "A cluster profile.",
    "/etc/trnslurm/site.yaml": "Values that the admin has locked.",
    "~/trnslurm-runs": "Runs, unless the profile names another directory.",
}


def files() -> dict[str, str]:
    """Return each file of share/ by its path."""
    found = {path: f"{completion_script(shell)}\n" for shell, path in _COMPLETION.items()}
    return found | {"man/man1/trnslurm.1": "".join(f"{line}\n" for line in man_page())}


def man_page() -> Iterator[str]:
    """Yield the lines of trnslurm(1)."""
    context = click.Context(cli, info_name="trnslurm")
    yield '.TH TRNSLURM 1 "" trnslurm "User Commands"'
    yield ".SH NAME"
    yield r"trnslurm \- multi-node training jobs on Slurm"
    yield ".SH SYNOPSIS"
    yield ".B trnslurm"
    yield _text("[OPTIONS] COMMAND [ARGS]...")
    yield ".SH DESCRIPTION"
    yield from _help(cli)
    yield ".SH OPTIONS"
    yield from _options(cli, context)
    yield ".SH COMMANDS"
    yield from _commands(cli, context)
    yield ".SH EXIT STATUS"
    yield _text(_EXIT)
    yield ".SH FILES"
    for name, what in _FILES.items():
        yield from (".TP", f".I {_text(name)}", _text(what))


def _commands(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = click.Context(command, info_name=name, parent=context)
        usage = " ".join(command.collect_usage_pieces(below))
        yield f".SS {_text(below.command_path)} {_text(usage)}"
        yield from _help(command)
        if isinstance(command, click.Group):
            yield from _commands(command, below)
        else:
            yield from _options(command, below)


def _help(command: click.Command) -> Iterator[str]:
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        verbatim, text = paragraph.startswith("\b\n"), paragraph.removeprefix("\b\n")
        yield ".PP"
        if verbatim:
            yield from (".nf", *map(_text, text.splitlines()), ".fi")
        else:
            yield _text(" ".join(text.split()))


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for option in command.params:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record:
            yield from (".TP", f".B {_text(record[0])}", _text(record[1]))


def _text(words: str) -> str:
    """Return text as troff takes it: no backslash, hyphen, dot or quote with another meaning."""
    escaped = words.strip("\n").replace("\\", r"\e").replace("-", r"\-")
    return "\n".join(
        rf"\&{line}" if line[:1] in (".", "'") else line for line in escaped.split("\n")
    )


if __name__ == "__main__":
    for path, text in files().items():
        (SHARE / path).parent.mkdir(parents=True, exist_ok=True)
        (SHARE / path).write_text(text, encoding="utf-8")
