"""Writes one checkpoint: all workers in parallel; then one rename makes it exist."""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trnslurm.rundir import RunFiles, checkpoints_in, step_of
from trnslurm.train.checkpoint import directory
from trnslurm.train.checkpoint.manifest import (
    CheckpointManifest,
    DamagedError,
    check_files,
    check_sizes,
    file_name,
    write_manifest,
)
from trnslurm.train.checkpoint.reading import find_best
from trnslurm.train.checkpoint.tensors import Rows, write_rows
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.store import Store, open_store

Message = dict[str, Any]


class Exchange:
    """Messages between the workers, by topic."""

    def __init__(self, device: Device, store: Store | None, *, patience_s: float) -> None:
        self.rank = device.rank
        self.world = device.world
        self.patience_s = patience_s
        self._store = open_store("checkpoint", store)

    def report(self, topic: str, message: Message) -> None:
        """Send a message to worker 0."""
        self._store.set(f"{topic}/{self.rank}", json.dumps(message))

    def reports(self, topic: str, deadline_s: float) -> list[Message | None]:
        """Return what each worker reported, in order; None for a worker that missed the deadline.

        The deadline is for all of them together.
        """
        end = time.monotonic() + deadline_s
        return [
            self._get(f"{topic}/{rank}", max(0.001, end - time.monotonic()))
            for rank in range(self.world)
        ]

    def announce(self, topic: str, message: Message) -> None:
        """Send a message from worker 0 to all workers."""
        self._store.set(f"{topic}/all", json.dumps(message))

    def announced(self, topic: str, deadline_s: float) -> Message | None:
        """Wait for worker 0's message to all workers; None if it misses the deadline."""
        return self._get(f"{topic}/all", deadline_s, keep=True)

    def _get(self, key: str, deadline_s: float, *, keep: bool = False) -> Message | None:
        try:
            self._store.wait([key], timedelta(seconds=deadline_s))
        except dist.DistStoreError:
            return None
        message: Message = json.loads(self._store.get(key))
        if not keep:
            self._store.delete_key(key)
        return message


