"""Translates the training command of a batch script into trnslurm's terms."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from trnslurm.adopt.environment import SETS_UP
from trnslurm.adopt.flow import Flow
from trnslurm.adopt.kinds import (
    CONTAINERS,
    IN_CONTAINERS,
    MPI,
    ONCE,
    PYTHON,
    SAYS,
    STARTS,
    only_says,
)  # fmt: skip
from trnslurm.adopt.often import OF_A_NODE, how_often
from trnslurm.adopt.settings import Asked, word_of
from trnslurm.adopt.shell import (
    Block,
    Command,
    Part,
    Statement,
    Word,
    parsed,
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
    with_values,
)
from trnslurm.adopt.wrappers import read_apptainer, runs_text, without_labels, without_options
from trnslurm.config.command import Command as UsersCommand
from trnslurm.config.command import read_command
from trnslurm.config.tasks import Tasks, read_mpirun, read_srun
from trnslurm.config.values import is_reserved
from trnslurm.errors import ConfigError

_MOST_STATEMENTS = 4096
_WHICH = re.compile(f"{UNKNOWN}[$`(]+(?:which|command -v|type -p) ([\\w.-]+)[`)]{END}")
# Dates and random numbers in a name, which the run's id replaces.
_STAMP = re.compile(
    f"{UNKNOWN}(?:\\$\\(|`)(?:date|uuidgen)\\b[^|&;]*?{END}"
    f"|(?<=[\\w.-]){UNKNOWN}(?:(?:\\$\\(|`)shuf\\b[^|&;]*?|\\$RANDOM){END}"
)


class Launching(Flow):
    """Removes what starts the command: srun, containers, shells."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._best = asked.best
        self.ranks: list[int] = []
        """How much each command found so far looks like the training command."""
        self._doubts: list[str] = []
        """The parts of the command that differ from the file."""
        self._launched_at = 0

    def _rank(self, words: Sequence[str]) -> int:
        """Return how much a command looks like the training command."""
        text = f" {' '.join(words)} "
        if re.search(r"\bpip3?\b", text):
            return 0
        launcher = re.search(
            r"[ /](torchrun|accelerate|deepspeed|composer|torch\.distributed)", text
        )
        return 2 * (Path(words[0]).name in {"srun", *MPI}) + bool(launcher)

    def _words(self, command: Command) -> list[Word]:
        """Return the words of a command, without those of unset variables.

        After an option such a variable stays, because the user's shell may provide its value.
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
            raise UnclearError(
                f"this is a second training command, after the command on line {self._launched_at}"
            )
        if rank < self._best:
            raise UnclearError(
                "this command runs before the training command: run it once, or in the script"
            )
        self._doubts.clear()
        before = {**self._exported}, [*self._paths], self._setting.copied(), self._directory
        try:
            self._launch_words(command, parts, words)
        except (UnclearError, ConfigError):
            self._exported, self._paths, self._setting, self._directory = before
            self._doubts.clear()
            raise

    def _launch_words(self, command: Command, parts: list[Word], words: list[str]) -> None:
        """Remove what starts the command, word by word."""
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
                raise UnclearError(f"{head} is not a supported container runtime")
            elif head in IN_CONTAINERS and words[1:2] == ["exec"]:
                self._doubts.append(
                    f"{head} exec: the module's Python must be able to start without this wrapper"
                )
                del words[:2]
            elif head in ("singularity", "apptainer"):
                image = read_apptainer(words)
                if words[1] == "run":
                    self._doubts.append(
                        f"{head} run starts the image's runscript, but trnslurm does not"
                    )
                words = [*image.rest]
                environment += image.environment
                options += self._container(image.container)
            elif runs_text(words):
                inner = re.sub(r"\w*(RANK|WORLD_SIZE)=\S*", "", parts[-1].raw)
                if self._has_own_tasks(tasks) and re.search(r"SLURM_N?(TASKS|PROCS)", inner):
                    raise UnclearError("srun has a different number of tasks than the job")
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
        """Use the words as the command of the run."""
        if not words or not (
            PYTHON.fullmatch(Path(words[0]).name)
            or Path(words[0]).name in STARTS
            or words[0].startswith("./")
            or words[0].endswith((".sh", ".py"))
        ):
            raise UnclearError(
                f"trnslurm does not know what {words[0]} does"
                if words
                else "it does not start a command"
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
            workers = 1  # torchrun's default
        if "--workers" in options:
            workers = int(options[options.index("--workers") + 1])
            more = []
        else:
            more = ["--workers", str(workers)] if workers else []
        self._world = nodes * workers if workers else None
        words = [self._stamped(self._texts.placed(word, workers)) for word in words]
        found = read_command(words)
        if any(re.search(r"(^|[=:,/])\.\.(/|$)", word) for word in [*words, *environment]):
            raise UnclearError("it refers to files above its directory, which a run does not copy")
        self._check(found, [*environment, *options])
        for word in environment:
            name, _, value = word.partition("=")
            if name == "PYTHONPATH":
                if not self._is_project(value_of(word_of(word))):
                    raise UnclearError("the job has its own PYTHONPATH")
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
        said = f"without {', '.join(names)}" if names else "unchanged"
        self._say(command.line, command.raw, "taken", f"the command, {said}")

    def _has_own_tasks(self, tasks: Tasks | None) -> bool:
        """Check whether srun starts a different number of tasks than the job has."""
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
        """Return a word with the path of a program that `which` finds, if known."""
        return _WHICH.sub(lambda found: self._setting.program(found[1]) or found[0], word)

    def _stamped(self, word: str) -> str:
        """Return a word in which the run's id replaces a date or a random number."""
        if _STAMP.search(word):
            stamps = [found[2] for found in MARKED.finditer(word) if found[1] == UNKNOWN]
            self._stamps |= {*stamps}
            said = "".join(raw for _, _, raw, _ in self._assigned)
            self._doubts += [
                f"{stamp}: replaced with {{run_id}}" for stamp in stamps if stamp not in said
            ]
        return _STAMP.sub("{run_id}", word)

    def _container(self, found: Mapping[str, str]) -> list[str]:
        """Return the section `container` as options, with absolute paths."""
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
                raise UnclearError("the functions expand to too many commands")
            before = len(self._lines)
            if self._is_skipped(statement):
                if any(line.fate == "unclear" for line in self._lines[before:]):
                    self._doubts.append(
                        f"{statement.raw}: whether it runs is known only in the job"
                    )
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
                raise UnclearError("bash -c runs more than one command")
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
            raise UnclearError("the script of bash -c contains a condition, a loop or a function")
        return body or []

    @contextmanager
    def _as_doubt(self, command: Command) -> Iterator[None]:
        """Record why a command before the training command is not understood."""
        try:
            yield
        except (UnclearError, ConfigError) as why:
            self._doubts.append(f"{command.raw}: {why}")

    def _check(self, found: UsersCommand, more: Sequence[str]) -> None:
        """Reject a command with words that are known only in the job."""
        for word in (found.recipe, *found.launcher_arguments, *found.arguments, *more):
            unknown = next((m[2] for m in MARKED.finditer(word) if m[1] == UNKNOWN), "")
            if re.fullmatch(r"\$\d", unknown):
                raise UnclearError(f"{unknown} is an argument of the file: pass its value after --")
            if unknown:
                raise UnclearError(f"{unknown} is known only in the job")
        has_task = any("{task}" in word for word in found.arguments)
        if has_task != (len(self._script.tasks) > 1):
            lacks = (
                "has no --array" if has_task else "does not pass SLURM_ARRAY_TASK_ID to its command"
            )
            raise UnclearError(f"the file {lacks}")
