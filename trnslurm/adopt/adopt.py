"""A batch script in trnslurm's terms: what becomes of each line, and the command that says it all.

Nothing is run. A line that is not understood stays so: wrong would be worse. What the script
computes for the rendezvous goes with the options that need it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trnslurm.adopt.conditions import holds, matches
from trnslurm.adopt.environment import SETS_UP
from trnslurm.adopt.found import Adopted, Fate, as_sweep
from trnslurm.adopt.kinds import (
    CONTAINERS,
    DECLARES,
    ENDS,
    FILTERS,
    IN_CONTAINERS,
    MPI,
    OF_RANKS,
    ONCE,
    PYTHON,
    READS,
    SAYS,
    SETTING,
    STARTING,
    STARTS,
    only_once,
    only_says,
    prints,
)  # fmt: skip
from trnslurm.adopt.launch import read_apptainer, runs_text, without_labels, without_options
from trnslurm.adopt.often import OF_A_NODE, how_often
from trnslurm.adopt.resources import Option
from trnslurm.adopt.settings import OF_TRNSLURM, Settings, word_of
from trnslurm.adopt.shell import (
    Block,
    Command,
    Compound,
    Part,
    Statement,
    Word,
    parsed,
    parts_of,
    statements,
    value_of,
)
from trnslurm.adopt.texts import (
    END,
    MARKED,
    NAME,
    UNKNOWN,
    UnclearError,
    as_script,
    plain,
    shell_word,
    with_values,
)
from trnslurm.adopt.variables import IF_GIVEN
from trnslurm.config.batch_script import BatchScript, read_batch_script
from trnslurm.config.command import Command as UsersCommand
from trnslurm.config.command import read_command
from trnslurm.config.tasks import Tasks, read_mpirun, read_srun
from trnslurm.config.values import is_reserved
from trnslurm.errors import ConfigError

_DEEPEST, _MOST_ROUNDS, _MOST_STATEMENTS = 8, 64, 4096
_UNDECIDED = {
    "if": "a condition that only the job knows", "case": "a case that only the job knows",
    "group": "a loop or a group of commands",
}  # fmt: skip
_SUBMITS = "it submits a job itself: adopt the file that it gives to sbatch"
_WHICH = re.compile(f"{UNKNOWN}[$`(]+(?:which|command -v|type -p) ([\\w.-]+)[`)]{END}")
# These take the place of a date or a random number in a name.
_STAMP = re.compile(
    f"{UNKNOWN}(?:\\$\\(|`)(?:date|uuidgen)\\b[^|&;]*?{END}"
    f"|(?<=[\\w.-]){UNKNOWN}(?:(?:\\$\\(|`)shuf\\b[^|&;]*?|\\$RANDOM){END}"
)
# read -r -d '' NAME <<END
_INTO_A_NAME = re.compile(
    r"read(?: -\w+| ''| \"\")+ (\w+) *<<-?\s*(['\"]?)(\w+)\2[^\n]*\n(.*\n)\s*\3\s*", re.DOTALL
)


def adopt(file: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> Adopted:
    """Read a batch script with these arguments; the variables are those of the user's shell."""

    def read(script: BatchScript) -> Adopted:
        first = _Reading(file, script, arguments, environ)
        first.result()
        return _Reading(file, script, arguments, environ, best=max(first.ranks, default=0)).result()

    try:
        script = read_batch_script(file)
        found = read(script)
        if found.command or not 1 < len(script.tasks) <= _MOST_ROUNDS:
            return found
        return as_sweep([read(replace(script, tasks=(task,))) for task in script.tasks],
                        script.at_most) or found  # fmt: skip
    except RecursionError:
        raise ConfigError(f"{file}: its expansions are nested too deeply to be read") from None


