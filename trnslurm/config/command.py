"""The command of a custom job: what it starts, how often, and which options trnslurm replaces.

    torchrun --nnodes=2 --rdzv_endpoint=$HOST:29500 -m torchtitan.train --job.config_file a.toml

trnslurm sets the nodes, their ranks and the rendezvous address, so options for these are dropped,
and the user is told which. Options that only a launcher understands keep that launcher.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from trnslurm.config.console import starts_of
from trnslurm.config.entry import Entry
from trnslurm.config.plugins import Plugin, find_plugin
from trnslurm.config.script import OWN_LAUNCHER, Launcher
from trnslurm.config.tasks import read_mpirun, read_srun
from trnslurm.contract.files import read_file
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen

Per = Literal["worker", "node", "job"]
"""How often a command is started."""


class Command(Frozen):
    """A command that a user gave in place of a recipe."""

    recipe: str
    """The text that stands for a recipe: a script's path, `-m MODULE` or `-- PROGRAM`."""
    arguments: tuple[str, ...]
    launcher: Launcher
    launcher_arguments: tuple[str, ...] = ()
    nodes: int | None = None
    """The number of nodes that the command itself requests."""
    workers: int | None = None
    """The number of workers per node that the command itself requests."""
    world: int | None = None
    """The number of workers on all nodes that the command itself requests."""
    left_out: tuple[str, ...] = ()
    """The options that trnslurm replaces and drops."""
    read_as: str = ""
    """The command a plug-in substituted, and the plug-in; empty for the user's own command."""

    why: str = ""
    """Why it is started that often, as a message to the user; empty if that is obvious."""

    def workers_on(self, nodes: int) -> int | None:
        """Return the number of workers per node on this many nodes."""
        if self.workers is None and self.world and self.world % nodes == 0:
            return self.world // nodes
        return self.workers


Rewrite = Callable[[Sequence[str]], Sequence[str]]
"""Returns the command to use instead of these words, the first of which is the program's name.
Unchanged words mean that there is nothing to replace. This is the object of a launcher plug-in."""


