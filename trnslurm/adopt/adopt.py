"""A batch script in trnslurm's terms: what becomes of each line, and the command that says it all.

Nothing is run. A line that is not understood stays so: wrong would be worse. What the script
computes for the rendezvous goes with the options that need it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal
from warnings import catch_warnings, simplefilter

from trnslurm.adopt.environment import SETS_UP, Environment
from trnslurm.adopt.launch import Tasks, read_apptainer, read_srun, runs_text
from trnslurm.adopt.often import OF_A_NODE, how_often
from trnslurm.adopt.resources import Option, Resources
from trnslurm.adopt.shell import Block, Command, Word, branches, statements, value_of
from trnslurm.adopt.texts import (
    END,
    IN_JOB,
    MARKED,
    NAME,
    UNKNOWN,
    Texts,
    UnclearError,
    as_script,
    plain,
    shell_word,
    with_values,
)
from trnslurm.adopt.variables import Variables, holds
from trnslurm.config.batch_script import BatchScript, read_batch_script
from trnslurm.config.command import Command as UsersCommand
from trnslurm.config.command import read_command
from trnslurm.config.values import is_reserved, is_secret
from trnslurm.contract.files import read_file
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen

Fate = Literal["taken", "ours", "left out", "once", "unclear"]

_SAYS = frozenset({
    ":", "[", "[[", "cat", "clear", "command", "date", "df", "du", "echo", "exit", "false", "free",
    "groups", "hash", "head", "hostname", "ibstat", "id", "ifconfig", "ip", "ldconfig", "ls",
    "lscpu", "nvcc", "nvidia-smi", "printenv", "printf", "pwd", "rocm-smi", "sacct", "scontrol",
    "set", "shopt", "sinfo", "sleep", "sort", "squeue", "sstat", "tail", "tee", "test", "true",
    "type", "uname", "uptime", "wait", "which", "whoami",
})  # fmt: skip
_DEEPEST = 8
_FILTERS = frozenset({"awk", "column", "cut", "grep", "egrep", "sed", "tr", "uniq", "wc", "xargs"})
_ENDS = frozenset({"deactivate"})
# What is done once, before there is a run.
_ONCE = re.compile(
    r"(\S*python\S* -m )?pip3? (install|uninstall)|(conda|mamba|micromamba) (install|create|env)"
    r"|uv (sync|pip|venv)|poetry install|git (clone|pull|checkout|submodule)|wget|curl"
    r"|(huggingface-cli|hf) (login|download)|wandb (login|offline|online)|gdown|mkdir|chmod"
)
_FOR_RANKS = re.compile(
    r"(MAIN|MASTER|HEAD)\w*|\w*RANK|\w*WORLD_SIZE|N(UM)?_?(NODES|PROCS|PROCESSES|GPUS)"
    r"|N?PROC_PER_NODE|NPROC_PER_NODE|(N_?)?GPUS_PER_NODE|\w*(NODE|HOST)(S|_?LIST|FILE)"
    r"|\w*_?PORT|RDZV_\w+|(SLURM_)?JOB_?ID|\w*NODE_RANK|NNODES|\w*NODE_?IP|\w*IPADDR\w*|RDMA\w*",
    re.IGNORECASE,
)
_OF_RANKS = re.compile(
    r"scontrol|SLURM_(JOB_)?(STEP_)?NODELIST|SLURMD_NODENAME|SLURM_(NODEID|PROCID|LOCALID)|hostname"
    r"|MASTER_|getent|ifconfig|RANDOM|nvidia-smi"
)
_SEEN_BY_SCRIPTS = re.compile(r"(HF|WANDB|TRANSFORMERS|TORCH|NCCL|NEURON|TRITON)_\w+")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_STARTS = frozenset({
    "torchrun", "accelerate", "deepspeed", "composer", "fabric", "srun", "singularity", "apptainer",
    "trl", "axolotl", "litgpt", "llamafactory-cli", "oumi", "uv", "poetry", "pixi", "bash", "sh",
    "exec", "time", "nohup", "env", "stdbuf",
})  # fmt: skip


class Line(Frozen):
    """What becomes of a statement, or of an option for sbatch."""

    number: int
    text: str
    fate: Fate
    becomes: str


class Adopted(Frozen):
    """A batch script, read."""

    file: Path
    lines: tuple[Line, ...]
    options: tuple[str, ...]
    """Options of `trnslurm submit`; marked names are of the user's shell."""
    command: tuple[str, ...]
    """What comes after --; empty: no command was understood."""
    directory: str
    """Where it is to be given; empty: here."""

    @property
    def unclear(self) -> list[Line]:
        """The lines that were not understood."""
        return [line for line in self.lines if line.fate == "unclear"]

    @property
    def line(self) -> str:
        """The command line that submits it; empty: there is none."""
        go = f"cd {shell_word(self.directory)} && " if self.directory else ""
        words = [*map(shell_word, self.options), "--", *map(shell_word, self.command)]
        return f"{go}trnslurm submit {' '.join(words)}" if self.command else ""


