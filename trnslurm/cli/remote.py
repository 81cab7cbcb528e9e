"""--on, reconnect: run commands on another host, and do the local part of some of them."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trnslurm.cli.output import say
from trnslurm.errors import RemoteError
from trnslurm.remote.place import Site, choose_site, templates_of

# Commands that --on cannot run, and what to do instead.
_REFUSED = {
    "sandbox": "a sandbox runs on one machine: log in to that machine, or leave out --on",
    "top": "`trnslurm watch RUN` or `trnslurm logs RUN -f` shows the same",
    "data": "data is prepared where it is used: log in there, `pip install trnslurm`, and run it",
    "compile key": "`trnslurm submit --dry-run` shows the key with the cluster's Python",
}
# Read-only commands: they may be sent again, and end when the output is no longer read.
_SHOWING = {"runs", "status", "logs", "metrics", "compare", "triage", "watch", "doctor", "report"}
_HOST_LINE = r"(?im)^\s*host\s+(.+)$"


def chosen_site(cluster: str | None, path: Sequence[str]) -> Site | None:
    """Return the host on which this command line runs; None: this host."""
    return choose_site(click.get_current_context().find_root().params.get("on"), cluster, path)


def sendable(command: click.Command) -> click.Command:
    """Return a command that runs on the chosen host."""
    if isinstance(command, click.Group):
        group = copy.copy(command)
        group.commands = {name: sendable(each) for name, each in command.commands.items()}
        return group
    return _Sendable(command)


class _Sendable(click.Command):
    """Parses a command's options on this host, and runs the command on the chosen host."""

    def __init__(self, command: click.Command) -> None:
        super().__init__(
            command.name,
            context_settings=command.context_settings,
            params=command.params,
            help=command.help,
            epilog=command.epilog,
            short_help=command.short_help,
        )
        self._command = command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options as the command itself does."""
        self._command.format_options(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command on the chosen host."""
        if site := chosen_site(ctx.params.get("cluster"), ctx.params.get("path") or ()):
            sys.exit(_send(site, ctx))
        ctx.command = self._command
        return self._command.invoke(ctx)


def _send(site: Site, ctx: click.Context) -> int:
    names = ctx.command_path.split()[1:]
    for refused in (names[0], " ".join(names)):
        if refused in _REFUSED:
            raise RemoteError(
                f"--on {site.place.host}: `{' '.join(names)}` does not work with --on: "
                f"{_REFUSED[refused]}"
            )
    if names == ["report"]:
        return _report(site, ctx)
    if names == ["cluster", "detect"] and ctx.params["write"]:
        return _detect(site, ctx)
    if names == ["exec"]:
        return _attached(site, [*names, *_words(ctx)])
    changes = ctx.params.get("resume") or ctx.params.get("measure")  # of watch, and of doctor
    answer = ask_site(
        site,
        [*names, *_words(ctx)],
        shows=names[0] in _SHOWING and not changes,
        files=templates_of(ctx.params.get("path") or ()) if names == ["resume"] else {},
    )
    for name, data in answer.files.items():
        wanted = ctx.params.get("report")
        if wanted and Path(wanted).name == name:
            Path(wanted).write_bytes(data)
    return int(answer.code)


def _words(ctx: click.Context) -> list[str]:
    """Return the given options and arguments in an unambiguous form."""
    words: list[str] = []
    arguments: list[str] = []
    for parameter in ctx.command.params:
        name = str(parameter.name)
        value = ctx.params.get(name)
        if ctx.get_parameter_source(name) != ParameterSource.COMMANDLINE or name == "path":
            continue
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(parameter, click.Argument):
            arguments += map(str, values)
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            words += [parameter.opts[-1]] if value else []
        elif name == "report":  # the file is sent back
            words.append(f"{parameter.opts[-1]}={Path(str(value)).name}")
        else:
            words += [f"{parameter.opts[-1]}={each}" for each in values]
    return [*words, "--", *arguments] if arguments else words


def ask_site(
    site: Site,
    argv: Sequence[str],
    *,
    shows: bool,
    files: Mapping[str, str] | None = None,
    parcel: bytes | None = None,
    what: str = "",
    out: io.BytesIO | None = None,
) -> Any:
    from trnslurm.remote.ask import ask
    from trnslurm.remote.request import Request

    request = Request(
        place=site.place,
        argv=argv,
        shows=shows,
        site={**site.files, **(files or {})},
        cluster=site.cluster,
        parcel=parcel,
        what=what or f"`trnslurm {' '.join(argv)}`",
    )
    return ask(request, say=say, out=out)


