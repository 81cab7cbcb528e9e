"""submit --on HOST: query the other host, then send the submission."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from trnslurm.api.options import SubmitHost
from trnslurm.cli.output import say
from trnslurm.cli.remote import answer_of, ask_site
from trnslurm.config.search import Workspace
from trnslurm.console import Console
from trnslurm.errors import RemoteError
from trnslurm.remote.place import Site
from trnslurm.runs.result import Checkpoint
from trnslurm.submit.submission import Submission


class RemoteHost(SubmitHost):
    """The host of --on, which starts the submission."""

    remote = True

    def __init__(self, site: Site) -> None:
        self._site = site

    def find_checkpoint(self, word: str, workspace: Workspace) -> Checkpoint:
        facts = json.loads(answer_of(self._site, ["@checkpoint", word]))
        return Checkpoint(
            path=Path(facts["path"]), facts=facts["facts"], passed_over=tuple(facts["passed_over"])
        )

    def settle(self, run_root: str, names: Sequence[str]) -> tuple[Path, str]:
        root, stamp = json.loads(answer_of(self._site, ["@settle", run_root, *names]))
        return Path(root), str(stamp)


def submit_remotely(
    site: Site, submission: Submission, command: Sequence[str], console: Console
) -> int:
    """Send a submission, start it on the host, and return the exit code."""
    from trnslurm.remote.parcel import pack_submission  # others need no way to another host

    first = submission.job
    if first.local:
        raise RemoteError(
            f"--on {site.place.host}: the profile {first.cluster} is for one machine without "
            "Slurm: pass --cluster NAME"
        )
    answer = ask_site(
        site,
        ["@submit"],
        shows=console.dry_run,
        parcel=pack_submission(submission, command, console),
        what=f"the submission of {first.name}",
    )
    shown = console.dry_run or console.as_json or answer.code
    if not shown and click.get_current_context().find_root().params["on"]:
        say(f"Submitted on {site.place.host}: `trnslurm --on {site.place.host} status last`")
    return int(answer.code)
