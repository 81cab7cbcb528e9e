"""A user's batch script: its #SBATCH options, as sbatch reads them, and how each is used.

Options that a profile has a key for become values of the recipe, so that the site's locks apply.
The rest are options of the job, passed on unchanged. trnslurm replaces a few, because the run has
its own log.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, NamedTuple

from trnslurm.config.times import parse_size, parse_time
from trnslurm.contract.files import open_file, read_file
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen

if TYPE_CHECKING:
    from trnslurm.config.catalog import InstanceType

_HEAD_BYTES = 64 << 10
_MARK = "#SBATCH"
# https://slurm.schedmd.com/sbatch.html#SECTION_OPTIONS
_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint",
    "c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile",
    "G": "gpus", "H": "hold", "h": "help", "i": "input", "J": "job-name", "k": "no-kill",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks",
    "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos",
    "S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose",
    "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_ALIASES = {
    "workdir": "chdir", "tasks-per-node": "ntasks-per-node", "share": "oversubscribe",
}  # fmt: skip
# Options without a value, or with a value only after "=".
_FLAGS = frozenset({
    "contiguous", "exclusive", "get-user-env", "help", "hold", "ignore-pbs", "nice", "no-kill",
    "no-requeue", "overcommit", "oversubscribe", "parsable", "propagate", "quiet", "reboot",
    "requeue", "share", "spread-job", "test-only", "usage", "use-min-nodes", "verbose", "version",
    "wait",
})  # fmt: skip
# sbatch's long options (`common_options` of src/common/slurm_opt.c, 22.05). It parses them with
# getopt_long, which accepts any unambiguous prefix of a name.
_NAMES = frozenset({
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster",
    "cluster-constraint", "clusters", "comment", "constraint", "container", "context",
    "contiguous", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task",
    "deadline", "delay-boot", "dependency", "distribution", "error", "exclude", "exclusive",
    "export", "export-file", "extra-node-info", "get-user-env", "gid", "gpu-bind", "gpu-freq",
    "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "help",
    "hint", "hold", "ignore-pbs", "input", "job-name", "kill-on-invalid-dep", "licenses",
    "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu",
    "mincpus", "network", "nice", "no-kill", "no-requeue", "nodefile", "nodelist", "nodes",
    "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket",
    "ntasks-per-tres", "open-mode", "output", "overcommit", "oversubscribe", "parsable",
    "partition", "power", "prefer", "priority", "profile", "propagate", "qos", "quiet",
    "reboot", "requeue", "reservation", "signal", "sockets-per-node", "spread-job", "switches",
    "tasks-per-node", "test-only", "thread-spec", "threads-per-core", "time", "time-min", "tmp",
    "uid", "usage", "use-min-nodes", "verbose", "version", "wait", "wait-all-nodes", "wckey",
    "wrap",
})  # fmt: skip
_AS_KEYS = ("partition", "account", "qos", "constraint", "reservation")
_LOGS = "the run has its own log (trnslurm logs)"
_OF_GPUS = ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--gres")
_OF_CPUS = ("--cpus-per-task", "--cpus-per-gpu", "--mincpus")
_OF_MEMORY = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
# Options that the run replaces, and the message about each.
_REPLACED = {
    "output": _LOGS,
    "error": _LOGS,
    "open-mode": _LOGS,
    "input": "the script's input is empty",
    "wait-all-nodes": "the job starts when all nodes are up",
    "parsable": "", "quiet": "", "verbose": "", "wait": "", "ignore-pbs": "", "test-only": "",
    "kill-on-invalid-dep": "",
}  # fmt: skip
_REFUSED = {
    "clusters": "submit it on the cluster itself",
    "nodefile": "name the nodes with --nodelist",
    "uid": "a run belongs to the user who submits it",
    "gid": "a run belongs to the user who submits it",
    "export-file": "use --export",
    "wrap": "pass the command to trnslurm",
}


class Directive(NamedTuple):
    """One option of a #SBATCH line."""

    line: int
    name: str
    """The long name, without dashes."""
    value: str | None

    @property
    def word(self) -> str:
        return f"--{self.name}" + ("" if self.value is None else f"={self.value}")


