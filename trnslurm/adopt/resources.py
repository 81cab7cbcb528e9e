"""Translates the sbatch options of a batch script into options of `trnslurm submit`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from trnslurm.adopt.variables import IF_GIVEN
from trnslurm.config.batch_script import BatchScript, Directive
from trnslurm.config.entry import as_name
from trnslurm.config.times import parse_size
from trnslurm.errors import ConfigError

_GPU_OPTIONS = frozenset({"gres", "gpus", "gpus-per-node", "gpus-per-task"})
_KEYS = frozenset({"partition", "account", "qos", "constraint", "reservation"})


class Option(NamedTuple):
    """The translation of one option."""

    words: tuple[str, ...]
    """Options of `trnslurm submit`."""
    instead: str
    """What trnslurm does instead."""
    clear: bool = True


class Resources:
    """The size of a batch script's job."""

    def __init__(self, script: BatchScript) -> None:
        self._script = script
        self._given = {d.name: d.value or "" for d in script.directives}
        tasks = _number(self._given.get("ntasks-per-node"))
        every = _number(self._given.get("ntasks")) or script.nodes
        self.tasks_per_node = tasks or -(-every // script.nodes)
        self.gpus = _gpus_of_node(self._given, script.nodes, self.tasks_per_node)
        """The GPUs of a node as in `--gpus`; empty if the script requests none, or not clearly."""
        self._whole = self._given.get("exclusive") == "" or self._given.get("mem") == "0"

    @property
    def numbers(self) -> dict[str, int]:
        """Return Slurm's numeric variables that the file's options determine."""
        nodes, tasks, given = self._script.nodes, self.tasks_per_node, self._given
        found = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
        if {"ntasks", "ntasks-per-node"} & given.keys():
            every = _number(given.get("ntasks")) or nodes * tasks
            found |= {"SLURM_NTASKS": every, "SLURM_NPROCS": every}
        if gpus := _number(self.gpus.rpartition(":")[2]):
            found["SLURM_GPUS_ON_NODE"] = gpus
        more = {name: _number(given.get(option)) for name, option in IF_GIVEN.items()}
        found |= {name: number for name, number in more.items() if number and name not in found}
        with suppress(ConfigError):
            if memory := parse_size(given.get("mem", "")):
                found["SLURM_MEM_PER_NODE"] = memory
        return found

    @property
    def texts(self) -> dict[str, str]:
        """Return Slurm's text variables that the file's options determine."""
        name = self._given.get("job-name") or self._script.file.name
        found = {"SLURM_JOB_NAME": name}
        for option in ("account", "partition", "qos", "reservation"):
            if (value := self._given.get(option)) and "," not in value:
                found[f"SLURM_JOB_{option.upper()}"] = value
        if each := _number(self._given.get("ntasks-per-node")):
            many = f"(x{self._script.nodes})" if self._script.nodes > 1 else ""
            found["SLURM_TASKS_PER_NODE"] = f"{each}{many}"
        if ":" in (typed := self._given.get("gpus-per-node", "")):
            found["SLURM_GPUS_PER_NODE"] = typed
        if tasks := self._script.tasks:
            found |= {"SLURM_ARRAY_TASK_COUNT": str(len(tasks)),
                      "SLURM_ARRAY_TASK_MIN": str(tasks[0]),
                      "SLURM_ARRAY_TASK_MAX": str(tasks[-1])}  # fmt: skip
            if len(tasks) == 1:
                found["SLURM_ARRAY_TASK_ID"] = str(tasks[0])
        return found

    def option(self, directive: Directive) -> Option:
        """Return the translation of an option."""
        name, value = directive.name, directive.value or ""
        replaced = dict(self._script.replaced)
        if directive.word in replaced:
            return Option((), replaced[directive.word] or "the run does this itself")
        if name == "dependency":
            return Option((), "to wait for a job, use --after JOB:ok, :any or :failed", clear=False)
        if name in ("propagate", "get-user-env"):
            return Option(
                (), "the job does not inherit this shell's environment or limits: use activate"
            )
        if name.startswith("container-") and name not in ("container-image", "container-mounts"):
            return Option((), "use the section container of a recipe or profile", clear=False)
        if name in ("ntasks", "ntasks-per-node"):
            return Option((), "the command sets the number of workers per node")
        if name == "signal":
            text = (
                "trnslurm does not pass signals to scripts: to stop before the time limit, call "
                "should_stop()"
            )
            return Option((), text, clear=False)
        if name == "array" and len(self._script.tasks) == 1:
            return Option((), "the array has a single task, so trnslurm submits one run")
        if name == "export" and value in ("ALL", "NONE"):
            return Option(
                (),
                "the job does not inherit this shell's environment: --env NAME copies a variable",
            )
        sizes = name != "gres-flags" and name.startswith(
            ("gpus", "gres", "cpus-per", "mem-per", "ntasks-per", "sockets")
        )
        words = self._words(directive)
        if sizes and words[0].startswith("--sbatch"):
            return Option((), "trnslurm does not have this option: use --gpus, --cpus and --mem, "
                              "which are per node",
                          clear=False)  # fmt: skip
        if name in ("chdir", "export"):
            return Option((), "the run has its own directory and variables", clear=False)
        return Option(words, "")

    def _words(self, directive: Directive) -> tuple[str, ...]:
        name, value = directive.name, directive.value or ""
        if name == "nodes":
            return ("--nodes", str(self._script.nodes))
        if name == "container-image":
            return ("--set", f"container.image={value}")
        if name == "container-mounts":
            return ("--set", f"container.mounts=[{value}]")
        if name == "time":
            return ("--time", value)
        if name == "job-name":
            return ("--name", as_name(value))
        if name in _KEYS:
            return ("--set", f"slurm.{name}={value}")
        if name in _GPU_OPTIONS and self.gpus:
            return self._gpus()
        if name == "cpus-per-task" and value.isdecimal():
            cpus = str(int(value) * self.tasks_per_node)
            return ("--set", f"slurm.cpus_per_task={cpus}") if self._whole else ("--cpus", cpus)
        if name == "cpus-per-gpu" and value.isdecimal() and self._gpu_count:
            cpus = str(int(value) * self._gpu_count)
            return ("--set", f"slurm.cpus_per_task={cpus}") if self._whole else ("--cpus", cpus)
        if name == "mem-per-gpu" and self._gpu_count:
            return ("--mem", f"{parse_size(value) * self._gpu_count}M")
        if name == "mem-per-cpu" and (each := _number(self._given.get("cpus-per-task"))):
            return ("--mem", f"{parse_size(value) * each * self.tasks_per_node}M")
        if name == "mem" and self._whole:
            return ("--set", f"slurm.mem_per_node_mib={parse_size(value)}")
        if name == "mem":
            return ("--mem", value)
        if name == "exclusive" and directive.value is None:
            return ("--set", "slurm.exclusive=true")
        if name in ("requeue", "no-requeue"):
            return ("--set", f"slurm.requeue={'true' if name == 'requeue' else 'false'}")
        if name == "array":
            most = self._script.at_most
            tasks = ("--sweep", f"places.task={','.join(map(str, self._script.tasks))}")
            return (*tasks, "--at-most", str(most)) if most else tasks
        return (f"--sbatch={directive.word}",)

    def _gpus(self) -> tuple[str, ...]:
        kind, _, number = self.gpus.rpartition(":")
        if not self._whole:
            return ("--gpus", self.gpus)
        words = ("--set", f"slurm.gpus_per_node={number}")
        return (*words, "--set", f"slurm.gpu_type={kind}") if kind else words

    @property
    def _gpu_count(self) -> int:
        return _number(self.gpus.rpartition(":")[2]) or 0

    @property
    def binds_gpus(self) -> bool:
        """Whether each srun task sees its own GPUs only."""
        shared = "allow-task-sharing" in self._given.get("gres-flags", "")
        each = "gpus-per-task" in self._given and not shared
        return each or self._given.get("gpu-bind", "none") != "none"

    @property
    def shares(self) -> tuple[str, ...]:
        """Return the option that lets other jobs use what this one does not request."""
        part = self.gpus or {"cpus-per-task", "mem"} & self._given.keys()
        return () if self._whole or part else ("--set", "slurm.exclusive=false")


def _gpus_of_node(given: Mapping[str, str], nodes: int, tasks: int) -> str:
    if found := re.fullmatch(r"gpu(?::([A-Za-z][\w.+-]*))?(?::(\d+))?", given.get("gres", "")):
        return (f"{found[1]}:" if found[1] else "") + (found[2] or "1")
    if re.fullmatch(r"([A-Za-z][\w.+-]*:)?\d+", each := given.get("gpus-per-node", "")):
        return each
    kind, _, number = given.get("gpus-per-task", "").rpartition(":")
    if each_task := _number(number):
        return (f"{kind}:" if kind else "") + str(each_task * tasks)
    kind, _, number = given.get("gpus", "").rpartition(":")
    every = _number(number)
    if not every or every % nodes:
        return ""
    return (f"{kind}:" if kind else "") + str(every // nodes)


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,9}", text) else None