class _Reading(Settings):
    """A batch script as far as it is read."""

    def __init__(
        self,
        file: Path,
        script: BatchScript,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        best: int | None = None,
    ) -> None:
        super().__init__(file, script, arguments, environ)
        self._best = best
        self.ranks: list[int] = []
        """How much each command that was reached looks like the one that trains."""
        self._functions: dict[str, list[Statement]] = {}
        self._doubts: list[str] = []
        """The parts of the command that differ from the file."""
        self._launched_at = 0
        self._depth = 0
        """How many conditions the statement stands in."""
        self._set_up_before = False
        self._said_before = False
        self._succeeded: bool | None = True
        """Whether the command before succeeds; None: only the job knows."""

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
            self._say(0, "", "unclear", "no command that trains")
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
            self._say(0, "", "unclear", "no time limit: the command needs --time")
        for name in sorted(self._texts.unset):
            wanted = IF_GIVEN.get(name)
            why = f"the file has no --{wanted}" if wanted else "nothing sets it"
            self._say(0, f"${name}", "unclear", f"it is empty: {why}")
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
            if not statement.words or statement.head in SETTING:  # no other sets this shell's own
                self._variables.forget_assigned(statement.raw)
            self._say(statement.line, statement.raw, "unclear", plain(str(why)))

    def _is_skipped(self, command: Statement) -> bool:
        """Check whether `&&` or `||` before a command keeps it from running, and say so."""
        joined = {"&&": True, "||": False}.get(command.after)
        before, self._succeeded = self._succeeded, True
        if joined is not None and before is not joined:
            self._succeeded = before
            if before is None and not only_says(Block(command.line, command.raw)):
                self._variables.forget_assigned(command.raw)
                self._say(
                    command.line, command.raw, "unclear", "only the job knows whether it runs"
                )
                return True
            if command.after == "||" and self._set_up_before:
                self._setting.allow_failure()
            self._say(command.line, command.raw, "left out", "the command before it decides so")
            return True
        if isinstance(command, Block):
            self._set_up_before = False
            if command.raw.startswith(("[[", "((")):
                self._succeeded = holds([command], self._variables)
            return False
        self._set_up_before = command.head in SETS_UP
        if command.head in ("[", "[[", "test"):
            self._succeeded = holds([command], self._variables)
        elif command.head in ("false", "grep", "command", "which", "type", "pgrep", "ls"):
            self._succeeded = None
        return False

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
            self._say(block.line, block.raw, "left out", "its commands count where it is called")
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
            self._say(block.line, block.raw, "once", "do it once, before")
        elif (head and first in SAYS and ">" not in block.raw.split("\n")[0]) or only_says(block):
            self._say(block.line, block.raw, "left out", "it only prints or checks")
        elif first == "sbatch":
            self._say(block.line, block.raw, "unclear", _SUBMITS)
        elif head:
            self._say(block.line, block.raw, "unclear", "a here-document")
        else:
            said = _UNDECIDED.get(whole.kind if whole is not None else "", _UNDECIDED["group"])
            if whole is not None and whole.kind == "for" and STARTING.search(block.raw):
                said = "a loop that may train several times: --sweep makes a run for each value"
            self._say(block.line, block.raw, "unclear", said)

    def _read_all(self, body: Sequence[Statement]) -> None:
        self._depth += 1
        for statement in body:
            self._read(statement)
        self._depth -= 1

    def _chosen(self, block: Block, whole: Compound) -> list[Statement] | None:
        """Return the statements of a block that run; None: only the job knows them."""
        if whole.kind == "for":
            words = [each for word in whole.words for each in self._variables.words(word)]
            several = len(words) > 1 and (STARTING.search(block.raw) or len(words) > _MOST_ROUNDS)
            if several or any(self._variables.unknown(word) for word in words):
                return None
            body: list[Statement] = []
            for word in words:  # quoted by its parts
                value = Word(word.raw, tuple(p._replace(quoted=True) for p in word.parts))
                given = Command(block.line, "", ((whole.name, value),), (), (), ";",
                                background=False)  # fmt: skip
                body += [given, *whole.branches[0].body]
            return body
        for branch in whole.branches:
            held: bool | None = True
            if whole.kind == "case":
                held = matches(whole.words[0], branch.patterns, self._variables)
            elif branch.test:
                held = holds(branch.test, self._variables)
            if held is None:
                return None
            if held:
                return branch.body
        return []

    def _call(self, command: Command) -> None:
        """Read the commands of a function of the file."""
        if self._depth >= _DEEPEST:
            raise UnclearError("functions that call each other")
        before = self._variables.arguments
        given = [each for word in command.words[1:] for each in self._variables.words(word)]
        self._say(command.line, command.raw, "taken", "the commands of the function")
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
                command.line, command.raw, "left out", "its commands count where it is called"
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
            self._say(command.line, command.raw, "taken", "its other arguments")
        elif head == "set" and "--" in [word.raw for word in command.words]:
            at = [word.raw for word in command.words].index("--") + 1
            self._variables.give(
                [w for each in command.words[at:] for w in self._variables.words(each)]
            )
            self._say(command.line, command.raw, "taken", "where $@ stands")
        elif head in READS:
            self._read_names(command)
        elif head == "sbatch":
            raise UnclearError(_SUBMITS)
        elif head in ENDS or (
            self._launched_at and head in SETS_UP | {"cd", "mv", "cp", "rsync", "eval"}
        ):
            self._say(command.line, command.raw, "left out", "it follows the training")
        elif head in ("cd", "pushd"):
            self._go(command)
        elif command.after == "|" and head == "tee":
            self._say(command.line, command.raw, "left out", "the run keeps its log")
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
            self._say(command.line, command.raw, "ours", "it is asked to save, and is requeued")
        elif self._starts(command):
            self._launch(command)
        else:
            raise UnclearError("a command that trnslurm does not know")

    def _writes(self, command: Command) -> None:
        """Refuse a command that writes a file, unless it is a list of hosts or a log."""
        files = [word for word in command.redirections if ">" in word and "&" not in word]
        if files and not any(re.search(r"host|nodes|/dev/null|log", word, re.I) for word in files):
            raise UnclearError(f"it writes a file: {files[0]}")

    def _once(self, command: Command) -> None:
        """Take a command that need not be in every run."""
        texts = [self._texts.text(word) for word in command.words]
        if command.head == "mkdir":
            relative = [t for t in texts[1:] if not t.startswith(("-", "/", NAME, "~"))]
            if any("{run_id}" in text for text in texts):
                raise UnclearError("a directory of each run: the command has to make it")
            if relative:
                what = "in a fresh copy of the project: keep the directory there, with a file in it"
                self._say(command.line, command.raw, "once", what)
                return
        if any(UNKNOWN in text for text in texts):
            raise UnclearError("what it does is known only in the job")
        self._say(command.line, command.raw, "once", "do it once, before")

    def _read_names(self, command: Command) -> None:
        """Take what a command reads into variables."""
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
            raise UnclearError("what it reads is known only in the job")

    def _evaluate(self, command: Command) -> None:
        """Read the commands in the words of eval."""
        words = [each for word in command.words[1:] for each in self._variables.words(word)]
        if any(self._variables.unknown(word) for word in words):
            raise UnclearError("what eval runs is known only in the job")
        text = " ".join(map(as_script, words))
        self._read_all(statements(text, first_line=command.line))

    # -- the command that trains

    def _rank(self, words: Sequence[str]) -> int:
        """Return how much a command looks like the one that trains."""
        text = f" {' '.join(words)} "
        if re.search(r"\bpip3?\b", text):
            return 0
        launcher = re.search(
            r"[ /](torchrun|accelerate|deepspeed|composer|torch\.distributed)", text
        )
        return 2 * (Path(words[0]).name in {"srun", *MPI}) + bool(launcher)

    def _words(self, command: Command) -> list[Word]:
        """Return the words of a command, without those of variables that nobody sets.

        After an option such a variable stays: the user's shell may give its value.
        """
        found: list[Word] = []
        for each in (each for word in command.words for each in self._variables.words(word)):
            value = bool(found) and self._texts.joined(found[-1]).startswith("-")
            if value or not self._texts.lacks(self._texts.joined(each)):
                found.append(each)
        return found

    def _starts(self, command: Command) -> bool:
        words = [*map(self._texts.joined, self._words(command))]
        if not words:
            return False
        text = _WHICH.sub(r"\1", words[0])
        name = Path(text).name
        if PYTHON.fullmatch(name) and words[1:2] in (["-c"], ["--version"], ["-V"], ["-"]):
            return False
        return (
            PYTHON.fullmatch(name) is not None
            or name in STARTS
            or (text.startswith("./") or name.endswith(".sh"))
        )

    def _launch(self, command: Command) -> None:
        parts = self._words(command)
        words = [*map(self._texts.joined, parts)]
        rank = self._rank(words)
        self.ranks.append(rank)
        if self._best is None:  # the first time, only the ranks count
            return
        if self._launched_at and not self._best:
            self._command = ()
        if self._launched_at:
            raise UnclearError(f"a second command, after that of line {self._launched_at}")
        if rank < self._best:
            raise UnclearError("a command before the one that trains: do it once, or in the script")
        self._doubts.clear()
        before = {**self._exported}, [*self._paths], self._setting.copied(), self._directory
        try:
            self._launch_words(command, parts, words)
        except (UnclearError, ConfigError):
            self._exported, self._paths, self._setting, self._directory = before
            self._doubts.clear()
            raise

    def _launch_words(self, command: Command, parts: list[Word], words: list[str]) -> None:
        """Take off what starts the command, word by word."""
        environment = [f"{name}={self._texts.text(value)}" for name, value in command.assignments]
        options: list[str] = []
        tasks: Tasks | None = None
        lost: list[str] = []
        while words:
            parts = parts[len(parts) - len(words) :]
            words[0] = _WHICH.sub(r"\1", words[0])
            head = Path(words[0]).name
            if PYTHON.fullmatch(head) and words[1:2] and words[1] in OF_A_NODE:
                del words[0]
                continue
            if head in ("exec", "time", "nohup", "stdbuf"):
                del words[0]
                while words and words[0].startswith("-"):
                    del words[0]
            elif head == "env" and len(words) > 1 and re.match(r"\w+=", words[1]):
                del words[0]
                while words and re.match(r"\w+=", words[0]):
                    environment.append(words.pop(0))
            elif (head == "srun" or head in MPI) and tasks is None:
                counted = [*map(self._texts.counted, words)]
                srun = read_srun(counted[1:]) if head == "srun" else read_mpirun(counted)
                tasks, words = srun.tasks, words[len(words) - len(srun.rest) :]
                environment += srun.environment
                options += self._container(srun.container)
                lost += srun.lost
            elif head == "numactl":
                del words[0]
                while words and words[0].startswith("-"):
                    del words[: 1 + (len(words[0]) == 2 and words[0] != "-l")]
                lost.append("numactl")
            elif head in CONTAINERS:
                raise UnclearError(f"{head}: the section container has no such runtime")
            elif head in IN_CONTAINERS and words[1:2] == ["exec"]:
                self._doubts.append(f"{head} exec: the Python of the module has to start by itself")
                del words[:2]
            elif head in ("singularity", "apptainer"):
                image = read_apptainer(words)
                if words[1] == "run":
                    self._doubts.append(f"{head} run starts the image's own script, a run does not")
                words = [*image.rest]
                environment += image.environment
                options += self._container(image.container)
            elif runs_text(words):
                inner = re.sub(r"\w*(RANK|WORLD_SIZE)=\S*", "", parts[-1].raw)
                if self._has_own_tasks(tasks) and re.search(r"SLURM_N?(TASKS|PROCS)", inner):
                    raise UnclearError("srun has another number of tasks than the job")
                where = " in the image" if any("container." in word for word in options) else ""
                parts = self._inner(as_script(parts[-1]), command.line, environment, where)
                words = [*map(self._texts.joined, parts)]
            else:
                break
        self._take(command, words, environment, options, tasks, lost)

    def _take(
        self,
        command: Command,
        words: list[str],
        environment: Sequence[str],
        options: list[str],
        tasks: Tasks | None,
        lost: list[str],
    ) -> None:
        """Take the words as the command of the run."""
        if not words or not (
            PYTHON.fullmatch(Path(words[0]).name)
            or Path(words[0]).name in STARTS
            or words[0].startswith("./")
            or words[0].endswith((".sh", ".py"))
        ):
            raise UnclearError(
                f"trnslurm does not know what {words[0]} does" if words else "it starts nothing"
            )
        environment = [
            self._texts.counted(word) for word in environment
            if word.startswith("PYTHONPATH=") or not is_reserved(word.partition("=")[0])
        ]  # fmt: skip
        words, roles = without_labels(words)
        lost += roles
        words = [self._at_its_place(word) for word in words]
        counted = [*map(self._texts.counted, words)]
        nodes = self._script.nodes
        options += how_often(
            counted,
            tasks,
            nodes=nodes,
            resources=self._resources,
            reads_ranks=self._reads_ranks(),
        )
        workers = read_command(counted).workers_on(nodes)
        if Path(words[0]).name == "torchrun" and "nproc" not in " ".join(words).replace("-", "_"):
            workers = 1  # its own default
        if "--workers" in options:
            workers = int(options[options.index("--workers") + 1])
            more = []
        else:
            more = ["--workers", str(workers)] if workers else []
        self._world = nodes * workers if workers else None
        words = [self._stamped(self._texts.placed(word, workers)) for word in words]
        found = read_command(words)
        if any(re.search(r"(^|[=:,/])\.\.(/|$)", word) for word in [*words, *environment]):
            raise UnclearError("it names files above its directory, which the run has no copy of")
        self._check(found, [*environment, *options])
        for word in environment:
            name, _, value = word.partition("=")
            if name == "PYTHONPATH":
                if not self._is_project(value_of(word_of(word))):
                    raise UnclearError("the job has a PYTHONPATH of its own")
            elif not is_reserved(name) and name != "CUDA_VISIBLE_DEVICES":
                options += ["--set", f"env.{name}={value}"]
        self._command = without_options(words, found.left_out)
        self._options += [*options, *more]
        self._launched_at, self._launched = command.line, command.raw
        program = Path(self._directory or Path.cwd(), with_values(words[0], self._environ))
        if "/" in words[0] and program.name in OF_A_NODE | {"trl", "axolotl"}:
            self._setting.python = str(program.with_name("python"))
        elif "/" in words[0] and PYTHON.fullmatch(program.name):
            self._setting.python = str(program)
        elif found.left_out[:1] and found.left_out[0].endswith(" run"):
            self._setting.may_bring(found.left_out[0])
        names = [shlex.split(option)[0].partition("=")[0] for option in found.left_out] + lost
        said = f"without {', '.join(names)}" if names else "as it stands"
        self._say(command.line, command.raw, "taken", f"the command, {said}")

    def _has_own_tasks(self, tasks: Tasks | None) -> bool:
        """Check whether srun starts another number of tasks than the job has."""
        if tasks is None:
            return False
        every = self._script.nodes * self._resources.tasks_per_node
        each = tasks.ntasks_per_node or str(self._resources.tasks_per_node)
        return (tasks.ntasks or str(every), each) != (
            str(every),
            str(self._resources.tasks_per_node),
        )

    def _reads_ranks(self) -> bool:
        """Check whether the file sets the ranks of its tasks for the command."""
        world = self._variables.plain(Word("", (Part("name", "WORLD_SIZE"),)))
        tasks = self._script.nodes * self._resources.tasks_per_node
        named = {"RANK", "LOCAL_RANK"} & self._exported.keys()
        return bool(named) or ("WORLD_SIZE" in self._exported and world in (None, str(tasks)))

    def _at_its_place(self, word: str) -> str:
        """Return a word with the path of a program that `which` finds, if it is known."""
        return _WHICH.sub(lambda found: self._setting.program(found[1]) or found[0], word)

    def _stamped(self, word: str) -> str:
        """Return a word with the run's name in place of a date or a random number."""
        if _STAMP.search(word):
            stamps = [found[2] for found in MARKED.finditer(word) if found[1] == UNKNOWN]
            self._stamps |= {*stamps}
            said = "".join(raw for _, _, raw, _ in self._assigned)
            self._doubts += [
                f"{stamp}: {{run_id}} stands in its place" for stamp in stamps if stamp not in said
            ]
        return _STAMP.sub("{run_id}", word)

    def _container(self, found: Mapping[str, str]) -> list[str]:
        """Return the section `container` as options; its paths are absolute."""
        words: list[str] = []
        for key, value in found.items():
            parts = re.split(r"([,:])", value) if key in ("mounts", "workdir", "image") else [value]
            below = key == "image" and found.get("runtime") == "apptainer" and "://" not in value
            full = [
                self._absolute(p) if p == "." or p.startswith("./")
                or (below and not p.startswith(("/", NAME, "~"))) else p for p in parts
            ]  # fmt: skip
            text = "".join(full)
            self._mounts = text.split(",") if key == "mounts" else self._mounts
            words += ["--set", f"container.{key}={f'[{text}]' if key == 'mounts' else text}"]
        return words

    def _inner(self, text: str, line: int, environment: list[str], where: str) -> list[Word]:
        """Return the words of the one command that `bash -c` runs."""
        found: list[Word] = []
        todo, seen = statements(text, first_line=line), 0
        self._succeeded = True
        while todo:
            statement, seen = todo.pop(0), seen + 1
            if seen > _MOST_STATEMENTS:
                raise UnclearError("functions that call each other")
            before = len(self._lines)
            if self._is_skipped(statement):
                if any(line.fate == "unclear" for line in self._lines[before:]):
                    self._doubts.append(f"{statement.raw}: only the job knows whether it runs")
            elif isinstance(statement, Block):
                todo = [*self._inner_block(statement), *todo]
            elif statement.head in self._functions:
                todo = [*self._functions[statement.head], *todo]
            elif statement.head in SETS_UP | {"cd", "pushd", "export"}:
                with self._as_doubt(statement):
                    if statement.head == "export":
                        self._export(statement)
                    elif statement.head in SETS_UP:
                        self._set_up(statement)
                    else:
                        self._go(statement, in_image=bool(where))
            elif not statement.words:
                for name, value in statement.assignments:
                    self._variables.assign(name, value)
            elif ONCE.match(statement.raw) and not found:
                self._doubts.append(f"{statement.raw}: do it once{where}")
            elif found and not (statement.after == "|" and statement.head == "tee"):
                raise UnclearError("bash -c runs several commands")
            elif statement.head not in SAYS:
                environment += [f"{n}={self._texts.text(v)}" for n, v in statement.assignments]
                found = self._words(statement)
            del self._lines[before:]
        return found

    def _inner_block(self, block: Block) -> list[Statement]:
        """Return the statements of a block within `bash -c` that run."""
        whole = parsed(block)
        if whole is not None and whole.kind == "function":
            self._functions[whole.name] = whole.branches[0].body
            return []
        body = self._chosen(block, whole) if whole is not None else None
        if body is None and not only_says(block) and not block.raw.startswith(("[[", "((")):
            raise UnclearError("what bash -c runs has a condition, a loop or a function")
        return body or []

    @contextmanager
    def _as_doubt(self, command: Command) -> Iterator[None]:
        """Note why a command before the one that trains is not understood."""
        try:
            yield
        except (UnclearError, ConfigError) as why:
            self._doubts.append(f"{command.raw}: {why}")

    def _check(self, found: UsersCommand, more: Sequence[str]) -> None:
        """Refuse a command with words that are known only in the job."""
        for word in (found.recipe, *found.launcher_arguments, *found.arguments, *more):
            unknown = next((m[2] for m in MARKED.finditer(word) if m[1] == UNKNOWN), "")
            if re.fullmatch(r"\$\d", unknown):
                raise UnclearError(f"{unknown} is an argument of the file: give it after --")
            if unknown:
                raise UnclearError(f"{unknown} is known only in the job")
        has_task = any("{task}" in word for word in found.arguments)
        if has_task != (len(self._script.tasks) > 1):
            lacks = "has no --array" if has_task else "passes no SLURM_ARRAY_TASK_ID to its command"
            raise UnclearError(f"the file {lacks}")


def _yaml_list(lines: Sequence[str]) -> str:
    plain = re.compile(r"[\w./~$@+=-]+( [\w./~$@+=-]+)*")
    return f"[{', '.join(x if plain.fullmatch(x) else json.dumps(x) for x in lines)}]"
