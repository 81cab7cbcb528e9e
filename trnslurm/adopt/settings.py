"""What a batch script sets: its variables, its environment and its directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trnslurm.adopt.environment import Environment
from trnslurm.adopt.found import Fate, Line
from trnslurm.adopt.kinds import FOR_RANKS, OF_RANKS
from trnslurm.adopt.resources import Resources
from trnslurm.adopt.shell import Command, Word, statements, value_of
from trnslurm.adopt.texts import (
    END,
    IN_JOB,
    NAME,
    UNKNOWN,
    UNSET,
    Texts,
    UnclearError,
    shell_word,
    with_values,
)
from trnslurm.adopt.variables import Variables
from trnslurm.config.batch_script import BatchScript
from trnslurm.config.values import for_libraries, is_reserved, is_secret
from trnslurm.contract.files import read_file

# Files that set variables that this shell has, too.
_LOGIN = re.compile(r"bin/activate|conda\.sh|/etc/\S*|\.(bashrc|bash_profile|profile)|init/\w+")


OF_TRNSLURM = "trnslurm has its own ranks, counts and addresses"


class Asked(NamedTuple):
    """A batch script to read, and the values to read it with."""

    file: Path
    script: BatchScript
    arguments: Sequence[str]
    """Its own arguments, $1 and so on."""
    environ: Mapping[str, str]
    """The variables of the user's shell."""
    best: int | None = None
    """The rank of its training command, or None if it is not found yet."""