# A worker waits for worker 0 this much longer than worker 0 waits for the workers.
GRACE_S = 60


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """What is saved, which checkpoints are kept, and how long a save may take."""

    keep_last: int = 2
    """The number of newest checkpoints to keep."""
    keep_every: int = 0
    """Checkpoints of every keep_every-th step are kept for good; 0: none."""
    keep_best: str = ""
    """The score whose best checkpoint is kept: the highest score, or the least loss; empty: none"""
    save_optimizer: bool = True
    """Without the optimizer's state a checkpoint is minimal: parameters only."""
    patience_s: float = 1800
    """A worker that does not answer for this long fails the save."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that exists now."""

    step: int
    num_bytes: int
    """Of all workers' files."""
    stall_s: float
    """How long training waited in this worker."""
    write_s: float
    """How long writing then took, in the background."""
    warning: str = ""

    def __str__(self) -> str:
        warning = f"; {self.warning}" if self.warning else ""
        return (
            f"checkpoint of step {self.step}: {self.num_bytes / 1e6:,.1f} MB written in "
            f"{self.write_s:.2f} s, training stalled for {self.stall_s:.3f} s{warning}"
        )


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A checkpoint that could not be made; earlier checkpoints still exist."""

    step: int
    reason: str
    stall_s: float
    write_s: float

    def __str__(self) -> str:
        return (
            f"warning: no checkpoint of step {self.step}: {self.reason}; the one before is kept, "
            "and the next one is tried as usual"
        )


@dataclass(frozen=True, kw_only=True)
class Overtaken:
    """No checkpoint, because a newer attempt of this run has begun."""

    attempt: int


Outcome = Saved | Failed | Overtaken


class CannotSaveError(Exception):
    """Why a checkpoint cannot be made, in a few words."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One save of one checkpoint: everything but its tensors."""

    root: Path
    files: RunFiles
    """Where the batch scripts note the attempts."""
    phase: str
    exchange: Exchange
    topic: str
    """Prefix of the workers' messages; unique to this save."""
    manifest: CheckpointManifest
    """Its files are not known yet."""
    policy: CheckpointPolicy
    stall_s: float

    @property
    def final(self) -> Path:
        """Its directory when it is whole."""
        return directory.step_directory(self.root, self.manifest.step)

    @property
    def temporary(self) -> Path:
        """Its directory until then."""
        return directory.temporary_directory(self.root, self.manifest.step, self.manifest.attempt)

    def run(self, rows: Rows) -> Outcome:
        """Write this worker's rows; wait for the checkpoint to be committed, or fail."""
        start = time.monotonic()
        try:
            message = self._together(rows)
        except dist.DistError as error:
            message = {"failed": f"the workers cannot reach each other ({error})"}
        seconds = {"stall_s": self.stall_s, "write_s": time.monotonic() - start}
        step = self.manifest.step
        if "overtaken" in message:
            return Overtaken(attempt=message["overtaken"])
        if "failed" in message:
            return Failed(step=step, reason=message["failed"], **seconds)
        warning = self._prune() if self.exchange.rank == 0 else ""
        return Saved(step=step, num_bytes=message["bytes"], warning=warning, **seconds)

    def _together(self, rows: Rows) -> Message:
        self.exchange.report(self.topic, self._write(rows))
        patience_s = self.exchange.patience_s
        if self.exchange.rank:
            silence = {"failed": f"worker 0 did not answer within {patience_s:g} s"}
            return self.exchange.announced(self.topic, patience_s + GRACE_S) or silence
        message = self._commit(self.exchange.reports(self.topic, patience_s))
        self.exchange.announce(self.topic, message)
        return message

    def _write(self, rows: Rows) -> Message:
        name = file_name(self.exchange.rank, self.exchange.world)
        try:
            self.temporary.mkdir(parents=True, exist_ok=True)
            size, sha256 = write_rows(self.temporary / name, rows)
        except OSError as error:
            return {"error": f"{name}: {error.strerror}"}
        return {"bytes": size, "sha256": sha256}

    def _commit(self, reports: list[Message | None]) -> Message:
        reason = ""
        try:
            manifest = replace(self.manifest, files=self._files(reports))
            # What other nodes wrote must be here too: this is the place to learn that the
            # directory is not on a file system that all of them share.
            check_files(self.temporary, manifest)
            write_manifest(self.temporary, manifest)
            # Between this look and the renaming a newer attempt can still begin. It then takes the
            # temporary directory away before it reads anything, and the renaming fails.
            if not self._overtaken():
                directory.put_in_place(self.temporary, self.final, self.manifest.attempt)
                return {"bytes": manifest.num_bytes}
        except (CannotSaveError, DamagedError) as error:
            reason = str(error)
        except OSError as error:
            reason = f"{Path(error.filename or self.root).name}: {error.strerror}"
        with suppress(OSError):  # already gone, or the next attempt's first deed
            directory.remove(self.temporary, self.manifest.attempt)
        newer = self._overtaken()
        return {"overtaken": newer} if newer else {"failed": reason}

    def _files(self, reports: list[Message | None]) -> Message:
        silent = [str(worker) for worker, report in enumerate(reports) if report is None]
        if silent:
            raise CannotSaveError(
                f"worker {', '.join(silent)} did not answer within {self.exchange.patience_s:g} s"
            )
        errors = [report["error"] for report in reports if report and "error" in report]
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise CannotSaveError(errors[0] + more)
        return {file_name(worker, len(reports)): report for worker, report in enumerate(reports)}

    def _overtaken(self) -> int | None:
        return directory.newer_attempt(self.files, self.phase, self.manifest.attempt)

    def _prune(self) -> str:
        """Delete checkpoints that are neither among the newest, nor the best, nor kept for good.

        Only checkpoints with complete files count as newest, so one always remains.
        """
        keep_last, keep_every = self.policy.keep_last, self.policy.keep_every
        try:
            directory.finish_removals(self.root)
            name = self.policy.keep_best
            best = find_best(self.root, name) if name else None
            for checkpoint in checkpoints_in(self.root):
                if keep_last > 0:
                    keep_last -= _looks_whole(checkpoint)
                elif checkpoint == best:
                    continue
                elif not keep_every or (step_of(checkpoint.name) or 0) % keep_every:
                    directory.remove(checkpoint, self.manifest.attempt)
        except OSError as error:
            return f"an old one cannot be deleted ({error.strerror})"
        return ""


def _looks_whole(checkpoint: Path) -> bool:
    try:
        check_sizes(checkpoint)
    except DamagedError:
        return False
    return True
