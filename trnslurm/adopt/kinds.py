"""The kinds of commands in a batch script.

Some only print something, some start training, some are needed only once, and some belong to the
rendezvous.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from contextlib import suppress
from warnings import catch_warnings, simplefilter

from trnslurm.adopt.shell import Block, Command, Compound, statements

SAYS = frozenset({
    ":", "[", "[[", "cat", "clear", "command", "date", "df", "du", "echo", "exit", "false", "free",
    "groups", "hash", "head", "hostname", "ibstat", "id", "ifconfig", "ip", "ldconfig", "ls",
    "lscpu", "nvcc", "nvidia-smi", "printenv", "printf", "pwd", "rocm-smi", "sacct", "scontrol",
    "set", "shopt", "sinfo", "sleep", "sort", "squeue", "sstat", "tail", "tee", "test", "true",
    "type", "uname", "uptime", "wait", "which", "whoami",
})  # fmt: skip
DECLARES = frozenset({"declare", "local", "readonly", "typeset"})
READS = frozenset({"read", "mapfile", "readarray"})
SETTING = (
    DECLARES | READS | {"((", ".", "eval", "export", "getopts", "let", "printf", "source", "unset"}
)
"""Commands that can set variables in the shell that runs them."""
FILTERS = frozenset({"awk", "column", "cut", "grep", "egrep", "sed", "tr", "uniq", "wc", "xargs"})
ENDS = frozenset({"deactivate", "popd"})
# Commands that are needed only once, before there is a run.
ONCE = re.compile(
    r"(\S*python\S* -m )?pip3? (install|uninstall)|(conda|mamba|micromamba) (install|create|env)"
    r"|uv (sync|pip|venv)|poetry install|git (clone|pull|checkout|submodule)|wget|curl"
    r"|(huggingface-cli|hf) (login|download)|wandb (login|offline|online)|gdown|mkdir|chmod"
)
FOR_RANKS = re.compile(
    r"(MAIN|MASTER|HEAD)\w*|\w*RANK|\w*WORLD_SIZE|N(UM)?_?(NODES|PROCS|PROCESSES|GPUS)"
    r"|N?PROC_PER_NODE|NPROC_PER_NODE|(N_?)?GPUS_PER_NODE|\w*(NODE|HOST)(S|_?LIST|FILE)"
    r"|\w*_?PORT|RDZV_\w+|(SLURM_)?JOB_?ID|\w*NODE_RANK|NNODES|\w*NODE_?IP|\w*IPADDR\w*|RDMA\w*",
    re.IGNORECASE,
)
OF_RANKS = re.compile(
    r"scontrol|SLURM_(JOB_)?(STEP_)?NODELIST|SLURMD_NODENAME|SLURM_(NODEID|PROCID|LOCALID)|hostname"
    r"|MASTER_|getent|ifconfig|RANDOM|nvidia-smi"
)
PYTHON = re.compile(r"python(\d(\.\d+)?)?")
MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun"})
# These find a Python interpreter themselves, or provide the one of CSC's modules.
IN_CONTAINERS = frozenset({"singularity_wrapper", "apptainer_wrapper"})
CONTAINERS = frozenset({
    "charliecloud", "ch-run", "docker", "enroot", "podman", "podman-hpc", "sarus", "shifter",
})  # fmt: skip
STARTS = frozenset({
    *MPI, *IN_CONTAINERS, *CONTAINERS, "numactl",
    "torchrun", "accelerate", "deepspeed", "composer", "fabric", "srun", "singularity", "apptainer",
    "trl", "axolotl", "litgpt", "llamafactory-cli", "oumi", "uv", "poetry", "pixi", "bash", "sh",
    "exec", "time", "nohup", "env", "stdbuf",
})  # fmt: skip
STARTING = re.compile(r"\b(srun|mpirun|torchrun|python\d?|accelerate|deepspeed|bash|sh|sbatch)\b")


def prints(words: Sequence[str]) -> bool:
    """Check for plain `env`, and for a `python -c` that only imports and prints."""
    if words == ["env"]:
        return True
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


def only_once(whole: Compound) -> bool:
    """Check whether the branches of a condition only print, or do one-time work."""
    return all(
        isinstance(s, Command) and not s.assignments
        and (ONCE.match(s.raw) or (s.head in SAYS and not s.redirections and s.head != "exit"))
        for branch in whole.branches for s in branch.body
    )  # fmt: skip


def only_says(block: Block) -> bool:
    """Check whether a block contains only commands that print or check."""
    raw = re.sub(r"(?<![\w./-])(for \w+ in [^;\n]*|while)(?![\w./-])", ";", block.raw)
    raw = re.sub(r"(?<![\w./-])(if|then|else|elif|fi|do|done)(?![\w./-])", ";", raw)
    return all(
        isinstance(s, Command) and s.head in SAYS and not s.redirections and not s.assignments
        for s in statements(raw)
    )
