"""sandbox: a real Slurm cluster on this machine, for trying out jobs, templates and faults."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from trnslurm.cli.options import Command, json_option
from trnslurm.cli.output import Terminal, echo_json, echo_table
from trnslurm.config.catalog import catalog
from trnslurm.contract.variables import Variable
from trnslurm.errors import SandboxError
from trnslurm.runs.tables import count
from trnslurm.sandbox.control import look
from trnslurm.sandbox.faults import NODE_ACTIONS, OTHER_FAULTS, inject
from trnslurm.sandbox.layout import DEFAULT_NAME, Layout, all_layouts
from trnslurm.sandbox.lifecycle import down, up
from trnslurm.sandbox.namespaces import commands, enter, environment, holder_pid, login_environment
from trnslurm.sandbox.rehearsal import Rehearsal
from trnslurm.sandbox.settings import SandboxSettings, settings_of


def _names(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    return [CompletionItem(x.name) for x in all_layouts() if x.name.startswith(word)]


def _users(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    try:
        names = settings_of(Layout.named(ctx.params.get("name") or DEFAULT_NAME)).user_names
    except SandboxError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(word)]


def _types(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in catalog() if name.startswith(word)]


def _name_option(command: Command) -> Command:
    return click.option(
        "--name",
        metavar="NAME",
        envvar=Variable.SANDBOX,
        default=DEFAULT_NAME,
        shell_complete=_names,
        help="Name of the sandbox.",
    )(command)


@click.group("sandbox")
def sandbox_command() -> None:
    """Run a real Slurm cluster on this machine.

    It has one slurmctld and one slurmd per node. Each node has its own network, host name and
    processes. The sandbox does not need root and leaves nothing behind.

    \b
    Example:
      trnslurm sandbox up --nodes 4
      eval "$(trnslurm sandbox env)"
      trnslurm submit gpt2_zero1 --nodes 2 --follow
      trnslurm sandbox down
    """


@sandbox_command.command("up")
@_name_option
@click.option(
    "-n",
    "--nodes",
    type=int,
    default=None,
    help="Number of nodes; with --like FILE, of each kind  [default: 4; with FILE, all, up to 16].",
)
@click.option(
    "--like",
    metavar="TYPE|FILE",
    default="trn1.32xlarge",
    shell_complete=_types,
    help="Instance type that the nodes claim to be, or a file from `cluster detect --dump` or "
    "ParallelCluster.",
)
@click.option("--accounting", is_flag=True, help="Also run slurmdbd and its database.")
@click.option(
    "--set",
    multiple=True,
    metavar="KEY=VALUE",
    help=(
        "Set a line of slurm.conf, or a value in its node lines, as in --set KillWait=5 --set "
        "CPUs=8."
    ),
)
@click.option(
    "--neuron-stand-ins",
    is_flag=True,
    help=(
        "Install stand-ins for neuron-ls, neuron-monitor and neuron_parallel_compile on the nodes."
    ),
)
@click.option(
    "--slurm",
    metavar="DIR",
    envvar=Variable.SANDBOX_SLURM,
    help="Run the Slurm in PREFIX/bin and PREFIX/sbin  [default: the Slurm whose srun is on PATH].",
)
@click.option(
    "--users",
    type=int,
    default=0,
    show_default=False,
    metavar="N",
    help="Add N users (alice, bob, …) for `exec --user`. Needs root.",
)
@click.option(
    "--python", metavar="FILE", help="Python interpreter for the jobs  [default: this one]."
)
@click.option("--owner", type=int, metavar="PID", help="End the sandbox when this process ends.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing on success.")
def up_command_line(
    name: str,
    slurm: str | None,
    python: str | None,
    owner: int | None,
    quiet: bool,
    like: str,
    nodes: int | None,
    **options: Any,
) -> None:
    """Start a sandbox, unless it is already up.

    It resembles AWS ParallelCluster in its node names, features and settings, and has no
    accounting. With a file, it has the nodes, partitions, limits, accounts and QOS of the cluster
    that the file describes.

    \b
    Example:
      trnslurm sandbox up --nodes 4
      trnslurm sandbox up --name drill --set KillWait=5 --set MinJobAge=10 --accounting
      trnslurm sandbox up --name gpu --like p4d.24xlarge --nodes 2
      trnslurm sandbox up --slurm /opt/slurm-25.11
      trnslurm sandbox up --name two --users 2
      trnslurm sandbox up --name lab --like ./lab.json
    """
    layout = Layout.named(name)
    options |= {"like": like, "nodes": 4 if nodes is None else nodes}
    if "/" in like or like.endswith((".json", ".yaml", ".yml")):
        rehearsal = Rehearsal.of(Path(like), nodes)
        options |= {"nodes": len(rehearsal.names), "seen": rehearsal.seen.tree()}
        options["accounting"] |= rehearsal.has_accounting
    own_slurm = str(Path(slurm).absolute()) if slurm else ""
    settings = SandboxSettings(python=_interpreter(python), slurm=own_slurm, **options)
    started = time.monotonic()

    def say(line: str) -> None:
        if not quiet:
            click.echo(f"  {line}", err=True)

    fresh = up(layout, settings, owner=owner, say=say)
    if quiet:
        return
    took = f" after {time.monotonic() - started:.1f} s" if fresh else " already"
    named = "" if name == DEFAULT_NAME else f" --name {name}"
    click.echo(f"Sandbox {name} is up{took}: {count(settings.nodes, 'node')} like {settings.like}")
    click.echo(f'Its commands: eval "$(trnslurm sandbox env{named})"')
    click.echo(f"Its cluster profile: --cluster {layout.cluster}")
    if settings.user_names:
        names = ", ".join(settings.user_names)
        click.echo(f"Its users: {names}: trnslurm sandbox exec{named} --user alice -- bash")


@sandbox_command.command("down")
@_name_option
@click.option("--all", "every", is_flag=True, help="End all your sandboxes on this machine.")
def down_command(name: str, every: bool) -> None:
    """End a sandbox and everything that runs in it, and remove its files.

    \b
    Example:
      trnslurm sandbox down
      trnslurm sandbox down --all
    """
    layouts = all_layouts() if every else [Layout.named(name)]
    for layout in layouts:
        found = down(layout)
        click.echo(f"Sandbox {layout.name} is down" if found else f"No sandbox {layout.name}")


@sandbox_command.command("list")
@json_option
def list_command(console: Terminal) -> None:
    """List your sandboxes on this machine.

    \b
    Example:
      trnslurm sandbox list
    """
    rows = [_row(layout) for layout in all_layouts()]
    if console.as_json:
        echo_json(rows)
    elif rows:
        header = ("name", "cluster", "state", "nodes", "like")
        echo_table(header, [tuple(str(v) for v in row.values()) for row in rows], right="nodes")
    else:
        click.echo("No sandboxes. To start one: trnslurm sandbox up", err=True)


def _row(layout: Layout) -> dict[str, Any]:
    state = "up" if layout.is_up() else "starting" if layout.is_held() else "crashed"
    try:
        settings = settings_of(layout)
        nodes, like = settings.nodes, settings.like
    except SandboxError:
        nodes, like = 0, "?"
    return {
        "name": layout.name,
        "cluster": layout.cluster,
        "state": state,
        "nodes": nodes,
        "like": like,
    }


@sandbox_command.command("status")
@_name_option
@json_option
def status_command(name: str, console: Terminal) -> None:
    """Show a sandbox's daemons and nodes.

    \b
    Example:
      trnslurm sandbox status
    """
    state = look(Layout.named(name))
    if console.as_json:
        echo_json(state)
        return
    _print_state(state)


def _print_state(state: dict[str, Any]) -> None:
    nodes = f"{count(len(state['nodes']), 'node')} like {state['like']}"
    click.echo(
        f"{state['name']}: cluster {state['cluster']}, {nodes}, Slurm {state['slurm']}; "
        f"running: {', '.join(state['daemons'])}\n"
    )
    header = ("node", "name", "address", "power", "state", "reason")
    echo_table(header, [tuple(map(str, n.values())) for n in state["nodes"]], right="node")
    if state["controller"]:
        click.echo(f"\n{state['controller']}", err=True)


@sandbox_command.command("env")
@_name_option
@click.option("--unset", is_flag=True, help="Print lines that undo this.")
def env_command_line(name: str, unset: bool) -> None:
    """Print shell lines that put the sandbox's Slurm commands on PATH.

    They also make the sandbox the default of `trnslurm submit` and of these commands.

    \b
    Example:
      eval "$(trnslurm sandbox env)"
      trnslurm sandbox env                     the lines that are evaluated
      trnslurm sandbox env --unset
    """
    layout = Layout.named(name)
    ours = {str(layout.bin), *(str(other.bin) for other in all_layouts())}
    words = [w for w in os.environ.get("PATH", "").split(":") if w not in ours]
    if unset:
        click.echo(f"export PATH={shlex.quote(':'.join(words))}")
        click.echo(f"unset {Variable.SANDBOX} TRNSLURM_CLUSTER")
        return
    holder_pid(layout)  # fails if the sandbox is not up
    click.echo(f"export PATH={shlex.quote(':'.join([str(layout.bin), *words]))}")
    click.echo(f"export {Variable.SANDBOX}={layout.name} TRNSLURM_CLUSTER={layout.cluster}")


@sandbox_command.command("exec")
@_name_option
@click.option("--node", metavar="NODE", help="Node number or name  [default: the head node].")
@click.option(
    "--user",
    metavar="USER",
    shell_complete=_users,
    help="Run as this user of the sandbox (see up --users)  [default: you].",
)
@click.argument("command", nargs=-1, required=True)
def exec_command_line(
    name: str, node: str | None, user: str | None, command: tuple[str, ...]
) -> None:
    """Run a command in a sandbox, on the head node or on another node.

    --user starts the command in that user's home directory, with a login environment.

    \b
    Example:
      trnslurm sandbox exec -- squeue
      trnslurm sandbox exec --node 2 -- ps aux
      trnslurm sandbox exec --user alice -- trnslurm submit gpt2_zero1 --nodes 2
    """
    layout = Layout.named(name)
    settings = _settings(layout)
    number = None if node is None else settings.node_number(node)
    argv = enter(layout, command, node=number, user=user and settings.check_user(user))
    sys.stdout.flush()
    if user is not None:
        os.execvpe(argv[0], argv, login_environment(layout, user, settings.python))
    os.environ.update(environment(layout))
    os.environ["PATH"] = f"{commands(layout)}:{os.environ.get('PATH', '')}"
    os.environ |= {Variable.SANDBOX: layout.name, Variable.CLUSTER: layout.cluster}
    os.execvp(argv[0], argv)


@sandbox_command.command("fault")
@_name_option
@click.argument("fault", nargs=-1, required=True)
def fault_command(name: str, fault: tuple[str, ...]) -> None:
    click.echo(inject(Layout.named(name), fault))


_FORMS = {f"NODE {action}": text for action, text in NODE_ACTIONS.items()} | dict(OTHER_FAULTS)
fault_command.help = (
    "Inject a fault into a sandbox, or remove it. NODE is a number or a name.\n\n\b\n"
    + "\n".join(f"  {form:<31} {text}" for form, text in _FORMS.items())
    + "\n\n\b\nExample:\n"
    + "  trnslurm sandbox fault 2 freeze\n"
    + "  trnslurm sandbox fault ctld kill\n"
    + "  trnslurm sandbox fault proc 1 python.-u.*train KILL\n"
)


def _settings(layout: Layout) -> SandboxSettings:
    holder_pid(layout)
    return settings_of(layout)


def _interpreter(given: str | None) -> str:
    """Return the jobs' Python interpreter, and warn if it does not have torch."""
    if given is None:
        if importlib.util.find_spec("torch") is None:
            click.echo(
                f"note: {sys.executable} does not have torch, which jobs need: install the "
                "[train] extra there, or pass --python",
                err=True,
            )
        return sys.executable
    path = Path(given).absolute()
    if not os.access(path, os.X_OK) or path.is_dir():
        raise SandboxError(f"--python {given}: program not found")
    return str(path)
