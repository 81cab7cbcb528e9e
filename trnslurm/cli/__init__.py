"""The command line. A command's module is imported only when that command is used."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.shell_completion import CompletionItem

from trnslurm import __version__
from trnslurm.errors import TrnslurmError, did_you_mean

if TYPE_CHECKING:
    from trnslurm.remote.place import Site

# Command -> its module and description, in the order of the help text. Listing or completing
# commands imports none of the modules.
_COMMANDS = {
    "recipes": ("plan", "List the recipes: the training jobs that can be submitted."),
    "show": ("plan", "Show the resolved configuration and where each value comes from."),
    "plan": ("plan", "Show the batch plan, hours and cost for each node count."),
    "render": ("render", "Print the scripts, or write them to a directory."),
    "submit": ("submit", "Submit a job: precompile if needed, then train."),
    "new": ("new", "Write a recipe for a custom script: jobs/NAME/recipe.yaml."),
    "adopt": ("adopt", "Translate a batch script into trnslurm's terms, line by line."),
    "data": ("data", "Fetch and prepare training data."),
    "runs": ("runs", "List runs, or the runs of one sweep, with their states, newest last."),
    "status": ("runs", "Show the state of a run or a sweep, and why."),
    "top": ("top", "Show runs live: progress, loss, speed, time left and last lines."),
    "logs": ("runs", "Print the log of a node or of the batch script."),
    "metrics": ("metrics", "Print, plot or send the metrics of each step, or of a sweep's runs."),
    "exporter": ("exporter", "Export metrics of active runs and their nodes to Prometheus."),
    "report": ("report", "Write an HTML report about a run, or a report that compares runs."),
    "compare": ("report", "Compare the states and configurations of runs."),
    "triage": ("runs", "Show which worker failed first, why, and what to do."),
    "cancel": ("rm", "Cancel a run or a sweep, and the runs that are waiting for it."),
    "resume": ("resume", "Resume a run or a sweep from its newest checkpoint."),
    "watch": ("resume", "Print each change of a run's state until it ends."),
    "exec": ("runs", "Run a command, or a shell, on a node of a running job."),
    "usage": ("usage", "Show the device, processor and memory use of each node of a run."),
    "profile": (
        "profile",
        "Profile the next steps of a running job and show where the time goes.",
    ),
    "stacks": ("stacks", "Show what each worker of a running job is doing."),
    "doctor": ("doctor", "Show why a run is not running, or check a cluster's nodes."),
    "note": ("rm", "Write a note about a run, or print it."),
    "keep": ("rm", "Protect runs: `trnslurm rm` never removes them or their checkpoints."),
    "rm": ("rm", "Remove runs that have ended, or their checkpoints."),
    "export": ("export", "Write a checkpoint as a Hugging Face folder."),
    "compile": ("compile", "Show, check and prune compiled graphs."),
    "clusters": ("plan", "List the cluster profiles."),
    "cluster": ("site", "Make a cluster profile."),
    "reconnect": ("remote", "Show the outcome of a command whose connection was lost."),
    "env": ("site", "Check the Python environment on the nodes."),
    "sandbox": ("sandbox", "Run a real Slurm cluster on this machine."),
    "completion": ("site", "Print the completion script of a shell."),
}
# Commands that always run on this host; `submit` sends the submission to the host of --on itself.
_HERE = {
    "adopt",
    "recipes",
    "show",
    "plan",
    "render",
    "new",
    "clusters",
    "completion",
    "reconnect",
    "submit",
}
_INTERRUPTED = 130
_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}
_LONGEST = 2000
# By default Python collects garbage after every 700 new objects. Imports make many objects that
# stay; looking through them takes 5% of a command's start.
_OBJECTS = 50_000


def completer(what: str) -> Callable[..., list[CompletionItem]]:
    """Return click's completion of names, such as recipes, presets, runs or hosts."""

    def complete(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
        found = importlib.import_module("trnslurm.cli.complete").complete(what, ctx, word)
        return list(found)

    return complete


def chosen_site() -> Site | None:
    """Return the host on which this command line runs, or None if it is this host."""
    from trnslurm.contract.variables import Variable
    from trnslurm.remote.place import choose_site  # --help needs no search path

    context = click.get_current_context()
    on = context.find_root().params.get("on")
    default = on is None and Variable.ON not in os.environ
    if default and context.command_path.split()[1] == "sandbox":
        return None  # a sandbox is of this host, whatever the default cluster
    return choose_site(on, context.params.get("cluster"), context.params.get("path") or ())


def _sendable(command: click.Command) -> click.Command:
    """Return a command that runs on the chosen host, with its options parsed on this host."""
    command = copy.copy(command)
    if isinstance(command, click.Group):
        command.commands = {name: _sendable(each) for name, each in command.commands.items()}
        return command
    run_here = command.callback

    def run(**values: Any) -> Any:
        if site := chosen_site():
            context = click.get_current_context()
            sys.exit(importlib.import_module("trnslurm.cli.remote").send(site, context))
        return run_here(**values) if run_here else None

    command.callback = run
    return command


class _LazyGroup(click.Group):
    """Imports a command's module only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"trnslurm.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in _COMMANDS if name.startswith(incomplete)]
        found = [CompletionItem(name, help=_COMMANDS[name][1]) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        given = {
            name: ctx.params.pop(name) for name in ("version", "verbose", "cluster", "as_json")
        }
        if given.pop("version"):
            _print_version(ctx, **given)
            ctx.exit()
        for name, value in given.items():
            if value and not ctx.resilient_parsing:
                option = "--json" if name == "as_json" else f"--{name}"
                raise click.UsageError(
                    f"{option} requires --version, or must come after the command", ctx
                )
        return rest

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], _COMMANDS) or "; see trnslurm --help"
            raise click.UsageError(f"unknown command {args[0]!r}{hint}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name not in _HERE:
            command = _sendable(command)
        return name, command, rest


def _print_version(ctx: click.Context, verbose: bool, cluster: str | None, as_json: bool) -> None:
    """Print the version. With --verbose, also import the module that lists what is installed."""
    if verbose:
        module = importlib.import_module("trnslurm.cli.version")
        module.print_installed(cluster, as_json=as_json)
        return
    if cluster or as_json:
        raise click.UsageError("--cluster and --json require --version --verbose", ctx)
    click.echo(f"trnslurm {__version__}")


@click.group(cls=_LazyGroup, context_settings=_SETTINGS)
@click.option("--version", is_flag=True, help="Print the version.")
@click.option(
    "--verbose",
    is_flag=True,
    help="With --version: also show what is installed here and what jobs on the cluster use.",
)
@click.option(
    "-c",
    "--cluster",
    shell_complete=completer("cluster"),
    help="With --verbose: the cluster to show.",
)
@click.option("--json", "as_json", is_flag=True, help="With --verbose: print JSON.")
@click.option(
    "--on",
    metavar="[USER@]HOST",
    shell_complete=completer("host"),
    help="Run the command on this host over ssh. The host does not need trnslurm.",
)
def cli(on: str | None) -> None:
    """Multi-node training jobs on Slurm, for AWS Trainium first.

    \b
    Example:
      trnslurm plan gpt2_zero1 --nodes 1,2,4      what it would take
      trnslurm render gpt2_zero1 --nodes 2        the scripts, to read or to sbatch by hand
      trnslurm submit gpt2_zero1 --nodes 2        precompile, then train
      trnslurm status last
      trnslurm --on login1 status last            the same from a laptop
      trnslurm --version --verbose                what is installed here
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line."""
    gc.set_threshold(_OBJECTS)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, _nowhere(mode))
    try:
        end_with(lambda: cli.main(args=arguments, prog_name="trnslurm", standalone_mode=False))
    finally:
        gc.freeze()  # saves a last garbage collection at exit


def _nowhere(mode: str) -> Any:
    return os.fdopen(os.open(os.devnull, os.O_RDWR), mode)


def end_with(command: Callable[[], object]) -> NoReturn:
    """Exit with a command's result. An error prints one line and sets its exit code."""
    try:
        code = command()
        sys.stdout.flush()
    except TrnslurmError as error:
        _fail(str(error), 1)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        where = f" ({error.ctx.command_path} --help)" if error.ctx else ""
        known = {parameter.name for parameter in error.ctx.command.params} if error.ctx else set()
        if isinstance(error, click.NoSuchOption) and "arguments" in known:
            where = f"; put options of a custom script after --{where}"
        if isinstance(error, click.NoSuchOption) and error.option_name == "--on":
            where = "; put it before the command: trnslurm --on HOST COMMAND"
        named = (
            any("--name" in each.opts for each in error.ctx.command.params) if error.ctx else False
        )
        if named and error.message.startswith("Got unexpected extra argument"):
            where = f"; a name is an option: --name NAME{where}"
        _fail(f"{error.format_message().removesuffix('.')}{where}", 2)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", _INTERRUPTED)
    except OSError as error:
        if error.filename is None:  # Python would try to write the rest at exit, and exit with 120
            sys.stdout = _nowhere("w")
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        _fail(f"{error.filename or 'output'}: {error.strerror}", 1)
    except RuntimeError as error:
        if "home directory" not in str(error):
            raise
        _fail("this user has no home directory: set HOME", 1)
    except MemoryError:
        _fail("out of memory", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    from trnslurm.records.foreign import printable

    line = " ".join(message.split())
    if len(line) > _LONGEST:  # it quotes a long value; the end says what to do
        line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    click.echo(f"error: {printable(line)}", err=True)
    sys.exit(code)