class _Options(Frozen):
    """A launcher's options, spelled with `_`. Options not listed here take a value and are kept."""

    launcher: Launcher
    flags: frozenset[str]
    """Options without a value."""
    ours: frozenset[str]
    """Options that trnslurm sets."""
    module: frozenset[str] = frozenset({"--module"})
    no_python: frozenset[str] = frozenset({"--no_python"})
    nodes: str = ""
    workers: str = ""
    world: str = ""
    """The option with the total number of workers."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# torch/distributed/run.py, get_args_parser
_TORCHRUN = _Options(
    launcher="torchrun",
    flags=_names("--standalone -m --module --no_python --run_path"),
    ours=_names(
        "--nnodes --nproc_per_node --node_rank --master_addr --master_port --local_addr "
        "--standalone --rdzv_backend --rdzv_endpoint --rdzv_id --rdzv_conf --max_restarts "
        "--monitor_interval --start_method"
    ),
    module=frozenset({"-m", "--module"}),
    nodes="--nnodes",
    workers="--nproc_per_node",
)
# torch/distributed/launch.py. By default it passes each script its local rank.
_LAUNCH = replace(
    _TORCHRUN,
    flags=_TORCHRUN.flags | {"--use_env"},
    ours=_TORCHRUN.ours | {"--use_env"},
)
# accelerate/commands/launch.py, launch_command_parser
_ACCELERATE = _Options(
    launcher="accelerate",
    flags=_names(
        "-q --quiet --cpu --multi_gpu --tpu --enable_cpu_affinity --dynamo_use_fullgraph "
        "--dynamo_use_dynamic --dynamo_use_regional_compilation --use_deepspeed --use_fsdp "
        "--use_parallelism_config --use_megatron_lm --same_network -m --module --no_python "
        "--tpu_cluster --no_tpu_cluster --tpu_use_sudo --downcast_bf16 --debug "
        "--fp8_use_autocast_during_eval"
    ),
    ours=_names(
        "--num_processes --num_machines --machine_rank --main_process_ip --main_process_port "
        "--same_network --rdzv_backend --rdzv_conf --max_restarts --monitor_interval --gpu_ids "
        "--deepspeed_hostfile --deepspeed_exclusion_filter --deepspeed_inclusion_filter "
        "--deepspeed_multinode_launcher --mpirun_hostfile"
    ),
    module=frozenset({"-m", "--module"}),
    nodes="--num_machines",
    world="--num_processes",
)
# deepspeed/launcher/runner.py, parse_args. Its options for one node are those of launch.py.
_DEEPSPEED = _Options(
    launcher="deepspeed",
    flags=_names(
        "--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid "
        "--bind_cores_to_rank -q --quiet"
    ),
    ours=_names(
        "-H --hostfile -i --include -e --exclude --num_nodes --num_gpus --master_port "
        "--master_addr --node_rank --launcher --launcher_args --no_ssh --no_ssh_check "
        "--force_multi --ssh_port --venv_script"
    ),
    nodes="--num_nodes",
    workers="--num_gpus",
)
# https://github.com/mosaicml/composer/blob/main/composer/cli/launcher.py: its workers have nothing
# but ranks.
_COMPOSER = _Options(
    launcher=OWN_LAUNCHER,
    flags=_names("-v --verbose -m --module_mode -c --command_mode"),
    ours=_names(
        "-n --nproc --world_size --base_rank --node_rank --master_addr --master_port --stdout "
        "--stderr -v --verbose"
    ),
    module=frozenset({"-m", "--module_mode"}),
    no_python=frozenset({"-c", "--command_mode"}),
    workers="-n",
    world="--world_size",
)
# lightning/fabric/cli.py. It starts torchrun on each node, and its workers compare the numbers.
_FABRIC = {
    "--num_nodes": "{nodes}",
    "--devices": "{workers_per_node}",
    "--node_rank": "{node}",
    "--main_address": "{master_addr}",
    "--main_port": "{master_port}",
}
_HEADS = {
    "composer": _COMPOSER,
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _LAUNCH,
    "accelerate": _ACCELERATE,
    "accelerate.commands.launch": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
}
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
# These commands start accelerate on this node only, with one of their modules:
# https://github.com/huggingface/trl/blob/main/trl/cli.py,
# https://github.com/axolotl-ai-cloud/axolotl/blob/main/src/axolotl/cli/main.py
_MODULES = {
    ("trl", "sft"): "trl.scripts.sft",
    ("trl", "dpo"): "trl.scripts.dpo",
    ("trl", "grpo"): "trl.scripts.grpo",
    ("trl", "kto"): "trl.scripts.kto",
    ("trl", "reward"): "trl.scripts.reward",
    ("trl", "rloo"): "trl.scripts.rloo",
    ("axolotl", "train"): "axolotl.cli.train",
}
_START_TASKS = frozenset({"srun", "mpirun", "mpiexec"})
# These find a Python on this machine, but the nodes use the profile's.
_FIND_PYTHON = frozenset({"uv", "poetry", "pdm", "pixi", "rye"})


def _as_module(words: Sequence[str]) -> Sequence[str]:
    name, *rest = words
    module = _MODULES.get((Path(name).name, rest[0])) if rest else None
    return ["python", "-m", module, *rest[1:]] if module else words


_REWRITES: Mapping[str, Rewrite] = {name: _as_module for name, _ in _MODULES}
HEADS = (*_HEADS, *_FIND_PYTHON, *_START_TASKS, *_REWRITES)
"""Names that a plug-in cannot use. Variants of python are reserved too."""


def read_command(words: Sequence[str], *, by_plugins: bool = True) -> Command:
    """Return a command in trnslurm's terms, or raise an error that says what to type instead."""
    head, rest = words[0], [*words[1:]]
    name = Path(head).name
    if not name:
        raise ConfigError(
            "the word after -- is empty: pass a command there, such as -- torchrun x.py"
        )
    if name in _FIND_PYTHON and rest[:1] == ["run"] and rest[1:] and not rest[1].startswith("-"):
        found = read_command(rest[1:])
        return replace(found, left_out=(f"{name} run", *found.left_out))
    if re.match(r"[A-Za-z_]\w*=", head):
        raise ConfigError(f"{head} sets a variable: use --set {shlex.quote(f'env.{head}')}")
    if name in _START_TASKS:
        return _by_tasks(name, words)
    if name == "accelerate":
        if rest[:1] != ["launch"]:
            raise ConfigError(
                "only `accelerate launch` starts a training job: use -- accelerate launch …"
            )
        return _launched(_ACCELERATE, "accelerate launch", rest[1:])
    if name == "fabric" and rest[:1] == ["run"]:
        return _by_fabric(head, rest[1:])
    if name in _HEADS:
        return _launched(_HEADS[name], name, rest)
    if _PYTHON.fullmatch(name):
        return _by_python(name, rest)
    if (rewrite := _REWRITES.get(name)) and (again := rewrite(words)) != words:
        return read_command(again)
    # Searching for plug-ins is the slowest step here. Files and paths cannot be plug-ins.
    may_be = by_plugins and "/" not in head and name not in _REWRITES and not Path(head).is_file()
    if may_be and (plugin := find_plugin("launcher", head)):
        return _by_plugin(plugin, words)
    found = _of(entry := _entry_of(head), rest)
    if not entry.is_program or not (starts := starts_of(head)):
        return found
    launcher = OWN_LAUNCHER if starts.per == "worker" else found.launcher
    return replace(found, launcher=launcher, why=starts.why)


