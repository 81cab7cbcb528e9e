"""Writes a checkpoint: all workers write in parallel, and one rename then commits it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trnslurm.contract.checkpoints import checkpoint_name, checkpoints_in, step_of, temporary_name
from trnslurm.saves import directory
from trnslurm.saves.manifest import (
    NAME,
    DamagedError,
    Manifest,
    check_files,
    check_sizes,
    file_name,
    write_manifest,
)
from trnslurm.saves.memory import HostCopy

# A worker waits for worker 0 this much longer than worker 0 waits for the workers.
GRACE_S = 60

Message = dict[str, Any]


class Exchange:
    """Messages between the workers, by topic."""

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self.rank = rank
        self.world = world
        self._store = store
        """A torch.distributed store. Its connection is separate: a waiting call blocks others."""

    def send(self, topic: str, message: Message) -> None:
        """Send a message."""
        self._store.set(topic, json.dumps(message))

    def receive(self, topic: str, deadline_s: float, *, keep: bool = False) -> Message | None:
        """Wait for a message; return None at the deadline. `keep` leaves it for other workers."""
        try:
            self._store.wait([topic], timedelta(seconds=deadline_s))
        except dist.DistStoreError:
            return None
        message: Message = json.loads(self._store.get(topic))
        if not keep:
            self._store.delete_key(topic)
        return message


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended: with a new checkpoint, or with the reason why there is none."""

    step: int
    num_bytes: int
    """The total size of all workers' files."""
    failure: str
    """Why there is no checkpoint of this step; empty if there is one."""
    warning: str
    stall_s: float
    """How long training waited in this worker."""
    write_s: float
    """How long the write then took in the background."""
    overtaken: int = 0
    """The newer attempt that has begun, after which nothing more is saved, or 0 if there is none.
    """

    def __str__(self) -> str:
        if self.failure:
            return (
                f"warning: no checkpoint of step {self.step}: {self.failure}. The previous "
                "checkpoint is kept, and the next save proceeds as usual."
            )
        warning = f"; {self.warning}" if self.warning else ""
        return (
            f"checkpoint of step {self.step}: {self.num_bytes / 1e6:,.1f} MB written in "
            f"{self.write_s:.2f} s, training stalled for {self.stall_s:.3f} s{warning}"
        )


