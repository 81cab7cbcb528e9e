"""Translates a batch script into trnslurm's terms: each line, and a command for the whole script.

Nothing is run. A line that is not understood is reported as unclear, because a wrong translation
would be worse. Values that the script computes for the rendezvous are dropped together with the
options that need them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trnslurm.adopt.environment import SETS_UP
from trnslurm.adopt.flow import MOST_ROUNDS
from trnslurm.adopt.found import Adopted, Fate, as_sweep
from trnslurm.adopt.kinds import (
    DECLARES,
    ENDS,
    FILTERS,
    OF_RANKS,
    ONCE,
    READS,
    SAYS,
    SETTING,
    STARTING,
    only_once,
    only_says,
    prints,
)  # fmt: skip
from trnslurm.adopt.launching import Launching
from trnslurm.adopt.resources import Option
from trnslurm.adopt.settings import OF_TRNSLURM, Asked
from trnslurm.adopt.shell import (
    Block,
    Command,
    Part,
    Statement,
    Word,
    parsed,
    parts_of,
    statements,
    value_of,
)
from trnslurm.adopt.texts import (
    NAME,
    UNKNOWN,
    UnclearError,
    as_script,
    plain,
    shell_word,
)
from trnslurm.adopt.variables import IF_GIVEN
from trnslurm.config.batch_script import BatchScript, read_batch_script
from trnslurm.errors import ConfigError

_DEEPEST = 8
_UNDECIDED = {
    "if": "a condition that is known only in the job",
    "case": "a case whose value is known only in the job",
    "group": "a loop or a group of commands",
}  # fmt: skip
_SUBMITS = "it submits a job itself: adopt the file that it passes to sbatch"
# read -r -d '' NAME <<END
_INTO_A_NAME = re.compile(
    r"read(?: -\w+| ''| \"\")+ (\w+) *<<-?\s*(['\"]?)(\w+)\2[^\n]*\n(.*\n)\s*\3\s*", re.DOTALL
)


def adopt(file: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> Adopted:
    """Read a batch script with these arguments. The variables are those of the user's shell."""

    def read(script: BatchScript) -> Adopted:
        asked = Asked(file, script, arguments, environ)
        first = _Reading(asked)
        first.result()
        return _Reading(asked._replace(best=max(first.ranks, default=0))).result()

    try:
        script = read_batch_script(file)
        found = read(script)
        if found.command or not 1 < len(script.tasks) <= MOST_ROUNDS:
            return found
        return as_sweep([read(replace(script, tasks=(task,))) for task in script.tasks],
                        script.at_most) or found  # fmt: skip
    except RecursionError:
        raise ConfigError(f"{file}: its expansions are nested too deeply") from None


