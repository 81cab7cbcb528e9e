"""Commands on another host (--on), the local part of some of them, and reconnect.

Imported only for a command that runs on another host.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import click
from click.core import ParameterSource

from trnslurm.cli.output import say
from trnslurm.cli.report import write_page
from trnslurm.cli.site import write_profile
from trnslurm.config.search import Workspace
from trnslurm.console import Console
from trnslurm.errors import RemoteError
from trnslurm.records.foreign import read_fields
from trnslurm.records.run import RunDir
from trnslurm.remote import launcher
from trnslurm.remote.ask import Answer, ask
from trnslurm.remote.parcel import pack_submission
from trnslurm.remote.place import Site, templates_of
from trnslurm.remote.receive import extract
from trnslurm.remote.request import RemoteCommand, forget, unfinished
from trnslurm.remote.ssh import NO_LAUNCHER
from trnslurm.report.history import History
from trnslurm.runs.result import Checkpoint
from trnslurm.runs.status import RunStatus
from trnslurm.submission.options import SubmitHost
from trnslurm.submission.submission import Submission

# Commands that --on cannot run, and what to do instead.
_REFUSED = {
    "sandbox": "a sandbox runs on one machine: log in to that machine, or omit --on",
    "top": "`trnslurm watch RUN` or `trnslurm logs RUN -f` shows the same information",
    "data": (
        "data is prepared where it is used: log in there, run `pip install trnslurm`, and "
        "repeat the command"
    ),
    "compile key": "`trnslurm submit --dry-run` shows the key, using the cluster's Python",
}
# Read-only commands: they may be sent again, and end when the output is no longer read.
_SHOWING = {"runs", "status", "logs", "metrics", "compare", "triage", "watch", "doctor", "report"}


def send(site: Site, ctx: click.Context) -> int:
    """Run a command on another host and return its exit code."""
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
    changes = ctx.params.get("resuming") or ctx.params.get("measure")  # of watch, and of doctor
    templates = templates_of(ctx.params.get("path") or ()) if names == ["resume"] else {}
    shows = names[0] in _SHOWING and not changes
    site = replace(site, files={**site.files, **templates})
    answer = _ask(site, [*names, *_words(ctx)], shows=shows)
    for name, data in answer.files.items():
        wanted = ctx.params.get("report")
        if wanted and Path(wanted).name == name:
            Path(wanted).write_bytes(data)
    return answer.code


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


def _ask(site: Site, argv: Sequence[str], out: BinaryIO | None = None, **how: Any) -> Answer:
    """Run a command on a site's host. `how` holds the other fields of the RemoteCommand."""
    fields = {"what": f"`trnslurm {' '.join(argv)}`", **how}
    request = RemoteCommand(
        place=site.place, argv=argv, cluster=site.cluster, site=site.files, **fields
    )
    return ask(request, say=say, out=out)


def _answer_of(site: Site, argv: Sequence[str]) -> bytes:
    """Return the output of a program (@NAME) on the host, or exit with its code if it fails."""
    out = io.BytesIO()
    answer = _ask(site, argv, out, shows=True)
    if answer.code:
        sys.exit(answer.code)
    return out.getvalue()


def _attached(site: Site, words: Sequence[str]) -> int:
    """Run an interactive command, which ends if the connection breaks."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    argv = site.place.argv(launcher.name(), ["run", *words], terminal=terminal)
    code = subprocess.run(argv, check=False).returncode
    if code == NO_LAUNCHER:
        _answer_of(site, ["@hello"])
        code = subprocess.run(argv, check=False).returncode
    if code == 255:
        raise RemoteError(f"{site.place.host}: the connection was lost, which ended the command")
    return code


def _detect(site: Site, ctx: click.Context) -> int:
    """Write the remote cluster's profile to this host."""
    words = [ctx.params[key] or "" for key in ("partition", "name", "bin_dir")]
    words.append(str(ctx.params["timeout"]) if ctx.params["ask_nodes"] else "")
    facts = json.loads(_answer_of(site, ["@profile", *words]))
    facts["text"] += f"# The login node, as this host reaches it.\nremote: {site.place.host}\n"
    write_profile(**{key: str(facts[key]) for key in ("name", "text", "warning")})
    return 0


def _report(site: Site, ctx: click.Context) -> int:
    """Write the report on this host, using the records of the remote runs."""
    answer = _ask(site, ["@histories", *ctx.params["runs"]], shows=True)
    if answer.code:
        return answer.code
    with tempfile.TemporaryDirectory(prefix="trnslurm-") as directory:
        try:
            with tarfile.open(fileobj=io.BytesIO(answer.files["runs.tar.gz"])) as tar:
                extract(tar, Path(directory))
        except tarfile.TarError as error:
            raise RemoteError(f"{site.place.host}: its run records are damaged: {error}") from None
        found = []
        for facts in json.loads(answer.files["statuses.json"]):
            run = RunDir(Path(directory, Path(facts["run"]).name))
            found.append(History(run, run.record(), read_fields(RunStatus, facts)))
        write_page(found, ctx.params["runs"], ctx.params["output"], pictures=ctx.params["png"])
    return 0


class RemoteHost(SubmitHost):
    """The --on host, which starts the submission."""

    remote = True

    def __init__(self, site: Site) -> None:
        self._site = site

    def find_checkpoint(self, word: str, workspace: Workspace) -> Checkpoint:
        facts = json.loads(_answer_of(self._site, ["@checkpoint", word]))
        return Checkpoint(
            path=Path(facts["path"]), facts=facts["facts"], passed_over=tuple(facts["passed_over"])
        )

    def settle(self, run_root: str, names: Sequence[str]) -> tuple[Path, str]:
        root, stamp = json.loads(_answer_of(self._site, ["@settle", run_root, *names]))
        return Path(root), str(stamp)


def submit_remotely(
    site: Site, submission: Submission, command: Sequence[str], console: Console
) -> int:
    """Send a submission, start it on the host, and return the exit code."""
    first = submission.job
    if not first.has_queue:
        raise RemoteError(
            f"--on {site.place.host}: the profile {first.cluster} describes a single machine "
            "without Slurm: pass --cluster NAME"
        )
    answer = _ask(
        site,
        ["@submit"],
        shows=console.dry_run,
        parcel=pack_submission(submission, command, console),
        what=f"the submission of {first.name}",
    )
    shown = console.dry_run or console.as_json or answer.code
    if not shown and click.get_current_context().find_root().params["on"]:
        say(f"Submitted on {site.place.host}: `trnslurm --on {site.place.host} status last`")
    return answer.code


@click.command("reconnect")
@click.option("--forget", "forgetting", is_flag=True, help="Forget these commands.")
def reconnect_command(forgetting: bool) -> None:
    """Show the outcome of a command whose connection was lost.

    The command keeps running on the other host. It is not started again, and its output is shown
    from the beginning. A request that never arrived is sent again. --forget only removes the local
    record of the command.

    \b
    Example:
      trnslurm reconnect
    """
    requests = unfinished()
    if not requests:
        say("No commands were interrupted")
        return
    worst = 0
    for request in requests:
        say(f"{'Forgotten, on' if forgetting else 'On'} {request.place.host}: {request.what}")
        if forgetting:
            forget(request)
            continue
        worst = max(worst, ask(request, say=say, again=True).code)
    sys.exit(worst)
