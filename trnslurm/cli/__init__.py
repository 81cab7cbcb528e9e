"""The command line. A command's module is imported only when that command is used."""

from __future__ import annotations

import importlib
import sys

import click

from trnslurm import __version__
from trnslurm.errors import TrnslurmError, did_you_mean
from trnslurm.runs.foreign import printable

# Command -> module, in the order of the help text.
_COMMANDS = {
    "recipes": "plan",
    "show": "plan",
    "plan": "plan",
    "render": "render",
    "submit": "submit",
    "new": "new",
    "data": "data",
    "runs": "runs",
    "status": "runs",
    "logs": "runs",
    "metrics": "metrics",
    "triage": "triage",
    "cancel": "runs",
    "resume": "resume",
    "watch": "resume",
    "exec": "runs",
    "doctor": "doctor",
    "export": "export",
    "compile": "compile",
    "clusters": "plan",
    "cluster": "site",
    "env": "site",
    "sandbox": "sandbox",
    "completion": "site",
}
_INTERRUPTED = 130
_LONGEST = 2000


class _LazyGroup(click.Group):
    """Imports a command's module only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"trnslurm.cli.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], _COMMANDS) or "; see trnslurm --help"
            raise click.UsageError(f"unknown command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trnslurm", message="%(prog)s %(version)s")
def cli() -> None:
    """Multi-node training jobs on Slurm, for AWS Trainium first.

    \b
    Example:
      trnslurm plan gpt2_zero1 --nodes 1,2,4      what it would take
      trnslurm render gpt2_zero1 --nodes 2        the scripts, to read or to sbatch by hand
      trnslurm submit gpt2_zero1 --nodes 2        precompile, then train
      trnslurm status last
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: errors are one line, and exit codes say whose they are."""
    try:
        code = cli.main(args=arguments, prog_name="trnslurm", standalone_mode=False)
    except TrnslurmError as error:
        _fail(str(error), 1)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        where = f" ({error.ctx.command_path} --help)" if error.ctx else ""
        _fail(f"{error.format_message()}{where}", 2)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", _INTERRUPTED)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror}", 1)
    except MemoryError:
        _fail("this machine has too little memory for it", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    if len(line) > _LONGEST:  # it quotes what somebody set; what to do stands at the end
        line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    click.echo(f"error: {printable(line)}", err=True)
    sys.exit(code)