def _by_plugin(plugin: Plugin, words: Sequence[str]) -> Command:
    """Return the command that a plug-in substitutes. No other plug-in processes it."""
    rewrite = plugin.load()
    with plugin.blamed():
        again = rewrite([*words])
        if isinstance(again, str) or not (again := [*again]):
            raise TypeError(f"expected a list of words, not {again!r}")
        if any(not isinstance(word, str) for word in again):
            raise TypeError(f"expected words, not {again!r}")
        found = read_command(again, by_plugins=False)
    return found if again == [*words] else replace(found, read_as=f"{shlex.join(again)} ({plugin})")


def launcher_for(recipe: str, per: Per) -> Launcher:
    """Return the launcher that starts a custom job once per worker, per node or per job."""
    entry = Entry(recipe)
    if per == "worker":
        return OWN_LAUNCHER
    if per == "job":
        return "job"
    return "python" if entry.is_python else "script"


def _by_python(name: str, words: Sequence[str]) -> Command:
    """Return the command of a Python interpreter. On the nodes their own interpreter runs it."""
    rest = [*words]
    while rest[:1] == ["-u"]:  # workers are unbuffered anyway
        del rest[0]
    if rest[:1] == ["-m"] and len(rest) > 1:
        module = rest[1]
        if module in _HEADS:
            return _launched(_HEADS[module], f"{name} -m {module}", rest[2:])
        return _of(Entry.module(module), rest[2:])
    if not rest or rest[0].startswith("-"):
        option = f"option {rest[0]}" if rest else "interactive shell"
        raise ConfigError(f"{name}: trnslurm can start a script or -m MODULE, but not its {option}")
    return _of(_entry_of(rest[0], python=True), rest[1:])


def _launched(options: _Options, name: str, words: Sequence[str]) -> Command:
    """Return the command that a launcher starts."""
    rest, kept, ours = [*words], [], []
    numbers: dict[str, int] = {}
    module = program = False
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        known = option[:2] + option[2:].replace("-", "_")
        given = [f"{option}{equals}{value}"]
        if known not in options.flags and not equals:
            if not rest:
                raise ConfigError(f"{name}: {option} needs a value")
            value = rest.pop(0)
            given.append(value)
        if known in options.module:
            module = True
        elif known in options.no_python:
            program = True
        elif known in options.ours:
            ours.append(shlex.join(given))
            if value.isdecimal():
                numbers[known] = int(value)
        else:
            kept += given
    if not rest:
        raise ConfigError(f"{name}: no script is given. Use {name} … SCRIPT ARGUMENTS")
    entry = Entry.module(rest[0]) if module else _entry_of(rest[0], python=not program)
    if options is _LAUNCH and not any("use" in word and "env" in word for word in ours):
        rest.insert(1, f"{_local_rank_option(Path(rest[0]))}={{local_rank}}")
    nodes, workers = numbers.get(options.nodes), numbers.get(options.workers)
    world = numbers.get(options.world)
    if world and workers and world % workers == 0:
        nodes = world // workers
    return Command(
        recipe=entry.text,
        arguments=tuple(rest[1:]),
        # accelerate and DeepSpeed set more than ranks for their workers.
        launcher=OWN_LAUNCHER if options in (_TORCHRUN, _LAUNCH) and not kept else options.launcher,
        launcher_arguments=tuple(kept),
        nodes=nodes,
        workers=workers,
        world=world,
        left_out=tuple(ours),
    )


