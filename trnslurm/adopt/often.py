"""How often a batch script starts its command: once, on each node, or in each task."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trnslurm.adopt.resources import Resources
from trnslurm.adopt.texts import UnclearError
from trnslurm.config.command import read_command
from trnslurm.config.tasks import Tasks

# Launchers of a node's workers. More than one on a node would start too many workers.
OF_A_NODE = frozenset({"torchrun", "accelerate", "deepspeed", "composer", "fabric"})
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "accelerate.commands.launch",
)


def how_often(
    words: Sequence[str],
    tasks: Tasks | None,
    *,
    nodes: int,
    resources: Resources,
    reads_ranks: bool,
) -> list[str]:
    """Return the options that start a command as often as the script does."""
    name = Path(words[0]).name
    found = read_command(words)
    of_a_node = name in OF_A_NODE or any(m in words[1:4] for m in _MODULES)
    of_a_node |= any(word in OF_A_NODE for word in words[1:3] if found.left_out)
    if tasks is None:
        by_ssh = any("hostfile" in option for option in found.left_out)
        if nodes > 1 and not (name == "deepspeed" and by_ssh):
            raise UnclearError("without srun it runs only on the first node")
        return [] if of_a_node else ["--per", "node"]
    if tasks.nodes not in ("", str(nodes)):
        raise UnclearError(f"srun --nodes={tasks.nodes} runs on only some of the nodes")
    each = _tasks_of_a_node(tasks, nodes, resources)
    if of_a_node and each > 1:
        raise UnclearError(f"{each} tasks on a node would start {name} {each} times")
    if of_a_node and nodes > 1 and not re.search(r"nnodes|machines|config_file", " ".join(words)):
        raise UnclearError(
            "it does not set the number of nodes, so each node would train its own copy"
        )
    if of_a_node:
        return []
    if each > 1 and (tasks.binds_gpus or resources.binds_gpus):
        raise UnclearError(
            "each task would see one GPU, but trnslurm's workers see all GPUs of a node"
        )
    by_srun = each > 1 or reads_ranks or tasks.mpi
    return ["--launcher", "srun", "--workers", str(each)] if by_srun else ["--per", "node"]


def _tasks_of_a_node(tasks: Tasks, nodes: int, resources: Resources) -> int:
    if tasks.ntasks_per_node:
        if not tasks.ntasks_per_node.isdecimal():
            raise UnclearError("the number of tasks per node is unknown here")
        return int(tasks.ntasks_per_node)
    if tasks.ntasks:
        if not tasks.ntasks.isdecimal() or int(tasks.ntasks) % nodes:
            raise UnclearError("the number of tasks per node is unknown here")
        return int(tasks.ntasks) // nodes
    return resources.tasks_per_node