def adopt(file: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> Adopted:
    """Read a batch script with these arguments; the variables are those of the user's shell."""
    try:
        return _Reading(file, read_batch_script(file), arguments, environ).result()
    except RecursionError:
        raise ConfigError(f"{file}: its expansions are nested too deeply to be read") from None


class _Reading:
    """A batch script as far as it is read."""

    def __init__(
        self, file: Path, script: BatchScript, arguments: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self._file, self._script, self._environ = file, script, environ
        self._resources = Resources(script)
        numbers, tasks = self._resources.numbers, bool(script.tasks)
        self._variables = Variables(environ, arguments, numbers, in_array=tasks)
        self._texts = Texts(self._variables, numbers, environ)
        self._lines: list[Line] = []
        self._options: list[str] = []
        self._exported: dict[str, tuple[int, str]] = {}
        self._assigned: dict[str, tuple[int, str, bool]] = {}
        self._setting = Environment(environ, os.path.exists)
        self._directory = ""
        self._command: tuple[str, ...] = ()
        self._launched_at = self._best = 0
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
                self._directory = directive.value or ""
                option = Option((), "the directory is the run's project")
            fate: Fate = "unclear" if not option.clear else "taken" if option.words else "ours"
            if not {*option.words} <= {*self._options}:
                self._options += option.words
            becomes = option.instead or " ".join(map(shell_word, option.words))
            self._say(directive.line, f"#SBATCH {directive.word}", fate, becomes)
        self._options += self._resources.shares
        text = read_file(self._file).decode(errors="replace")
        self._best = max(map(self._rank, statements(text)), default=0)
        for statement in statements(text):
            self._read(statement)
        if not self._command:
            self._say(0, "", "unclear", "no command that trains")
        for name, (line, raw, known) in self._assigned.items():
            self._say(line, raw, *self._assigned_variable(name, raw, known=known))
        for name, (line, raw) in self._exported.items():
            self._say(line, raw, *self._exported_variable(name))
        if self._setting.lines:
            self._options += ["--set", f"activate={_yaml_list(self._setting.lines)}"]
        if self._setting.python:
            self._options += ["--set", f"python={self._setting.python}"]
        elif self._setting.doubt and self._command:
            self._say(0, "", "unclear", self._setting.doubt)
        if self._command and not any(d.name == "time" for d in self._script.directives):
            self._say(0, "", "unclear", "no time limit: the command needs --time")
        self._options += [w for name in self._wanted() for w in ("--env", name)]
        return Adopted(
            file=self._file,
            lines=tuple(sorted(self._lines, key=lambda line: (line.number == 0, line.number))),
            options=tuple(self._options),
            command=self._command,
            directory=self._directory,
        )

    def _say(self, number: int, text: str, fate: Fate, becomes: str) -> None:
        shown = " ".join(text.replace("\\\n", " ").split())
        self._lines.append(Line(number=number, text=shown, fate=fate, becomes=becomes))

    def _read(self, statement: Command | Block) -> None:
        if isinstance(statement, Block):
            self._read_block(statement)
            return
        if self._is_skipped(statement):
            return
        says, self._said_before = self._said_before, False
        if says and statement.after == "|" and statement.head in _FILTERS | _SAYS:
            self._said_before = True
            self._say(statement.line, statement.raw, "left out", "it only prints or checks")
            return
        try:
            self._read_command(statement)
        except (UnclearError, ConfigError) as why:
            self._say(statement.line, statement.raw, "unclear", plain(str(why)))

    def _is_skipped(self, command: Command) -> bool:
        """Check whether `&&` or `||` before a command keeps it from running, and say so."""
        joined = {"&&": True, "||": False}.get(command.after)
        before, self._succeeded = self._succeeded, True
        if joined is not None and before is not joined:
            self._succeeded = before
            if before is None:
                self._variables.forget_assigned(command.raw)
                self._say(
                    command.line, command.raw, "unclear", "only the job knows whether it runs"
                )
                return True
            if command.after == "||" and self._set_up_before:
                self._setting.allow_failure()
            self._say(command.line, command.raw, "left out", "the command before it decides so")
            return True
        self._set_up_before = command.head in SETS_UP
        if command.head in ("[", "[[", "test"):
            self._succeeded = holds([command], self._variables)
        elif command.head in ("false", "grep", "command", "which", "type", "pgrep", "ls"):
            self._succeeded = None
        return False

    def _read_block(self, block: Block) -> None:
        found = branches(block) if self._depth < _DEEPEST else []
        for branch in found:
            held = True if not branch.test else holds(branch.test, self._variables)
            if held is None:
                break
            if held:
                self._depth += 1
                for statement in branch.body:
                    self._read(statement)
                self._depth -= 1
                return
        else:
            if found:
                self._say(block.line, block.raw, "left out", "its condition does not hold")
                return
        self._variables.forget_assigned(block.raw)
        only_says = _only_says(block)
        said = "it only prints or checks" if only_says else "a condition, loop or function"
        if re.match(r"[^;&|\n]*<<-?[^<]", block.raw):
            said = "a here-document"
        self._say(block.line, block.raw, "left out" if only_says else "unclear", said)

    def _read_command(self, command: Command) -> None:
        head, raw = command.head, " ".join(word.raw for word in command.words)
        if not command.words:
            for name, value in command.assignments:
                self._assign(command.line, command.raw, name, value)
        elif head in ("export", "declare", "typeset"):
            self._export(command)
        elif head in _ENDS or (
            self._launched_at and head in SETS_UP | {"cd", "mv", "cp", "rsync", "eval"}
        ):
            self._say(command.line, command.raw, "left out", "it follows the training")
        elif head == "cd":
            self._go(command)
        elif command.after == "|" and head == "tee":
            self._say(command.line, command.raw, "left out", "the run keeps its log")
        elif _ONCE.match(re.sub(r"^(srun( -\S+)*|sudo) ", "", raw)):
            self._once(command)
        elif head in SETS_UP or head == "eval":
            self._set_up(command)
        elif head == "exit" and not self._launched_at:
            raise UnclearError("the script ends here")
        elif head in _SAYS or (head == "env" and len(command.words) == 1) or self._prints(command):
            self._writes(command)
            self._said_before = True
            self._say(command.line, command.raw, "left out", "it only prints or checks")
        elif head == "trap" and "requeue" in command.raw:
            self._say(command.line, command.raw, "ours", "it is asked to save, and is requeued")
        elif self._starts(command):
            self._launch(command)
        else:
            raise UnclearError("a command that trnslurm does not know")

    def _prints(self, command: Command) -> bool:
        """Check for a `python -c` that only imports and prints."""
        words = [self._texts.text(word) for word in command.words]
        if len(words) != 3 or words[1] != "-c":
            return False
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError), catch_warnings():
            simplefilter("ignore")  # such as an invalid escape sequence
            text = re.sub(r"\{\{(\w+)\}\}", r"{\1}", words[2])
            lines = [n for n in ast.parse(text).body if not isinstance(n, ast.Import)]
            calls = [n.value for n in lines if isinstance(n, ast.Expr)]
            return len(calls) == len(lines) and all(
                isinstance(c, ast.Call) and isinstance(c.func, ast.Name) and c.func.id == "print"
                for c in calls
            )
        return False

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
            if any("{run_id}" in text or UNKNOWN in text for text in texts):
                raise UnclearError("a directory of each run: the run has one, {run}")
            if relative:
                what = "in a fresh copy of the project: keep the directory there, with a file in it"
                self._say(command.line, command.raw, "once", what)
                return
        if any(UNKNOWN in text for text in texts):
            raise UnclearError("what it does is known only in the job")
        self._say(command.line, command.raw, "once", "do it once, before")

    # -- variables

    def _assign(self, line: int, raw: str, name: str, value: Word) -> None:
        extends = any(p.kind == "name" and p.text == name for p in value.parts)
        if name in IN_JOB or (name in self._environ and extends):
            self._extend(Command(line, raw, (), (), (), ";", background=False), name, value)
            return
        if name in self._environ:  # it stays exported
            self._exported[name] = (line, raw)
            self._variables.assign(name, value)
            return
        self._assigned[name] = (line, raw, self._variables.assign(name, value))

    def _assigned_variable(self, name: str, raw: str, *, known: bool) -> tuple[Fate, str]:
        if known:
            return "taken", f"where ${name} stands"
        if _FOR_RANKS.fullmatch(name) or _OF_RANKS.search(raw):
            return "ours", "for the rendezvous, which is trnslurm's"
        if name in self._variables.used:
            return "unclear", "its value is known only in the job"
        return "left out", "nothing uses it"

    def _export(self, command: Command) -> None:
        for word in command.words[1:]:
            name = word.raw.partition("=")[0]
            if name.startswith("-"):
                continue
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise UnclearError("what it exports is not plain")
            raw = f"export {word.raw}"
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
        """Take a line such as export PATH=/x/bin:$PATH."""
        if name == "PYTHONPATH" and self._is_project(value):
            self._say(command.line, command.raw, "ours", "the copy of the project is on PYTHONPATH")
        elif name in IN_JOB:
            self._setting.lines.append(f"export {name}={self._texts.shell(value)}")
            self._say(command.line, command.raw, "taken", "activate")
        else:
            raise UnclearError(f"it extends {name}, whose value in the job is not known")

    def _is_project(self, value: Word) -> bool:
        """Check whether a PYTHONPATH has only the project and its src/."""
        text = self._texts.text(value).replace(f"{NAME}PYTHONPATH{END}", "")
        text = text.replace(f"{UNKNOWN}$PYTHONPATH{END}", "")
        here = str(Path.cwd())
        own = {"", ".", "./", "src", "./src", here, f"{here}/src"}
        own |= {self._directory, f"{self._directory}/src"}
        return {*text.split(":")} <= own

    def _exported_variable(self, name: str) -> tuple[Fate, str]:
        value = self._variables.value(name)
        text = "" if value is None else self._texts.text(Word("", value))
        if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") and text.isdecimal():
            return "unclear", "trnslurm sets it to the number of its workers"
        if is_reserved(name) and name not in ("PYTHONPATH", "PATH", "HOME", "USER"):
            return "ours", "trnslurm sets it"
        if value is None and _FOR_RANKS.fullmatch(name):
            return "ours", "for the rendezvous, which is trnslurm's"
        if name == "PYTHONPATH":
            own = value is not None and self._is_project(Word("", value))
            return ("ours", "the copy of the project is on it") if own else (
                "unclear", "the job has a PYTHONPATH of its own")  # fmt: skip
        if name == "CUDA_VISIBLE_DEVICES":
            return "ours", "each worker sees the job's GPUs"
        if is_secret(name, text) or is_secret(name, "0123456789abcdef" * 2):
            return "unclear", "a secret: keep it in a file that the script reads"
        if value is None and name not in self._variables.computed and name in self._environ:
            self._options += ["--env", name]
            return "taken", f"--env {name}"
        text = self._texts.counted(text)
        if value is None or UNKNOWN in text or re.search(r"(?<!\{)\{\w+\}", text):
            return "unclear", "its value is known only in the job"
        words = ["--set", f"env.{name}={text.replace('{{', '{').replace('}}', '}')}"]
        self._options += words
        return "taken", " ".join(map(shell_word, words))

    def _wanted(self) -> list[str]:
        """Return the variables of this shell that scripts often read."""
        return [
            name
            for name, value in sorted(self._environ.items())
            if _SEEN_BY_SCRIPTS.fullmatch(name) and name not in self._exported
            and name not in self._options and not is_secret(name, value) and not is_reserved(name)
        ]  # fmt: skip

    # -- the environment of its Python, and its directory

    def _set_up(self, command: Command) -> None:
        others = [w for w in command.redirections if "/dev/null" not in w and "&1" not in w]
        if command.assignments or others:
            raise UnclearError("it is not plain")
        if command.head in ("source", "."):
            self._variables.open = True
        if command.head == "eval":
            if "conda" not in command.raw or "hook" not in command.raw:
                raise UnclearError("what eval runs is known only in the job")
            self._say(command.line, command.raw, "ours", "conda.sh stands in its place")
            return
        texts = [self._texts.shell(word) for word in command.words[1:]]
        self._setting.read(command.head, texts, with_values(self._directory, self._environ))
        self._say(command.line, command.raw, "taken", "activate")

    def _go(self, command: Command) -> None:
        text = self._texts.text(command.words[1]) if len(command.words) > 1 else ""
        if UNKNOWN in text or not text:
            raise UnclearError("where it goes is not known here")
        if text not in (".", "./", str(Path.cwd())):
            absolute = text.startswith(("/", NAME))
            self._directory = text if absolute or not self._directory else (
                f"{self._directory}/{text}")  # fmt: skip
        self._say(command.line, command.raw, "taken", "the directory is the run's project")

    # -- the command that trains

    def _rank(self, statement: Command | Block) -> int:
        """Return how much a command looks like the one that trains."""
        if isinstance(statement, Block):
            return 0
        text = f" {statement.raw} "
        if re.search(r"\bpip3?\b", text) or not statement.words:
            return 0
        launcher = re.search(
            r"[ /](torchrun|accelerate|deepspeed|composer|torch\.distributed)", text
        )
        return 2 * (statement.head == "srun") + bool(launcher)

    def _starts(self, command: Command) -> bool:
        words = self._texts.texts(command.words)
        if not words:
            return False
        text, name = words[0], Path(words[0]).name
        if _PYTHON.fullmatch(name) and words[1:2] in (["-c"], ["--version"], ["-V"], ["-"]):
            return False
        return (
            _PYTHON.fullmatch(name) is not None
            or name in _STARTS
            or (text.startswith("./") or name.endswith(".sh"))
        )

    def _launch(self, command: Command) -> None:
        if self._launched_at and not self._best:
            self._command = ()
        if self._launched_at:
            raise UnclearError(f"a second command, after that of line {self._launched_at}")
        if self._rank(command) < self._best:
            raise UnclearError("a command before the one that trains: do it once, or in the script")
        environment = [f"{name}={self._texts.text(value)}" for name, value in command.assignments]
        parts = [each for word in command.words for each in self._variables.words(word)]
        words = [*map(self._texts.joined, parts)]
        options: list[str] = []
        tasks: Tasks | None = None
        while words:
            parts = parts[len(parts) - len(words) :]
            head = Path(words[0]).name
            if _PYTHON.fullmatch(head) and words[1:2] and words[1] in OF_A_NODE:
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
            elif head == "srun" and tasks is None:
                srun = read_srun(words[1:])
                tasks, words = srun.tasks, [*srun.rest]
                environment += srun.environment
                options += self._container(srun.container)
            elif head in ("singularity", "apptainer"):
                image = read_apptainer(words)
                words = [*image.rest]
                environment += image.environment
                options += self._container(image.container)
            elif runs_text(words):
                words = self._inner(as_script(parts[-1]), command.line, environment)
                break
            else:
                break
        self._take(command, words, environment, options, tasks)

    def _take(
        self,
        command: Command,
        words: list[str],
        environment: Sequence[str],
        options: list[str],
        tasks: Tasks | None,
    ) -> None:
        """Take the words as the command of the run."""
        if not words or not (
            _PYTHON.fullmatch(Path(words[0]).name)
            or Path(words[0]).name in _STARTS
            or words[0].startswith("./")
            or words[0].endswith((".sh", ".py"))
        ):
            raise UnclearError(f"{words[0]} may train or not" if words else "it starts nothing")
        options += how_often(
            words,
            tasks,
            nodes=self._script.nodes,
            resources=self._resources,
            reads_ranks=bool({"RANK", "LOCAL_RANK", "WORLD_SIZE"} & self._exported.keys()),
        )
        found = read_command(words)
        if any(re.search(r"(^|[=:,/])\.\.(/|$)", word) for word in [*words, *environment]):
            raise UnclearError("it names files above its directory, which the run has no copy of")
        self._check(found, [*environment, *options])
        for word in environment:
            name, _, value = word.partition("=")
            if name == "PYTHONPATH":
                if not self._is_project(value_of(_word(word))):
                    raise UnclearError("the job has a PYTHONPATH of its own")
            elif not is_reserved(name) and name != "CUDA_VISIBLE_DEVICES":
                options += ["--set", f"env.{name}={value}"]
        workers = read_command([*map(self._texts.counted, words)]).workers_on(self._script.nodes)
        if Path(words[0]).name == "torchrun" and "nproc" not in " ".join(words).replace("-", "_"):
            workers = 1  # its own default
        if workers and "--workers" not in options:
            options += ["--workers", str(workers)]
        self._command = _without(words, found.left_out)
        self._options += options
        self._launched_at = command.line
        if words[0].startswith("/") and Path(words[0]).name in OF_A_NODE | {"trl", "axolotl"}:
            self._setting.python = str(Path(words[0]).with_name("python"))
        elif words[0].startswith("/") and _PYTHON.fullmatch(Path(words[0]).name):
            self._setting.python = words[0]
        elif found.left_out[:1] and found.left_out[0].endswith(" run"):
            self._setting.may_bring(found.left_out[0])
        names = [shlex.split(option)[0].partition("=")[0] for option in found.left_out]
        said = f"without {', '.join(names)}" if names else "as it stands"
        self._say(command.line, command.raw, "taken", f"the command, {said}")

    def _container(self, found: Mapping[str, str]) -> list[str]:
        """Return the section `container` as options; its paths are absolute."""
        words: list[str] = []
        for key, value in found.items():
            parts = re.split(r"([,:])", value) if key in ("mounts", "workdir", "image") else [value]
            full = [self._absolute(p) if p == "." or p.startswith("./") else p for p in parts]
            text = "".join(full)
            words += ["--set", f"container.{key}={f'[{text}]' if key == 'mounts' else text}"]
        return words

    def _absolute(self, path: str) -> str:
        return str(Path(self._directory or Path.cwd(), path).absolute())

    def _inner(self, text: str, line: int, environment: list[str]) -> list[str]:
        """Return the words of the one command that `bash -c` runs."""
        found: list[str] = []
        for statement in statements(text, first_line=line):
            if isinstance(statement, Block):
                raise UnclearError("what bash -c runs has a condition, a loop or a function")
            before = len(self._lines)
            if statement.head in SETS_UP:
                self._set_up(statement)
            elif statement.head == "cd":
                self._go(statement)
            elif not statement.words:
                for name, value in statement.assignments:
                    self._variables.assign(name, value)
            elif statement.head == "export":
                self._export(statement)
            elif found and not (statement.after == "|" and statement.head == "tee"):
                raise UnclearError("bash -c runs several commands")
            elif statement.head not in _SAYS:
                environment += [f"{n}={self._texts.text(v)}" for n, v in statement.assignments]
                found = self._texts.texts(statement.words)
            del self._lines[before:]
        return found

    def _check(self, found: UsersCommand, more: Sequence[str]) -> None:
        """Refuse a command with words that are known only in the job."""
        for word in (found.recipe, *found.launcher_arguments, *found.arguments, *more):
            if unknown := next((m[2] for m in MARKED.finditer(word) if m[1] == UNKNOWN), None):
                raise UnclearError(f"{unknown} is known only in the job")
        has_task = any("{task}" in word for word in found.arguments)
        if has_task != bool(self._script.tasks):
            lacks = "has no --array" if has_task else "passes no SLURM_ARRAY_TASK_ID to its command"
            raise UnclearError(f"the file {lacks}")


def _word(text: str) -> Word:
    [command] = [s for s in statements(f": {text}") if isinstance(s, Command)]
    return command.words[1]


def _without(words: Sequence[str], left_out: Sequence[str]) -> tuple[str, ...]:
    """Return a command without the options in whose place trnslurm acts."""
    rest = [*words]
    for text in left_out:
        if text in ("--use_env", "--use-env"):
            continue  # it says what the script gets, too
        gone = shlex.split(text)
        places = (n for n in range(len(rest)) if rest[n : n + len(gone)] == gone)
        if (at := next(places, None)) is not None:
            del rest[at : at + len(gone)]
    return tuple(rest)


def _yaml_list(lines: Sequence[str]) -> str:
    plain = re.compile(r"[\w./~$@+=-]+( [\w./~$@+=-]+)*")
    return f"[{', '.join(x if plain.fullmatch(x) else json.dumps(x) for x in lines)}]"


def _only_says(block: Block) -> bool:
    """Check whether a block has only commands that print or check."""
    raw = re.sub(r"(?<![\w./-])(for \w+ in [^;\n]*|while)(?![\w./-])", ";", block.raw)
    raw = re.sub(r"(?<![\w./-])(if|then|else|elif|fi|do|done)(?![\w./-])", ";", raw)
    return all(
        isinstance(s, Command) and s.head in _SAYS and not s.redirections and not s.assignments
        for s in statements(raw)
    )
