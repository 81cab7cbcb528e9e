"""How srun or mpirun starts a command: its tasks, and what its other options mean.

https://slurm.schedmd.com/srun.html#SECTION_OPTIONS
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen

_SHORT = {
    "A": "account", "b": "begin", "B": "extra-node-info", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "E": "preserve-env", "G": "gpus", "H": "hold",
    "I": "immediate", "i": "input", "J": "job-name", "K": "kill-on-bad-exit", "k": "no-kill",
    "l": "label", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes",
    "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos",
    "r": "relative", "s": "oversubscribe", "S": "core-spec", "T": "threads", "t": "time",
    "u": "unbuffered", "v": "verbose", "w": "nodelist", "W": "wait", "X": "disable-status",
    "x": "exclude", "Z": "no-allocate",
}  # fmt: skip
# Options without a value, or with a value only after "=". The last ones are pyxis's.
_FLAGS = frozenset({
    "contiguous", "disable-status", "exact", "exclusive", "hold", "immediate", "kill-on-bad-exit",
    "label", "multi-prog", "no-allocate", "no-kill", "overcommit", "overlap", "oversubscribe",
    "preserve-env", "pty", "quiet", "reboot", "spread-job", "unbuffered", "use-min-nodes",
    "verbose", "whole", "container-entrypoint", "container-mount-home", "container-readonly",
    "container-remap-root", "container-writable", "no-container-entrypoint",
    "no-container-mount-home", "no-container-remap-root",
})  # fmt: skip
_SIZE = frozenset({"nodes", "ntasks", "ntasks-per-node"})
# Options that the run's own srun sets, or that do not matter for one command on all nodes.
_OURS = frozenset({
    "accel-bind", "cpu-bind", "cpus-per-gpu", "cpus-per-task", "disable-status", "distribution",
    "error", "exact", "exclusive", "gpu-bind", "gpus", "gpus-per-node", "gpus-per-task", "gres",
    "input", "jobid",
    "job-name", "kill-on-bad-exit", "label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu",
    "mpi", "no-kill", "open-mode", "output", "overcommit", "overlap", "partition", "account", "qos",
    "comment", "gres-flags", "quiet", "threads-per-core", "hint", "time", "unbuffered", "verbose",
    "wait", "whole", "tres-per-task", "ntasks-per-socket", "signal", "propagate", "preserve-env",
    "slurmd-debug",
    "no-container-entrypoint", "no-container-mount-home", "container-mount-home",
    "container-name", "oversubscribe", "acctg-freq", "profile", "network", "constraint",
    "auto-resume",  # from HyperPod: trnslurm itself restarts the workers
})  # fmt: skip
_BINDS = ("cpu-bind", "accel-bind")
_CONTAINER = {"container-image": "image", "container-mounts": "mounts",
              "container-workdir": "workdir"}  # fmt: skip


class Tasks(Frozen):
    """How srun starts a command: the number of nodes and tasks, as its options say."""

    nodes: str = ""
    ntasks: str = ""
    ntasks_per_node: str = ""
    binds_gpus: bool = False
    """Whether each task sees its own GPUs only."""
    mpi: bool = False
    """Whether mpirun starts it instead of srun."""


class Srun(Frozen):
    """The options of an srun, and its command."""

    tasks: Tasks
    rest: tuple[str, ...]
    container: Mapping[str, str]
    """Keys of the section `container`."""
    environment: tuple[str, ...]
    """The NAME=VALUE pairs in --export."""
    lost: tuple[str, ...] = ()
    """Options that bind tasks, which the run does not apply."""


def read_srun(words: Sequence[str]) -> Srun:
    """Return the meaning of srun's options; reject any that change what runs where."""
    rest, found = [*words], dict[str, str]()
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")  # --cpu_bind is its older name
            needs = not equals and name not in _FLAGS
        else:
            name, value = _SHORT.get(word[1:2], word), word[2:]
            needs = not value and name not in _FLAGS
            if name in _FLAGS:  # more than one in a word: -lu
                found |= {_SHORT[letter]: "" for letter in value if letter in _SHORT}
                value = ""
        if needs and not rest:
            raise ConfigError(f"srun: {word} needs a value")
        found[name] = rest.pop(0) if needs else value
    if rest[:1] == ["--"]:
        del rest[0]
    export = found.pop("export", "ALL")
    named = [word for word in export.split(",") if word not in ("ALL", "")]
    if export.startswith(("NONE", "NIL")) or any("=" not in word for word in named):
        raise ConfigError(f"srun: --export={export} limits the environment of its tasks")
    odd = [name for name in found if name not in _SIZE | _OURS and name not in _CONTAINER]
    if odd:
        option = f"--{odd[0]}" + (f"={found[odd[0]]}" if found[odd[0]] else "")
        raise ConfigError(f"srun: {option} changes what runs where, which is not supported")
    if not rest:
        raise ConfigError("srun: no command is given")
    return Srun(
        tasks=Tasks(
            nodes=found.get("nodes", ""),
            ntasks=found.get("ntasks", ""),
            ntasks_per_node=found.get("ntasks-per-node", ""),
            binds_gpus="gpus-per-task" in found or found.get("gpu-bind", "none") != "none",
        ),
        rest=tuple(rest),
        container={key: found[name] for name, key in _CONTAINER.items() if name in found},
        environment=tuple(named),
        lost=tuple(f"--{name}={found[name]}" for name in _BINDS if _places(found.get(name, ""))),
    )


