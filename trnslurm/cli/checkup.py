"""doctor --run: submit the checkup, follow it, print the findings, write the report."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from trnslurm import __version__
from trnslurm.cli.follow import INTERRUPTED, last_line
from trnslurm.cli.output import command_line, echo_json, say
from trnslurm.cluster.cache import CompileCache
from trnslurm.config.load import origins_of_cluster, resolve_cluster
from trnslurm.config.search import Workspace
from trnslurm.console import Console
from trnslurm.contract.states import State
from trnslurm.errors import SlurmError, TrnslurmError
from trnslurm.health.found import Found, read_found
from trnslurm.health.job import make_checkup, make_spec_of_checkup
from trnslurm.health.judge import Expected, Line, expected_of, judge
from trnslurm.records.foreign import this_user
from trnslurm.records.run import RunDir
from trnslurm.runs.status import RunStatus
from trnslurm.runs.tables import count
from trnslurm.runs.watch import follow, once
from trnslurm.submission.cancel import cancel
from trnslurm.submission.submission import PlannedRun, Submission
from trnslurm.submission.submit import submit

_WORDS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-f]{1,4}::?){3,}[0-9a-f]*\b", re.I)


def run_checkup(
    workspace: Workspace,
    cluster: str,
    nodes: int,
    timeout_s: float,
    report: str | None,
    console: Console,
) -> int:
    """Check a cluster's nodes with a job that measures them, and return the exit code."""
    profile = resolve_cluster(workspace, cluster)
    spec = make_spec_of_checkup(profile, cluster, origins_of_cluster(workspace, cluster), nodes)
    expected = expected_of(spec)
    job = make_checkup(spec, workspace.template_dirs())
    submission = Submission(runs=[PlannedRun(job=job)], cache=CompileCache(job.profile))
    (run,), _ = submit(submission, command_line(), console)
    workers = count(expected.workers, "worker")
    say(f"Submitted {run.name}: {count(nodes, 'node')}, {workers} on {expected.device}")
    try:
        status = _wait(run, timeout_s)
    except KeyboardInterrupt:
        say("\nStopping …")
        cancel(run, now=True)
        say(f"{run.name}: CANCELLED")
        return INTERRUPTED
    found = read_found(run, expected.nodes, expected.workers)
    lines = [*_of_job(run, status), *judge(expected, found)]
    ok = not any(line.level == "problem" for line in lines)
    whole = {
        "trnslurm": __version__, "python": platform.python_version(), "run": run.name,
        "cluster": cluster, "expected": asdict(expected) | {"device": expected.device.name},
        "ok": ok,
        "lines": [asdict(line) for line in lines],
    }  # fmt: skip
    if report:
        _write_report(Path(report), whole, run, expected, found)
    if console.as_json:
        echo_json(whole)
    else:
        _print(lines, expected, run)
    return int(not ok)


def _wait(run: RunDir, timeout_s: float) -> RunStatus:
    """Follow the job until it ends, or cancel it if Slurm does not allocate its nodes in time."""
    say_state, say_line = once(say), once(say)
    deadline = time.monotonic() + timeout_s
    for status in follow(run):
        if status.final:
            continue
        say_state(status.words)
        if any(phase.attempt for phase in status.phases):
            if (line := last_line(run)).startswith("checkup: "):
                say_line(line)
        elif time.monotonic() > deadline:
            cancel(run, now=True)
            why = f": {status.reason}" if status.reason else ""
            raise SlurmError(
                f"the job did not get {count(status.nodes, 'node')} within {timeout_s:g} s{why}; "
                "try again, or pass --timeout"
            )
    return status


def _of_job(run: RunDir, status: RunStatus) -> list[Line]:
    if status.state is State.COMPLETED:
        return []
    fix = f"trnslurm logs {run.name}; the results below were measured before the job ended"
    return [Line("job", "problem", status.words, fix=fix)]


def _print(lines: Sequence[Line], expected: Expected, run: RunDir) -> None:
    width = max(len(line.check) for line in lines)
    for line in lines:
        wanted = f"; expected: {line.expected}" if line.expected else ""
        click.echo(f"{_WORDS[line.level]:7}  {line.check:{width}}  {line.measured}{wanted}")
        if line.fix:
            click.echo(f"{'':7}  {'':{width}}  -> {line.fix}")
    bad = sum(line.level == "problem" for line in lines)
    what = f"{count(bad, 'problem')} on" if bad else "all well on"
    click.echo(f"\n{what} {expected.nodes} x {expected.instance}; logs: trnslurm logs {run.name}")


def _write_report(
    file: Path, whole: dict[str, object], run: RunDir, expected: Expected, found: Found
) -> None:
    """Write a bug report without the environment and the names of hosts, users and directories."""
    text = json.dumps(whole)
    names = {str(run.path): "RUN", str(run.path.parent): "ROOT", str(Path.home()): "HOME"}
    names |= {run.name: "RUN", this_user(): "USER"}
    if expected.compile_cache:
        names[expected.compile_cache] = "CACHE"
    hosts = map(found.host, range(expected.nodes))
    names |= {host: f"node{number}" for number, host in enumerate(hosts)}
    for name in sorted(names, key=len, reverse=True):
        quoted = re.escape(json.dumps(name)[1:-1])
        text = re.sub(rf"(?<![\w-]){quoted}(?![\w-])", names[name], text)
    try:
        whole = json.loads(_ADDRESS.sub("ADDRESS", text))
        file.write_text(f"{json.dumps(whole, indent=2)}\n", encoding="utf-8")
    except OSError as error:
        raise TrnslurmError(f"{file}: {error.strerror}") from None
    say(f"Wrote {file}, which names no hosts, users or directories and omits the environment")