class Settings:
    """What a batch script has set so far, and its lines as they were read."""

    def __init__(self, asked: Asked) -> None:
        script, environ = asked.script, asked.environ
        self._script, self._environ = script, environ
        self._text = read_file(asked.file).decode(errors="replace")
        self._resources = Resources(script)
        numbers = self._resources.numbers
        self._variables = Variables(
            environ, asked.arguments, numbers, texts=self._resources.texts,
            in_array=bool(script.tasks),
            assigned=frozenset(re.findall(r"(?:^|[\s;({])([A-Za-z_]\w*)\+?=", self._text)),
        )  # fmt: skip
        self._texts = Texts(self._variables, numbers, environ)
        self._lines: list[Line] = []
        self._options: list[str] = []
        self._paths: list[tuple[int, str, Word]] = []
        """Words that extend PYTHONPATH."""
        self._exported: dict[str, tuple[int, str]] = {}
        self._assigned: list[tuple[str, int, str, bool]] = []
        self._setting = Environment(environ, os.path.exists)
        self._directory = ""
        self._mounts: list[str] = []
        """The mounts of the container."""
        self._command: tuple[str, ...] = ()
        self._launched = ""
        """The line with that command."""
        self._world: int | None = None
        """The number of its workers."""
        self._stamps: set[str] = set()
        """Dates and random numbers that the run's id replaces."""

    def _say(self, number: int, text: str, fate: Fate, becomes: str) -> None:
        shown = " ".join(text.replace("\\\n", " ").split())
        self._lines.append(Line(number=number, text=shown, fate=fate, becomes=becomes))

    def _assign(self, line: int, raw: str, name: str, value: Word) -> None:
        extends = any(p.kind == "name" and p.text == name for p in value.parts)
        if name in IN_JOB or (name in self._environ and extends):
            self._extend(Command(line, raw, (), (), (), ";", background=False), name, value)
            return
        if name in self._environ:  # the variable stays exported
            self._exported[name] = (line, raw)
            self._variables.assign(name, value)
            return
        known = self._variables.assign(name, value)
        if raw:  # otherwise it belongs to a loop
            self._assigned.append((name, line, raw, known))

    def _assigned_variable(
        self, name: str, number: int, raw: str, *, known: bool
    ) -> tuple[Fate, str]:
        use = _uses(name)
        lines = [each for each in self._lines if each.number >= number and use.search(each.text)]
        needs = next((each for each in lines if each.fate == "unclear" and each.number), None)
        if known:
            return "taken", f"used in place of ${name}" if self._command else "its value is known"
        if FOR_RANKS.fullmatch(name):
            return "ours", OF_TRNSLURM
        if needs is not None:
            return "unclear", f"needed by line {needs.number}, which is not understood"
        value = self._variables.value(name) or self._variables.items(name)
        if self._stamps & {part.text for part in value}:
            return "unclear", "known only in the job: replaced with {run_id}"
        if OF_RANKS.search(raw) or any(OF_RANKS.search(part.text) for part in value):
            return "ours", OF_TRNSLURM
        again = next((n for other, n, _, _ in self._assigned if other == name and n > number), 0)
        if again:
            return "left out", f"line {again} reassigns it"
        if lines:
            return "left out", "used only by lines that trnslurm replaces or leaves out"
        if name in self._variables.used:
            return "unclear", "its value is known only in the job"
        return "left out", "nothing uses it"

    def _export(self, command: Command) -> None:
        for word in command.words[1:]:
            name = word.raw.partition("=")[0]
            if name.startswith("-"):
                continue
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise UnclearError("trnslurm cannot read what it exports")
            raw = f"export {word.raw}"
            if before := self._exported.get(name):
                self._say(*before, "left out", f"line {command.line} exports it again")
            if "=" not in word.raw:
                self._exported[name] = (command.line, raw)
                continue
            value = value_of(word)
            if any(p.kind == "name" and p.text == name for p in value.parts):
                self._extend(command, name, value)
                continue
            self._exported[name] = (command.line, raw)
            self._variables.assign(name, value)

    def _extend(self, command: Command, name: str, value: Word) -> None:
        """Handle a line such as export PATH=/x/bin:$PATH."""
        if name == "PYTHONPATH":  # the directory may come later
            self._paths.append((command.line, command.raw, self._variables.expand(value)))
        elif name in IN_JOB:
            self._setting.extend(name, self._texts.shell(value))
            self._say(command.line, command.raw, "taken", "activate")
        else:
            raise UnclearError(f"it extends {name}, whose value in the job is unknown")

    def _extended_path(self, value: Word) -> tuple[Fate, str]:
        if self._is_project(value):
            return "ours", "the copy of the project is on PYTHONPATH"
        return "unclear", "it extends PYTHONPATH, but the job has its own"

    def _is_project(self, value: Word) -> bool:
        """Check whether a PYTHONPATH contains only the project and its src/."""
        marked = f"[{NAME}{UNKNOWN}{UNSET}]\\$?PYTHONPATH{END}"
        text = re.sub(marked, "", self._texts.text(value))
        here = str(Path.cwd())
        own = {"", ".", "./", "src", "./src", here, f"{here}/src"}
        directory = self._directory.rstrip("/")
        own |= {directory, f"{directory}/src"}
        return {each.removesuffix("/.").rstrip("/") for each in text.split(":")} <= own

    def _exported_variable(self, name: str) -> tuple[Fate, str]:
        value = self._variables.value(name)
        text = "" if value is None else self._texts.text(Word("", value))
        text = self._texts.counted(text)
        of_tasks = re.search(r"=\S*SLURM_N(TASKS|PROCS)\}?[\"']?$", self._exported[name][1])
        if name == "WORLD_SIZE" and not of_tasks and text.isdecimal() and int(text) != self._world:
            return "unclear", "only trnslurm sets it, for the workers that it starts"
        if is_reserved(name) and name not in ("PYTHONPATH", "PATH", "HOME", "USER"):
            return "ours", "trnslurm sets it"
        if value is None and FOR_RANKS.fullmatch(name):
            return "ours", OF_TRNSLURM
        if name == "PYTHONPATH":
            own = value is not None and self._is_project(Word("", value))
            return ("ours", "it already contains the copy of the project") if own else (
                "unclear", "the job has its own PYTHONPATH")  # fmt: skip
        if name == "CUDA_VISIBLE_DEVICES":
            number = self._resources.numbers.get("SLURM_GPUS_ON_NODE") or text.count(",") + 1
            every = value is None or text == ",".join(map(str, range(number)))
            return ("ours", "each worker sees the job's GPUs") if every else (
                "unclear", "each worker sees all GPUs of the job, in their order")  # fmt: skip
        if is_secret(name, text) or is_secret(name, "0123456789abcdef" * 2):
            return "unclear", "this is a secret: keep it in a file that the script reads"
        if value is None and name not in self._variables.computed and name in self._environ:
            self._options += ["--env", name]
            return "taken", f"--env {name}"
        unknown = value is None or UNKNOWN in text or re.search(r"(?<!\{)\{\w+\}", text)
        if (unknown or " -" in text) and self._is_in_command(name):
            return "taken", "part of the command"
        if unknown:
            return "unclear", "its value is known only in the job"
        words = ["--set", f"env.{name}={text.replace('{{', '{').replace('}}', '}')}"]
        self._options += words
        return "taken", " ".join(map(shell_word, words))

    def _is_in_command(self, name: str) -> bool:
        """Check whether the training command uses a variable, directly or through another one."""
        texts = [self._launched, *(raw for _, _, raw, _ in self._assigned)]
        texts += [raw for other, (_, raw) in self._exported.items() if other != name]
        return bool(self._command) and any(map(_uses(name).search, texts))

    def _wanted(self) -> list[str]:
        """Return the variables of this shell that scripts often read."""
        names = for_libraries(self._environ)
        return [n for n in names if n not in self._exported and n not in self._options]

    # -- the environment of its Python, and its directory

    def _set_up(self, command: Command) -> None:
        others = [w for w in command.redirections if "/dev/null" not in w and "&1" not in w]
        if command.assignments or others:
            raise UnclearError("trnslurm cannot read this form")
        files = [word.raw for word in command.words[1:2]]
        if command.head in ("source", ".") and not any(map(_LOGIN.search, files)):
            self._variables.open = True
        self._variables.loads |= command.head in ("module", "ml", "spack")
        if command.head == "eval":
            self._say(command.line, command.raw, "ours", "replaced with conda.sh")
            return
        texts = [self._texts.shell(word) for word in command.words[1:]]
        if command.head == "unset":
            for word in command.words[1:]:
                self._variables.assign(word.raw, Word("", ()))
        self._setting.read(command.head, texts, with_values(self._directory, self._environ))
        self._say(command.line, command.raw, "taken", "activate")

    def _absolute(self, path: str) -> str:
        return str(Path(self._directory or Path.cwd(), path).absolute())

    def _go(self, command: Command, *, in_image: bool = False) -> None:
        text = self._texts.text(command.words[1]) if len(command.words) > 1 else ""
        text = self._texts.counted(text)
        if UNKNOWN in text or not text:
            raise UnclearError("the directory is unknown here")
        if in_image:
            mounted = [m.split(":") for m in self._mounts if text == (m.split(":") * 2)[1]]
            if not mounted:
                raise UnclearError(f"{text} is a directory in the image")
            text = mounted[0][0]
        if text not in (".", "./", str(Path.cwd())):
            if not in_image:
                self._variables.move(self._absolute("."))
            absolute = text.startswith(("/", NAME))
            self._directory = text if absolute or not self._directory else (
                f"{self._directory}/{text}")  # fmt: skip
        self._say(command.line, command.raw, "taken", "the directory is the run's project")


def _uses(name: str) -> re.Pattern[str]:
    return re.compile(rf"\$\{{?#?{name}\b|\(\([^)]*\b{name}\b")


def word_of(text: str) -> Word:
    [command] = [s for s in statements(f": {text}") if isinstance(s, Command)]
    return command.words[1]
