"""Writes one checkpoint: all workers in parallel; then one rename makes it exist."""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trnslurm.contract.checkpoints import checkpoint_name, checkpoints_in, step_of, temporary_name
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
from trnslurm.train.checkpoint.tensors import HostCopy
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.store import Store, open_store
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError

# A worker waits for worker 0 this much longer than worker 0 waits for the workers.
GRACE_S = 60

Message = dict[str, Any]


class Exchange:
    """Messages between the workers, by topic."""

    def __init__(self, device: Device, store: Store | None) -> None:
        self.rank = device.rank
        self.world = device.world
        self._store = open_store("checkpoint", store)

    def send(self, topic: str, message: Message) -> None:
        """Send a message."""
        self._store.set(topic, json.dumps(message))

    def receive(self, topic: str, deadline_s: float, *, keep: bool = False) -> Message | None:
        """Wait for a message; None if it misses the deadline. Other workers read it too: keep."""
        try:
            self._store.wait([topic], timedelta(seconds=deadline_s))
        except dist.DistStoreError:
            return None
        message: Message = json.loads(self._store.get(topic))
        if not keep:
            self._store.delete_key(topic)
        return message


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
class SaveOutcome:
    """How a save ended: a checkpoint that exists now, or the reason why there is none."""

    step: int
    num_bytes: int
    """The size of all workers' files."""
    failure: str
    """Why there is no checkpoint of this step; empty: there is one."""
    warning: str
    stall_s: float
    """How long training waited in this worker."""
    write_s: float
    """How long writing then took, in the background."""

    def __str__(self) -> str:
        if self.failure:
            return (
                f"warning: no checkpoint of step {self.step}: {self.failure}; the one before is "
                "kept, and the next one is tried as usual"
            )
        warning = f"; {self.warning}" if self.warning else ""
        return (
            f"checkpoint of step {self.step}: {self.num_bytes / 1e6:,.1f} MB written in "
            f"{self.write_s:.2f} s, training stalled for {self.stall_s:.3f} s{warning}"
        )


def overtaken(newer: int, attempt: int) -> TrainError:
    """Return the error of an attempt when a newer one has begun."""
    return TrainError(
        f"a newer attempt ({newer}) of this run has begun; attempt {attempt} stops and saves "
        "nothing more"
    )


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One save of one checkpoint."""

    environment: Environment
    exchange: Exchange
    topic: str
    """Prefix of the workers' messages; unique to this save."""
    manifest: CheckpointManifest
    """Its files are not known yet."""
    memory: HostCopy
    """This worker's rows."""
    policy: CheckpointPolicy
    stall_s: float

    @property
    def root(self) -> Path:
        """The directory of checkpoints."""
        return self.environment.files.checkpoints

    @property
    def temporary(self) -> Path:
        """The checkpoint's directory until it is whole."""
        return self.root / temporary_name(self.manifest.step, self.manifest.attempt)

    def run(self) -> SaveOutcome:
        """Write this worker's rows; wait until the checkpoint is committed, or the save fails.

        Raise a TrainError if a newer attempt of this run has begun.
        """
        start = time.monotonic()
        try:
            message = self._together()
        except dist.DistError as error:
            message = {"failed": f"the workers cannot reach each other ({error})"}
        write_s = time.monotonic() - start
        if "overtaken" in message:
            raise overtaken(message["overtaken"], self.manifest.attempt)
        prunes = "bytes" in message and self.exchange.rank == 0
        return SaveOutcome(
            step=self.manifest.step,
            num_bytes=message.get("bytes", 0),
            failure=message.get("failed", ""),
            warning=self._prune() if prunes else "",
            stall_s=self.stall_s,
            write_s=write_s,
        )

    def _together(self) -> Message:
        here, to_all = self.exchange.rank, f"{self.topic}/all"
        self.exchange.send(f"{self.topic}/{here}", self._write())
        patience_s = self.policy.patience_s
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
        return {"bytes": size, "sha256": sha256}

    def _commit(self, reports: list[Message | None]) -> Message:
        reason = ""
        try:
            manifest = replace(self.manifest, files=self._files(reports))
            # The other nodes' files must be here too: this check finds a directory that is not on a
            # file system that all nodes share.
            check_files(self.temporary, manifest)
            write_manifest(self.temporary, manifest)
            # A newer attempt can still begin before the renaming. It then removes the temporary
            # directory before it reads anything, and the renaming fails.
            if not self._overtaken():
                final = self.root / checkpoint_name(manifest.step)
                directory.put_in_place(self.temporary, final, manifest.attempt)
                return {"bytes": manifest.num_bytes}
        except (TrainError, DamagedError) as error:
            reason = str(error)
        except OSError as error:
            reason = f"{error.strerror}: '{Path(error.filename or self.root).absolute()}'"
        with suppress(OSError):  # already gone, or the next attempt deletes it first
            directory.remove(self.temporary, self.manifest.attempt)
        newer = self._overtaken()
        return {"overtaken": newer} if newer else {"failed": reason}

    def _files(self, reports: list[Message | None]) -> Message:
        silent = [str(worker) for worker, report in enumerate(reports) if report is None]
        if silent:
            raise TrainError(
                f"worker {', '.join(silent)} did not answer within {self.policy.patience_s:g} s"
            )
        errors = [report["error"] for report in reports if report and "error" in report]
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise TrainError(errors[0] + more)
        return {file_name(worker, len(reports)): report for worker, report in enumerate(reports)}

    def _overtaken(self) -> int | None:
        return directory.newer_attempt(self.environment)

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