def _places(value: str) -> bool:
    """Check whether the value of --cpu-bind or --accel-bind does more than set what is printed."""
    return not {*value.split(",")} <= {"", "v", "verbose", "q", "quiet", "none", "no", "off"}


# https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html and MPICH's and Intel's mpiexec:
# options with the number of their values. All can begin with one dash or two.
_MPI_NUMBERS = {"np": "ntasks", "n": "ntasks", "c": "ntasks", "npernode": "ntasks-per-node",
                "N": "ntasks-per-node", "ppn": "ntasks-per-node"}  # fmt: skip
_MPI_OPTIONS = {
    "mca": 2, "genv": 2, "map-by": 1, "bind-to": 1, "rank-by": 1, "hostfile": 1, "host": 1, "H": 1,
    "machinefile": 1, "f": 1, "prefix": 1, "launcher": 1, "bootstrap": 1, "oversubscribe": 0,
    "allow-run-as-root": 0, "tag-output": 0, "report-bindings": 0, "display-map": 0, "bynode": 0,
    "bind-to-core": 0, "bind-to-none": 0, "nolocal": 0, "q": 0, "v": 0, "l": 0,
}  # fmt: skip


def read_mpirun(words: Sequence[str]) -> Srun:
    """Return the meaning of mpirun's options in terms of srun: one Slurm task for each process."""
    name, rest = Path(words[0]).name, [*words[1:]]
    found: dict[str, str] = {}
    environment: list[str] = []
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).lstrip("-").partition("=")
        many = 1 if option in _MPI_NUMBERS or option == "x" else _MPI_OPTIONS.get(option)
        if many is None or len(rest) < many - bool(equals):
            raise ConfigError(f"{name}: trnslurm does not know the option -{option}")
        values = [value] if equals else [rest.pop(0) for _ in range(many)]
        if option in _MPI_NUMBERS:
            found[_MPI_NUMBERS[option]] = values[0]
        elif option == "genv":
            environment.append("=".join(values))
        elif option == "x" and "=" in values[0]:  # without a value it is in the environment
            environment.append(values[0])
        elif option == "map-by" and (ppr := re.fullmatch(r"ppr:(\d+):node(:.*)?", values[0])):
            found["ntasks-per-node"] = ppr[1]
    if not rest:
        raise ConfigError(f"{name}: no command is given")
    tasks = Tasks(ntasks=found.get("ntasks", ""), mpi=True,
                  ntasks_per_node=found.get("ntasks-per-node", ""))  # fmt: skip
    return Srun(tasks=tasks, rest=tuple(rest), container={},
                environment=tuple(environment))  # fmt: skip
