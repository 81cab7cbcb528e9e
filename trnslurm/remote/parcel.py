"""Packs a submission for the host that starts it: its files, and the facts to record."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trnslurm.cluster.cache import CompileCache
from trnslurm.console import Console
from trnslurm.contract.halving import halving_of
from trnslurm.errors import RemoteError
from trnslurm.remote.launcher import pack
from trnslurm.render.bundle import Bundle
from trnslurm.runs.git import git_source
from trnslurm.schedulers.interface import WaitsFor
from trnslurm.submission.job import Job, read_job
from trnslurm.submission.submission import PlannedRun, Submission

_FACTS = "parcel.json"
_CONSOLE = ("dry_run", "follow", "as_json")


def pack_submission(submission: Submission, command: Sequence[str], console: Console) -> bytes:
    """Return a submission as one file in which equal contents are stored only once."""
    contents: dict[str, bytes] = {}
    facts = {
        "runs": [_run_facts(planned, contents) for planned in submission.runs],
        "extras": [_run_facts(planned, contents) for planned in submission.extras],
        "stamp": submission.stamp,
        "sweep": submission.sweep,
        "at_most": submission.at_most,
        "halving": submission.halving.facts() if submission.halving else None,
        "command": [*command],
        "console": {name: getattr(console, name) for name in _CONSOLE},
    }
    return pack({_FACTS: json.dumps(facts).encode()} | contents)


def _run_facts(planned: PlannedRun, contents: dict[str, bytes]) -> dict[str, Any]:
    facts = _job_facts(planned.job, contents)
    return facts | {"waits_for": asdict(planned.waits_for), "values": dict(planned.values)}


def _job_facts(job: Job, contents: dict[str, bytes]) -> dict[str, Any]:
    sha256 = job.bundle.sha256()
    contents |= {sha256[name]: data for name, data in job.bundle.files.items()}
    git, patch = job.git, job.patch
    if job.source_dir:
        git, patch = git_source(Path(job.source_dir))
    key = hashlib.sha256(patch).hexdigest()
    contents[key] = patch
    return {"files": sha256, "origins": dict(job.origins), "git": dict(git), "patch": key}


def unpack(file: Path, directory: Path) -> tuple[Submission, list[str], dict[str, Any]]:
    """Return a received submission, the user's command line, and options of the console.

    The bundles are written below a directory, and every sha256 is checked.
    """
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(file.read_bytes())) as tar:
        for member in tar.getmembers():
            if (stream := tar.extractfile(member)) is not None:
                contents[member.name] = stream.read()
    facts = json.loads(contents.pop(_FACTS))
    for sha256, data in contents.items():
        if hashlib.sha256(data).hexdigest() != sha256:
            raise RemoteError("the submission was damaged in transit: nothing was submitted")
    places = (directory / f"bundle-{number}" for number in itertools.count(1))
    runs, extras = (
        [_run(each, contents, next(places)) for each in facts[kind]] for kind in ("runs", "extras")
    )
    submission = Submission(
        runs=runs,
        extras=extras,
        cache=CompileCache(runs[0].job.profile),
        stamp=facts["stamp"],
        sweep=facts["sweep"],
        at_most=facts["at_most"],
        halving=halving_of(facts["halving"] or {}),
    )
    return submission, facts["command"], facts["console"]


def _run(facts: Mapping[str, Any], contents: Mapping[str, bytes], place: Path) -> PlannedRun:
    place.mkdir(mode=0o700)
    waits_for = facts["waits_for"]
    return PlannedRun(
        job=_job(facts, contents, place),
        waits_for=WaitsFor(**waits_for | {"success": tuple(waits_for["success"])}),
        values=facts["values"],
    )


def _job(facts: Mapping[str, Any], contents: Mapping[str, bytes], place: Path) -> Job:
    files = {name: contents[sha256] for name, sha256 in facts["files"].items()}
    Bundle(files=files).write(place)
    job = read_job(place)
    if job.bundle.sha256() != facts["files"]:
        raise RemoteError(
            f"{place}: the files differ from those that were sent: nothing was submitted"
        )
    return replace(job, origins=facts["origins"], git=facts["git"], patch=contents[facts["patch"]])