class BatchScript(Frozen):
    """A file with #SBATCH lines."""

    file: Path
    told_nodes: int | None
    """The number of nodes, or None if its --ntasks leaves that to Slurm."""
    name: str | None
    kept: tuple[str, ...]
    """The job's options, unchanged."""
    replaced: tuple[tuple[str, str], ...]
    """Options that trnslurm replaces, and what it does instead."""
    slurm: Mapping[str, Any]
    """Values for the section `slurm`."""
    directives: tuple[Directive, ...]
    """All of the script's options."""
    signal: str
    """The signal that the script wants before its time limit. With `B:` only the script gets it."""
    directory: str
    """The directory in which its commands run; empty if it sets none."""
    levels_up: int
    """How many levels above that directory its commands refer to files."""
    tasks: tuple[int, ...] = ()
    """The indices of a job array."""
    at_most: int | None = None
    """How many of its tasks may run at the same time, or None for no limit."""

    @property
    def nodes(self) -> int:
        """Return the number of its nodes, or raise an error that names the line to complete."""
        if self.told_nodes is None:
            raise ConfigError(f"{self._open}: pass --nodes N, or add #SBATCH --nodes=N")
        return self.told_nodes

    def nodes_of(self, instance: InstanceType | None) -> tuple[int, str]:
        """Return how many nodes of a type have room for its tasks, and a line that says so.

        On idle nodes Slurm uses as few as it can (_eval_nodes of select/cons_tres, 22.05).
        """
        if instance is None:
            return 1, f"{self._open}. Using --nodes 1, because this machine is one node"
        given = {d.name: d.value or "" for d in self.directives}
        cpus = _count(given.get("cpus-per-task")) or 1
        memory = parse_size(given.get("mem-per-cpu") or "0") * cpus
        room = [instance.vcpus // cpus]
        room += [(instance.host_gib << 10) // memory] if memory else []
        gpus = _count(given.get("gpus-per-task"))
        room += [instance.gpus // gpus] if gpus else []
        tasks, most = _count(given["ntasks"]), max(1, min(room))
        nodes = max(-(-tasks // most), -(-_count(given.get("gpus")) // max(1, instance.gpus)))
        return nodes, (
            f"{self._open}. Using --nodes {nodes}: one {instance.name} node has room for {most} of "
            "these tasks. To spread them over more nodes, pass --nodes N"
        )

    @property
    def _open(self) -> str:
        line, _, tasks = next(d for d in self.directives if d.name == "ntasks")
        return f"{self.file}:{line}: --ntasks={tasks} leaves the number of nodes to Slurm"


def contradicted(words: Sequence[str], *, gpus: bool, cpus: bool, memory: bool) -> list[str]:
    """Return the options of a script that contradict trnslurm's own for the same resources."""
    wanted = ((gpus, _OF_GPUS), (cpus, _OF_CPUS), (memory, _OF_MEMORY))
    names = {name for said, every in wanted if said for name in every}
    return [
        word
        for word in words
        if (name := word.partition("=")[0]) in names
        and (name != "--gres" or re.search(r"=(.*,)?(gres/)?gpu\b", word))
    ]


def tasks_of_node(words: Sequence[str], nodes: int) -> int:
    """Return how many Slurm tasks a node runs, according to a script's options."""
    counts = {name: int(n) for name, _, n in (w.partition("=") for w in words) if n.isdecimal()}
    each = counts.get("--ntasks-per-node") or -(-counts.get("--ntasks", 1) // nodes)
    return max(1, each)


def _count(value: str | None) -> int:
    """Return the number in an option value such as `4` or `a100:4`, or 0 if it has none."""
    number = (value or "").rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def first_directive(file: Path) -> int:
    """Return the line number of a file's first #SBATCH line, or 0 if sbatch would find none."""
    try:
        with open_file(file) as stream:
            head = stream.read(_HEAD_BYTES).decode(errors="replace")
    except OSError:  # the caller that reads the whole file reports the error
        return 0
    return next((number for number, _ in _lines(head)), 0)


def is_batch_script(file: Path) -> bool:
    """Check whether a file is meant for sbatch, by its #SBATCH lines or else by its name."""
    return first_directive(file) > 0 or (file.suffix in (".sbatch", ".slurm") and file.is_file())


def read_batch_script(file: Path) -> BatchScript:
    """Return what a batch script requests, or raise an error that names the invalid line."""
    text = read_file(file).decode(errors="replace")
    if not text.startswith("#!"):  # as sbatch does
        raise ConfigError(
            f"{file}: a batch script must begin with a shebang line such as #!/bin/bash"
        )
    found = _last_of_each(file, text)
    for name, why in _REFUSED.items():
        if name in found:
            raise ConfigError(f"{file}:{found[name].line}: {found[name].word}: {why}")
    return _meaning(file, text, found)


def directives_of(file: Path, text: str) -> list[Directive]:
    """Return a batch script's options as sbatch reads them. The last option of a name counts."""
    return [*_last_of_each(file, text).values()]


def _last_of_each(file: Path, text: str) -> dict[str, Directive]:
    found: dict[str, Directive] = {}
    for number, line in _lines(text):
        if line.split()[:1] == ["hetjob"] or line.split()[:1] == ["packjob"]:
            raise ConfigError(
                f"{file}:{number}: trnslurm does not run heterogeneous jobs. To run the script "
                f"unchanged, use sbatch {shlex.quote(str(file))}"
            )
        for directive in _directives(file, number, line):
            before = found.get(directive.name)  # the last one counts, but --mail-type accumulates
            if before and directive.name == "mail-type":
                directive = directive._replace(value=f"{before.value},{directive.value}")
            found[directive.name] = directive
    return found


def _meaning(file: Path, text: str, found: dict[str, Directive]) -> BatchScript:
    def take(name: str) -> str | None:
        directive = found.pop(name, None)
        return None if directive is None else directive.value or ""

    directives = tuple(found.values())
    nodes = _nodes(file, found)
    found.pop("nodes", None)
    tasks, at_most = _tasks(file, found.pop("array", None))
    # sbatch has no other defaults for these.
    slurm: dict[str, Any] = {"exclusive": False, "gpus_per_node": 0, "mem_per_node_mib": None,
                             "cpus_per_task": None}  # fmt: skip
    if (limit := found.pop("time", None)) is not None:
        try:
            slurm["time_min"] = parse_time(limit.value or "")
        except ConfigError as error:
            raise ConfigError(f"{file}:{limit.line}: {error}") from None
    slurm |= {name: value for name in _AS_KEYS if (value := take(name))}
    if take("no-requeue") is not None:
        slurm["requeue"] = False
    take("requeue")
    wish = take("signal") or ""
    signal, _, seconds = wish.partition("@")
    number = signal.upper().rpartition(":")[2].removeprefix("SIG")
    if wish and not number.isdecimal() and f"SIG{number}" not in Signals.__members__:
        raise ConfigError(f"{file}: --signal={wish}: there is no signal {number!r}")
    if wish:  # Slurm's default is a minute
        slurm["stop_before_s"] = int(seconds) if seconds.isdecimal() else 60
    elif limit is None:  # it could be so short that every attempt would stop at its start
        slurm["stop_before_s"] = 0
    name, directory = take("job-name"), take("chdir")
    replaced = [(d.word, _REPLACED[d.name]) for d in found.values() if d.name in _REPLACED]
    kept = [d.word for d in found.values() if d.name not in _REPLACED]
    return BatchScript(
        file=file,
        told_nodes=nodes,
        name=name or None,
        kept=tuple(kept),
        replaced=tuple(replaced),
        slurm=slurm,
        directives=directives,
        signal=signal.upper(),
        directory=directory or "",
        levels_up=_levels_up(text),
        tasks=tasks,
        at_most=at_most,
    )


def _tasks(file: Path, array: Directive | None) -> tuple[tuple[int, ...], int | None]:
    """Return the indices in `--array=0-6:2,9%4`, and how many of them run at a time."""
    if array is None:
        return (), None
    words, percent, most = (array.value or "").partition("%")
    tasks: set[int] = set()
    for word in words.split(","):
        ends = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6})(?::([1-9]\d{0,5}))?)?", word)
        found = ends and range(int(ends[1]), int(ends[2] or ends[1]) + 1, int(ends[3] or 1))
        if not found or (percent and not re.fullmatch(r"[1-9]\d{0,5}", most)):
            raise ConfigError(f"{file}:{array.line}: {array.word}: expected a value such as 0-15%4")
        tasks.update(found)
    return tuple(sorted(tasks)), int(most) if percent else None


def _levels_up(text: str) -> int:
    """Return how many directories up a script refers to files: 1 for `../src/train.py`."""
    code = re.sub(r"(?m)^\s*#.*", "", text)
    own = r"(?:\./|\$\{?PWD\}?/|\$\(pwd\)/)?"  # the directory itself
    chains = re.findall(rf"(?<![\w./}}]){own}((?:\.\./)*\.\.)(?![\w.])", code)
    levels = [chain.count("..") for chain in chains]
    levels += [1 for _ in re.findall(r"dirname +[\"']?(?:\$\{?PWD\b|\$\(pwd\))", code)]
    return max(levels, default=0)


def _nodes(file: Path, found: Mapping[str, Directive]) -> int | None:
    """Return the number of nodes, or None if the script leaves it to Slurm."""

    def number(name: str) -> int | None:
        directive = found.get(name)
        if directive is None:
            return None
        if not re.fullmatch(r"[1-9]\d{0,6}", directive.value or ""):
            raise ConfigError(
                f"{file}:{directive.line}: {directive.word}: use a single number, or pass --nodes"
            )
        return int(directive.value or "")

    if (nodes := number("nodes")) is not None:
        return nodes
    tasks, each = number("ntasks") or 1, number("ntasks-per-node")
    return -(-tasks // (each or 1)) if each or tasks == 1 else None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the #SBATCH lines up to the first command, as sbatch finds them (sbatch/opt.c)."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(_MARK):
            yield number, line.removeprefix(_MARK)
        elif line.strip() and not line.lstrip().startswith("#"):
            return


def _directives(file: Path, number: int, line: str) -> Iterator[Directive]:
    """Yield the options on a line."""
    words = _words(line)
    if words is None:
        raise ConfigError(f"{file}:{number}: a quotation mark is not closed")
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _whole(file, number, name)
            name = _ALIASES.get(name, name)
            needs = not equals and name not in _FLAGS
        elif word.startswith("-") and word[1:2] in _SHORT:
            name, value = _SHORT[word[1]], word[2:]
            equals = "=" if value else ""
            needs = not value and name not in _FLAGS
        else:
            asks = ": is it a placeholder to fill in?" if re.search(r"[{}<>]", line) else ""
            raise ConfigError(f"{file}:{number}: {word!r} is not an sbatch option{asks}")
        if needs:
            if not words:
                raise ConfigError(f"{file}:{number}: {word} needs a value")
            value, equals = words.pop(0), "="
        yield Directive(number, name, value if equals else None)


def _whole(file: Path, number: int, name: str) -> str:
    """Return the long option that a prefix stands for, or an unknown name, as from a plug-in."""
    if name in _NAMES | _ALIASES.keys():
        return name
    found = sorted(each for each in _NAMES if each.startswith(name))
    if len(found) > 1:
        raise ConfigError(
            f"{file}:{number}: --{name} is ambiguous: it could be --{' or --'.join(found)}"
        )
    return found[0] if found else name


def _words(line: str) -> list[str] | None:
    """Return the words of a line as sbatch splits it, or None if a quotation mark is not closed.

    Unlike in a shell, a backslash escapes the next character inside every kind of quotes, but never
    a blank outside of them (get_argument in src/sbatch/opt.c; measured with 22.05).
    """
    words: list[str] = []
    word, quote, at = "", "", 0
    while at < len(line):
        character, at = line[at], at + 1
        if character == "\\":
            if at < len(line) and (quote or not line[at].isspace()):
                word, at = word + line[at], at + 1
        elif quote:
            quote, word = ("", word) if character == quote else (quote, word + character)
        elif character in "\"'":
            quote = character
        elif character == "#":
            break
        elif character.isspace():
            words, word = [*words, word], ""
        else:
            word += character
    return None if quote else [word for word in (*words, word) if word]
