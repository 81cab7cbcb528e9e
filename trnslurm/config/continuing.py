"""Finds the argument with which a Python program loads a checkpoint to continue from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from trnslurm.config.console import module_of
from trnslurm.config.entry import Entry
from trnslurm.config.script import source_of
from trnslurm.contract.files import read_file

# What reads a script's arguments: if its own file has none of it, another file of the project may.
PARSES = re.compile(rb"\b(\w*ArgumentParser|TrlParser|LightningCLI|click|typer|fire|tyro|argv)\b")
# What adds all options of the Trainer's arguments; trainer.train() without the word begins anew.
OF_ANY = re.compile(rb"\b(HfArgumentParser|TrlParser)\b")
PASSES = re.compile(rb"\bresume_from_checkpoint\b")
# Lightning's command line takes all options of the Trainer with `fit` before them.
OF_FIT = re.compile(rb"\bLightningCLI\b")
OF_HYDRA = re.compile(rb"@hydra\.main\b")
_FOR_HYDRA = re.compile(r"-c[np]|--config-(?:name|path|dir)(?:=.*)?|\+{1,2}[\w.]+=.*")
_OF_A_PLACE = r"(?:[_-](?:from|path|file|dir|ckpt|checkpoint|model|state|training))*"
_OPTION = re.compile(
    rb"""["'](--(?:resume%b|restart))["']([^()]*(?:\([^()]*\)[^()]*)*)""" % _OF_A_PLACE.encode()
)
# An option with another name, such as --load-model, whose help says that it continues training.
_BY_ITS_HELP = re.compile(
    rb"""["'](--(?:load|checkpoint|ckpt|model|weights|init)[\w-]*)["']([^()]*\bhelp=["'][^"']*"""
    rb"""\b(?:[Rr]estart|[Rr]esum|[Cc]ontinu)(?:e|es|ing)? (?:the )?training\b)"""
)
# A switch, or the number of an epoch: no path.
_NO_PATH = re.compile(
    rb"store_true|store_false|is_flag|Boolean|\btype=(?:int|float|bool|\w*bool)\b"
)
_OF_FIRE = re.compile(rb"\bfire\.Fire\(")
_PARAMETER = re.compile(rb"^\s+(resume%b)\s*(?::[^=\n]+)?=\s*None" % _OF_A_PLACE.encode(), re.M)
# Hydra takes KEY=VALUE, and ++KEY=VALUE also of a key that its configuration lacks:
# https://hydra.cc/docs/advanced/override_grammar/basic/
_KEY = re.compile(
    rb"""\b(?:cfg|config|conf)\.(?:get\(["'])?((?:\w+\.)*(?:resume%b|ckpt_path))\b"""
    % _OF_A_PLACE.encode()
)
# A file may also evaluate or predict with the weights of another key.
_FIT_KEY = re.compile(
    rb"\.fit\([^()]*(?:\([^()]*\)[^()]*)*\bckpt_path=(?:cfg|config|conf)\.((?:\w+\.)*\w+)\b(?![.(])"
)
_CHOSEN = re.compile(r"(?i)resume|restart|ckpt[_-]path|(?<![a-z])load(?!er)|\{(?:first|later):")
_OVERRIDE = re.compile(r"^(\+{0,2}[A-Za-z_][\w./@]*=)\{resume\}$")
_MOST_SOURCES, _LONGEST_SOURCE = 500, 1 << 20


def python_files(project: Path) -> Iterator[bytes]:
    """Yield the contents of a project's Python files."""
    for file in islice(project.rglob("*.py"), _MOST_SOURCES):
        yield text_of(file)


def text_of(file: Path) -> bytes:
    """Return a file's content, or nothing if it cannot be read."""
    try:
        return read_file(file, _LONGEST_SOURCE)
    except OSError:
        return b""


def sources_of(entry: Entry, project: Path) -> tuple[bytes, Iterator[bytes]]:
    """Return a Python program's own source, and the files of its project or installed package.

    Both are empty if this machine does not have them.
    """
    own = source_of(entry, project).encode()
    if not own and (module := module_of(entry, project)):
        return b"\n".join(module.texts()), module.package.texts()
    return own, python_files(project) if own or entry.is_file else iter(())


def parsing(own: bytes, others: Iterable[bytes]) -> list[bytes]:
    """Return the files that may parse the arguments: the program's own, or if it does not, all."""
    return [own] if PARSES.search(own) else [own, *others]


def continuing_words(own: bytes, others: Iterable[bytes], arguments: Sequence[str]) -> list[str]:
    """Return the arguments with which a program continues from {resume}, or none if unsure.

    It is sure if the program has exactly one such option, and the arguments do not have one yet.
    """
    if not own or any(map(_CHOSEN.search, arguments)):
        return []
    if is_of_hydra(own, arguments):
        texts = [own, *others]
        keys = _all(_FIT_KEY, texts) or _all(_KEY, texts)
        return [f"++{keys.pop()}={{resume}}"] if len(keys) == 1 else []
    texts = parsing(own, others)
    options = _options(_OPTION, texts) or _options(_BY_ITS_HELP, texts)
    if not options and any(map(_OF_FIRE.search, texts)):
        options = {f"--{name}" for name in _all(_PARAMETER, texts)}
    if not options and any(map(OF_ANY.search, texts)) and any(map(PASSES.search, texts)):
        options = {"--resume_from_checkpoint"}
    if not options and "fit" in arguments and any(map(OF_FIT.search, texts)):
        options = {"--ckpt_path"}
    return [options.pop(), "{resume}"] if len(options) == 1 else []


def is_of_hydra(source: bytes, arguments: Iterable[str]) -> bool:
    """Check whether Hydra parses a script's arguments."""
    return bool(OF_HYDRA.search(source)) or any(map(_FOR_HYDRA.fullmatch, arguments))


def quoted_for_hydra(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with {resume} in quotes, because names like epoch=1.ckpt contain `=`."""
    return [_OVERRIDE.sub(r"\1'{resume}'", word) for word in arguments]


def _options(pattern: re.Pattern[bytes], texts: Iterable[bytes]) -> set[str]:
    found = (each for text in texts for each in pattern.findall(text))
    return {name.decode() for name, rest in found if not _NO_PATH.search(rest)}


def _all(pattern: re.Pattern[bytes], texts: Iterable[bytes]) -> set[str]:
    return {name.decode() for text in texts for name in pattern.findall(text)}