@dataclass(frozen=True)
class Saving:
    """A single save of one checkpoint."""

    root: Path
    """The directory of checkpoints."""
    exchange: Exchange
    topic: str
    """The prefix of the workers' messages, unique to this save."""
    manifest: Manifest
    """The manifest, which does not list the files yet."""
    memory: HostCopy
    """What this worker saves."""
    keep_last: int
    """The number of newest checkpoints to keep."""
    keep_every: int
    """Checkpoints of every keep_every-th step are kept permanently. 0 keeps none."""
    patience_s: float
    """If a worker does not answer for this long, the save fails."""
    stall_s: float
    newer: Callable[[], int | None]
    """Returns a newer attempt if one has begun."""
    best: Callable[[], Path | None]
    """Returns a checkpoint to keep although it is old."""
    alike: int = 0
    """A fingerprint that must be the same on all workers."""

    @property
    def temporary(self) -> Path:
        """The checkpoint's directory until the checkpoint is complete."""
        return self.root / temporary_name(self.manifest.step, self.manifest.attempt)

    def run(self) -> SaveOutcome:
        """Write this worker's file; wait until the checkpoint is committed or the save fails."""
        start = time.monotonic()
        try:
            message = self._together()
        except dist.DistError as error:
            message = {"failed": f"the workers could not reach each other ({error})"}
        write_s = time.monotonic() - start
        prunes = "bytes" in message and self.exchange.rank == 0
        return SaveOutcome(
            step=self.manifest.step,
            num_bytes=message.get("bytes", 0),
            failure=message.get("failed", ""),
            warning=self._prune() if prunes else "",
            stall_s=self.stall_s,
            write_s=write_s,
            overtaken=message.get("overtaken", 0),
        )

    def _together(self) -> Message:
        here, to_all = self.exchange.rank, f"{self.topic}/all"
        self.exchange.send(f"{self.topic}/{here}", self._write())
        patience_s = self.patience_s
        if here:
            silence = {"failed": f"worker 0 did not answer within {patience_s:g} s"}
            return self.exchange.receive(to_all, patience_s + GRACE_S, keep=True) or silence
        end = time.monotonic() + patience_s
        reports = [
            self.exchange.receive(f"{self.topic}/{rank}", max(0.001, end - time.monotonic()))
            for rank in range(self.exchange.world)
        ]
        message = self._commit(reports)
        self.exchange.send(to_all, message)
        return message

    def _write(self) -> Message:
        name = file_name(self.exchange.rank, self.exchange.world)
        try:
            self.temporary.mkdir(parents=True, exist_ok=True)
            size, sha256 = self.memory.write(self.temporary / name)
        except OSError as error:
            return {"error": f"{error.strerror}: '{(self.temporary / name).absolute()}'"}
        except (
            Exception
        ) as error:  # whatever the error is, the others must not wait for this worker
            return {"error": f"worker {self.exchange.rank}: {type(error).__name__}: {error}"}
        return {"bytes": size, "sha256": sha256, "alike": self.alike}

    def _commit(self, reports: list[Message | None]) -> Message:
        reason = ""
        try:
            manifest = self.manifest.with_files(self._files(reports))
            # The other nodes' files must be here too: this check finds a directory that is not on a
            # file system that all nodes share.
            check_files(self.temporary, manifest.files)
            write_manifest(self.temporary, manifest)
            # A newer attempt can still begin before the renaming. It then removes the temporary
            # directory before it reads anything, and the renaming fails.
            if not self.newer():
                final = self.root / checkpoint_name(manifest.step)
                directory.put_in_place(self.temporary, final, manifest.attempt)
                return {"bytes": sum(file["bytes"] for file in manifest.files.values())}
        except (_FailedError, DamagedError) as error:
            reason = str(error)
        except OSError as error:
            reason = f"{error.strerror}: '{Path(error.filename or self.root).absolute()}'"
        with suppress(OSError):  # already gone, or the next attempt deletes it first
            directory.remove(self.temporary, self.manifest.attempt)
        newer = self.newer()
        return {"overtaken": newer} if newer else {"failed": reason}

    def _files(self, reports: list[Message | None]) -> Message:
        silent = [str(worker) for worker, report in enumerate(reports) if report is None]
        if silent:
            raise _FailedError(
                f"worker {', '.join(silent)} did not answer within {self.patience_s:g} s"
            )
        errors = [report["error"] for report in reports if report and "error" in report]
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise _FailedError(errors[0] + more)
        alike = [report.pop("alike") for report in reports if report]
        other = next((worker for worker, each in enumerate(alike) if each != alike[0]), 0)
        if other:
            raise _FailedError(
                f"worker {other} and worker 0 have different tensors: only DTensors can differ "
                "between workers"
            )
        return {file_name(worker, len(reports)): report for worker, report in enumerate(reports)}

    def _prune(self) -> str:
        """Delete checkpoints that are not among the newest, not the best, and not kept permanently.

        Only checkpoints with complete files count as newest, so one always remains.
        """
        keep_last, keep_every = self.keep_last, self.keep_every
        try:
            directory.finish_removals(self.root)
            best = self.best()
            for checkpoint in checkpoints_in(self.root):
                if keep_last > 0:
                    keep_last -= _looks_whole(checkpoint)
                elif checkpoint == best or not (checkpoint / NAME).exists():
                    continue  # without a manifest, it may not be ours
                elif not keep_every or (step_of(checkpoint.name) or 0) % keep_every:
                    directory.remove(checkpoint, self.manifest.attempt)
        except OSError as error:
            return f"an old checkpoint could not be deleted ({error.strerror})"
        return ""


class _FailedError(Exception):
    """The reason why a save fails."""


def _looks_whole(checkpoint: Path) -> bool:
    try:
        check_sizes(checkpoint)
    except DamagedError:
        return False
    return True
