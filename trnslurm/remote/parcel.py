"""Jobs as they are sent to be submitted elsewhere: their bytes, and what is recorded of them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trnslurm.errors import RemoteError
from trnslurm.remote.launcher import pack
from trnslurm.render.bundle import Bundle
from trnslurm.runs.git import git_source
from trnslurm.submit.job import Job, read_job

_FACTS = "parcel.json"


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """What one submission sends."""

    jobs: Sequence[Job]
    """Its runs."""
    command: Sequence[str]
    """What the user called here."""
    ahead: Sequence[Job] = ()
    """Jobs that compile for further node counts."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What of the command line is for the other side."""
    sweep: Mapping[str, Any] | None = None
    """Name, points and at_most of a sweep; None: its jobs are no sweep."""
    stamp: str = ""
    """The time in the names of a chain's runs, by which one names another's checkpoints."""

    def pack(self) -> bytes:
        """Return it as one file, in which each content is once."""
        contents: dict[str, bytes] = {}
        facts = {
            "jobs": [_job_facts(job, contents) for job in self.jobs],
            "ahead": [_job_facts(job, contents) for job in self.ahead],
            "command": [*self.command], "options": dict(self.options), "sweep": self.sweep,
            "stamp": self.stamp,
        }  # fmt: skip
        return pack({_FACTS: json.dumps(facts).encode()} | contents)


def _job_facts(job: Job, contents: dict[str, bytes]) -> dict[str, Any]:
    sha256 = job.bundle.sha256()
    contents |= {sha256[name]: data for name, data in job.bundle.files.items()}
    git, patch = job.git, job.patch
    if job.source_dir:
        git, patch = git_source(Path(job.source_dir))
    key = hashlib.sha256(patch).hexdigest()
    contents[key] = patch
    return {"files": sha256, "origins": dict(job.origins), "git": dict(git), "patch": key}


def unpack(file: Path, directory: Path) -> Parcel:
    """Return what was sent, with its bundles below a directory, every byte compared."""
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(file.read_bytes())) as tar:
        for member in tar.getmembers():
            if (stream := tar.extractfile(member)) is not None:
                contents[member.name] = stream.read()
    facts = json.loads(contents.pop(_FACTS))
    for sha256, data in contents.items():
        if hashlib.sha256(data).hexdigest() != sha256:
            raise RemoteError("what was sent arrived damaged: nothing was submitted")
    number = 0
    jobs: dict[str, list[Job]] = {}
    for kind in ("jobs", "ahead"):
        for each in facts[kind]:
            number += 1
            place = directory / f"bundle-{number}"
            place.mkdir(mode=0o700)
            jobs.setdefault(kind, []).append(_job(each, contents, place))
    return Parcel(
        jobs=jobs["jobs"], ahead=jobs.get("ahead", []), command=facts["command"],
        options=facts["options"], sweep=facts["sweep"], stamp=facts["stamp"],
    )  # fmt: skip


def _job(facts: Mapping[str, Any], contents: Mapping[str, bytes], place: Path) -> Job:
    files = {name: contents[sha256] for name, sha256 in facts["files"].items()}
    Bundle(files=files).write(place)
    job = read_job(place)
    if job.bundle.sha256() != facts["files"]:
        raise RemoteError(f"{place}: its files are not those that were sent: nothing was submitted")
    return replace(job, origins=facts["origins"], git=facts["git"], patch=contents[facts["patch"]])