def answer_of(site: Site, argv: Sequence[str]) -> bytes:
    """Return the output of a program (@NAME) on the host; if it fails, exit with its code."""
    out = io.BytesIO()
    answer = ask_site(site, argv, shows=True, out=out)
    if answer.code:
        sys.exit(answer.code)
    return out.getvalue()


def _attached(site: Site, words: Sequence[str]) -> int:
    """Run an interactive command; it ends when the connection breaks."""
    from trnslurm.remote import launcher
    from trnslurm.remote.ssh import NO_LAUNCHER

    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    argv = site.place.argv(launcher.name(), ["run", *words], terminal=terminal)
    code = subprocess.run(argv, check=False).returncode
    if code == NO_LAUNCHER:
        answer_of(site, ["@hello"])
        code = subprocess.run(argv, check=False).returncode
    if code == 255:
        raise RemoteError(f"{site.place.host}: the connection broke, which ended the command")
    return code


def _detect(site: Site, ctx: click.Context) -> int:
    """Write the profile of the remote cluster to this host."""
    from trnslurm.cli.site import write_profile

    words = [ctx.params[key] or "" for key in ("partition", "name", "bin_dir")]
    facts = json.loads(answer_of(site, ["@profile", *words]))
    facts["text"] += f"# The login node, as this host reaches it.\nremote: {site.place.host}\n"
    write_profile(**{key: str(facts[key]) for key in ("name", "text", "warning")})
    return 0


def _report(site: Site, ctx: click.Context) -> int:
    """Write the report on this host from the records of the remote runs."""
    import tarfile
    import tempfile

    from trnslurm.remote.receive import extract
    from trnslurm.report.history import History
    from trnslurm.runs.foreign import read_fields
    from trnslurm.runs.run import RunDir
    from trnslurm.runs.status import RunStatus

    answer = ask_site(site, ["@histories", *ctx.params["runs"]], shows=True)
    if answer.code:
        return int(answer.code)
    with tempfile.TemporaryDirectory(prefix="trnslurm-") as directory:
        try:
            with tarfile.open(fileobj=io.BytesIO(answer.files["runs.tar.gz"])) as tar:
                extract(tar, Path(directory))
        except tarfile.TarError as error:
            raise RemoteError(f"{site.place.host}: damaged records of its runs: {error}") from None
        found = []
        for facts in json.loads(answer.files["statuses.json"]):
            run = RunDir(Path(directory, Path(facts["run"]).name))
            found.append(History(run, run.record(), read_fields(RunStatus, facts)))
        from trnslurm.cli.report import write_page

        write_page(found, ctx.params["runs"], ctx.params["output"], pictures=ctx.params["png"])
    return 0


def known_hosts() -> list[str]:
    """Return the hosts that profiles and ssh's own configuration name, for completion."""
    from trnslurm.api.search import workspace_of
    from trnslurm.config.search import read_yaml
    from trnslurm.errors import TrnslurmError

    found: list[str] = []
    for file in workspace_of().clusters().values():
        try:
            found.append(str(read_yaml(file).get("remote") or ""))
        except TrnslurmError:
            continue
    try:
        text = Path("~/.ssh/config").expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found += [name for line in re.findall(_HOST_LINE, text) for name in line.split()]
    return [*dict.fromkeys(host for host in found if re.fullmatch(r"[\w@][\w.@-]*", host))]


@click.command("reconnect")
@click.option("--forget", "forgetting", is_flag=True, help="Forget these commands.")
def reconnect_command(forgetting: bool) -> None:
    """Show what became of a command whose connection broke.

    The command keeps running on the other host and is not started again: its output is shown from
    the beginning. A request that never arrived is sent again. --forget only removes the local
    record of the command.

    \b
    Example:
      trnslurm reconnect
    """
    from trnslurm.remote.ask import ask
    from trnslurm.remote.request import forget, unfinished

    requests = unfinished()
    if not requests:
        say("No command was interrupted")
        return
    worst = 0
    for request in requests:
        say(f"{'Forgotten, on' if forgetting else 'On'} {request.place.host}: {request.what}")
        if forgetting:
            forget(request)
            continue
        worst = max(worst, ask(request, say=say, again=True).code)
    sys.exit(worst)