def _by_tasks(name: str, words: Sequence[str]) -> Command:
    """Return the command that srun or mpirun starts, as one Slurm task per worker.

    A launcher that starts a node's workers runs once per node, with or without srun.
    """
    tasks = read_srun(words[1:]) if name == "srun" else read_mpirun(words)
    keys = [f"container.{key}={value}" for key, value in tasks.container.items()]
    for key in (*keys, *(f"env.{text}" for text in tasks.environment)):
        raise ConfigError(f"{name}: use --set {shlex.quote(key)} instead of its option")
    found = read_command(tasks.rest)
    given = shlex.join(words[: len(words) - len(tasks.rest)])
    found = replace(found, left_out=(given, *found.left_out))
    if found.launcher not in (OWN_LAUNCHER, "script") or _starts_workers(tasks.rest):
        return found
    numbers = (tasks.tasks.nodes, tasks.tasks.ntasks_per_node, tasks.tasks.ntasks)
    nodes, workers, world = (int(text) if text.isdecimal() else None for text in numbers)
    return replace(found, launcher="srun", nodes=nodes, workers=workers, world=world)


def _starts_workers(words: Sequence[str]) -> bool:
    """Check whether a command is a launcher that starts a node's workers."""
    module = words[2:3] if _PYTHON.fullmatch(Path(words[0]).name) and words[1:2] == ["-m"] else ()
    return any(name in _HEADS or name == "fabric" for name in (Path(words[0]).name, *module))


def _by_fabric(head: str, words: Sequence[str]) -> Command:
    """Return the command that starts Lightning's launcher on each node."""
    rest, kept = [*words], []
    ours: dict[str, str] = {}
    given: list[str] = []
    while rest and rest[0] != "--":  # its options may also follow the script
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if (known := option.replace("-", "_").replace("__", "--", 1)) not in _FABRIC:
            kept.append(word)
            continue
        if not equals and not rest:
            raise ConfigError(f"fabric run: {option} needs a value")
        ours[known] = value if equals else rest.pop(0)
        given.append(shlex.join([word] if equals else [option, ours[known]]))
    numbers = {option: int(value) for option, value in ours.items() if value.isdecimal()}
    places = [f"{option}={place}" for option, place in _FABRIC.items()]
    return Command(
        recipe=Entry.program(head).text,
        arguments=("run", *places, *kept, *rest),
        launcher="script",
        nodes=numbers.get("--num_nodes"),
        workers=numbers.get("--devices"),
        left_out=tuple(given),
    )


def _local_rank_option(script: Path) -> str:
    """Return the option that the script accepts. Before PyTorch 2.0 it had an underscore."""
    try:
        text = read_file(script)
    except OSError:
        return "--local-rank"
    only_older = b"--local_rank" in text and b"--local-rank" not in text
    return "--local_rank" if only_older else "--local-rank"


def _of(entry: Entry, arguments: Sequence[str]) -> Command:
    launcher: Launcher = OWN_LAUNCHER if entry.is_python else "script"
    return Command(recipe=entry.text, arguments=tuple(arguments), launcher=launcher)


def _entry_of(word: str, *, python: bool = False) -> Entry:
    """Return the entry of a file in this directory, or of a program on the nodes."""
    file = Path(word)
    if python or file.suffix == ".py" or (file.is_file() and not file.is_absolute()):
        return Entry(word if "/" in word else f"./{word}")
    return Entry.program(word)