class _Reading(Launching):
    """A batch script as far as it has been read."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._depth = 0
        """How many conditions the statement is nested in."""
        self._said_before = False

    def result(self) -> Adopted:
        for directive in self._script.directives:
            option = self._resources.option(directive)
            if directive.name == "chdir" and "%" not in (directive.value or "%"):
                self._variables.move(self._absolute("."))
                self._directory = directive.value or ""
                option = Option((), "the directory is the run's project")
            fate: Fate = "unclear" if not option.clear else "taken" if option.words else "ours"
            if not {*option.words} <= {*self._options}:
                self._options += option.words
            becomes = option.instead or " ".join(map(shell_word, option.words))
            self._say(directive.line, f"#SBATCH {directive.word}", fate, becomes)
        self._options += self._resources.shares
        for statement in statements(self._text):
            self._read(statement)
        if not self._command:
            self._say(0, "", "unclear", "no training command was found")
        for doubt in self._doubts:
            self._say(self._launched_at, "", "unclear", doubt)
        for line, raw, value in self._paths:
            self._say(line, raw, *self._extended_path(value))
        for name, (line, raw) in self._exported.items():
            self._say(line, raw, *self._exported_variable(name))
        for name, line, raw, known in self._assigned:
            self._say(line, raw, *self._assigned_variable(name, line, raw, known=known))
        if self._setting.lines:
            self._options += ["--set", f"activate={_yaml_list(self._setting.lines)}"]
        if self._setting.python:
            self._options += ["--set", f"python={self._setting.python}"]
        elif self._setting.doubt and self._command:
            self._say(0, "", "unclear", self._setting.doubt)
        if self._command and not any(d.name == "time" for d in self._script.directives):
            self._say(0, "", "unclear", "there is no time limit: the command requires --time")
        for name in sorted(self._texts.unset):
            wanted = IF_GIVEN.get(name)
            why = f"the file has no --{wanted}" if wanted else "nothing sets it"
            self._say(0, f"${name}", "unclear", f"the variable is empty: {why}")
        self._options += [w for name in self._wanted() for w in ("--env", name)]
        return Adopted(
            file=self._script.file,
            lines=tuple(sorted(self._lines, key=lambda line: (line.number == 0, line.number))),
            options=tuple(self._options),
            command=self._command,
            directory=self._directory,
        )

    def _read(self, statement: Statement) -> None:
        if self._is_skipped(statement):
            return
        if isinstance(statement, Block):
            self._read_block(statement)
            return
        says, self._said_before = self._said_before, False
        if says and statement.after == "|" and statement.head in FILTERS | SAYS:
            self._said_before = True
            self._say(statement.line, statement.raw, "left out", "it only prints or checks")
            return
        try:
            self._read_command(statement)
        except (UnclearError, ConfigError) as why:
            self._set_up_before = False
            if (
                not statement.words or statement.head in SETTING
            ):  # other commands cannot set this shell's variables
                self._variables.forget_assigned(statement.raw)
            self._say(statement.line, statement.raw, "unclear", plain(str(why)))

    def _read_block(self, block: Block) -> None:
        if document := _INTO_A_NAME.fullmatch(block.raw):
            name, quote, _, text = document.groups()
            quoted = re.sub(r'(?<!\\)"', r"\"", text)
            parts = (Part("text", text),) if quote else parts_of(f'"{quoted}"')
            known = self._variables.assign(name, Word("", parts))
            self._assigned.append((name, block.line, block.raw, known))
            return
        whole = parsed(block) if self._depth < _DEEPEST else None
        if whole is not None and whole.kind == "function":
            self._functions[whole.name] = whole.branches[0].body
            self._say(block.line, block.raw, "left out", "its commands are read where it is called")
            return
        body = self._chosen(block, whole) if whole is not None else None
        if body is not None:
            if not body:
                self._say(block.line, block.raw, "left out", "its condition does not hold")
            directory, launched_at = self._directory, self._launched_at
            self._read_all(body)
            if block.raw.startswith("(") and self._launched_at == launched_at:
                self._directory = directory
            return
        self._variables.forget_assigned(block.raw)
        head = re.match(r"[^;&|\n]*<<-?[^<]", block.raw)
        first = block.raw.split(maxsplit=1)[0]
        if whole is not None and whole.kind == "if" and only_once(whole):
            self._say(block.line, block.raw, "once", "do it once, before submitting")
        elif (head and first in SAYS and ">" not in block.raw.split("\n")[0]) or only_says(block):
            self._say(block.line, block.raw, "left out", "it only prints or checks")
        elif first == "sbatch":
            self._say(block.line, block.raw, "unclear", _SUBMITS)
        elif head:
            self._say(block.line, block.raw, "unclear", "a here-document")
        else:
            said = _UNDECIDED.get(whole.kind if whole is not None else "", _UNDECIDED["group"])
            if whole is not None and whole.kind == "for" and STARTING.search(block.raw):
                said = "a loop that could train several times: --sweep makes a run for each value"
            self._say(block.line, block.raw, "unclear", said)

    def _read_all(self, body: Sequence[Statement]) -> None:
        self._depth += 1
        for statement in body:
            self._read(statement)
        self._depth -= 1

    def _call(self, command: Command) -> None:
        """Read the commands of a function in the file."""
        if self._depth >= _DEEPEST:
            raise UnclearError("the functions are nested too deeply")
        before = self._variables.arguments
        given = [each for word in command.words[1:] for each in self._variables.words(word)]
        self._say(command.line, command.raw, "taken", "the commands of the function are read")
        self._variables.give(given)
        self._read_all(self._functions[command.head])
        self._variables.give(before)

    def _read_command(self, command: Command) -> None:
        head, raw = command.head, " ".join(word.raw for word in command.words)
        if not command.words:
            for name, value in command.assignments:
                self._assign(command.line, command.raw, name, value)
        elif head in self._functions:
            self._call(command)
        elif head == "export" and any(word.raw == "-f" for word in command.words):
            self._say(
                command.line, command.raw, "left out", "its commands are read where it is called"
            )
        elif head == "export" or (
            head in DECLARES and command.words[1:2] and command.words[1].raw.startswith("-x")
        ):
            self._export(command)
        elif head in DECLARES:
            for word in command.words[1:]:
                if re.match(r"\w+\+?=", word.raw):
                    value = value_of(word)
                    self._assign(command.line, command.raw, word.raw.partition("=")[0], value)
        elif head == "shift" and (
            len(command.words) == 1 or (command.words[1].text or "").isdecimal()
        ):
            count = int(command.words[1].text or 1) if command.words[1:] else 1
            self._variables.give(self._variables.arguments[count:])
            self._say(command.line, command.raw, "taken", "the remaining arguments are used")
        elif head == "set" and "--" in [word.raw for word in command.words]:
            at = [word.raw for word in command.words].index("--") + 1
            self._variables.give(
                [w for each in command.words[at:] for w in self._variables.words(each)]
            )
            self._say(command.line, command.raw, "taken", "used in place of $@")
        elif head in READS:
            self._read_names(command)
        elif head == "sbatch":
            raise UnclearError(_SUBMITS)
        elif head in ENDS or (
            self._launched_at and head in SETS_UP | {"cd", "mv", "cp", "rsync", "eval"}
        ):
            self._say(command.line, command.raw, "left out", "it runs after training")
        elif head in ("cd", "pushd"):
            self._go(command)
        elif command.after == "|" and head == "tee":
            self._say(command.line, command.raw, "left out", "the run writes its own log")
        elif ONCE.match(re.sub(r"^(srun( -\S+)*|sudo) ", "", raw)):
            self._once(command)
        elif head == "eval" and not ("conda" in command.raw and "hook" in command.raw):
            self._evaluate(command)
        elif head in SETS_UP or head == "eval":
            self._set_up(command)
        elif head == "exit" and not self._launched_at:
            raise UnclearError("the script ends here")
        elif (
            head in SAYS
            or (head == "env" and len(command.words) == 1)
            or prints(self._texts.texts(command.words))
        ):
            self._writes(command)
            self._said_before = True
            self._say(command.line, command.raw, "left out", "it only prints or checks")
        elif head == "trap" and "requeue" in command.raw:
            self._say(
                command.line,
                command.raw,
                "ours",
                "trnslurm asks the script to save and requeues the job",
            )
        elif self._starts(command):
            self._launch(command)
        else:
            raise UnclearError("trnslurm does not know this command")

    def _writes(self, command: Command) -> None:
        """Reject a command that writes a file, unless it is a list of hosts or a log."""
        files = [word for word in command.redirections if ">" in word and "&" not in word]
        if files and not any(re.search(r"host|nodes|/dev/null|log", word, re.I) for word in files):
            raise UnclearError(f"it writes a file: {files[0]}")

    def _once(self, command: Command) -> None:
        """Handle a command that does not have to be in every run."""
        texts = [self._texts.text(word) for word in command.words]
        if command.head == "mkdir":
            relative = [t for t in texts[1:] if not t.startswith(("-", "/", NAME, "~"))]
            if any("{run_id}" in text for text in texts):
                raise UnclearError("each run needs this directory: let the command create it")
            if relative:
                what = (
                    "a run copies the project: keep the directory in the project, with a file in it"
                )
                self._say(command.line, command.raw, "once", what)
                return
        if any(UNKNOWN in text for text in texts):
            raise UnclearError("its effect is known only in the job")
        self._say(command.line, command.raw, "once", "do it once, before submitting")

    def _read_names(self, command: Command) -> None:
        """Handle the variables that a command reads."""
        names = [word.raw for word in command.words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word.raw)]
        for name in names:
            self._variables.forget(name)
        source = re.search(r"< *<\((.*)\)$", " ".join(command.redirections), re.DOTALL)
        if command.head != "read" and source and names:
            lines = Word("", (Part("other", f"($({source[1]}))"),))
            self._assign(command.line, command.raw, names[-1], lines)
        elif OF_RANKS.search(command.raw):
            self._say(command.line, command.raw, "ours", OF_TRNSLURM)
        else:
            raise UnclearError("its input is known only in the job")

    def _evaluate(self, command: Command) -> None:
        """Read the commands in the arguments of eval."""
        words = [each for word in command.words[1:] for each in self._variables.words(word)]
        if any(self._variables.unknown(word) for word in words):
            raise UnclearError("the arguments of eval are known only in the job")
        text = " ".join(map(as_script, words))
        self._read_all(statements(text, first_line=command.line))


def _yaml_list(lines: Sequence[str]) -> str:
    plain = re.compile(r"[\w./~$@+=-]+( [\w./~$@+=-]+)*")
    return f"[{', '.join(x if plain.fullmatch(x) else json.dumps(x) for x in lines)}]"
