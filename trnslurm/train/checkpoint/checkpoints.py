"""The checkpoints of a training loop: finds the newest, loads it, and saves when due."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trnslurm.contract.checkpoints import CHECKPOINT_FORMAT, checkpoint_name
from trnslurm.saves import directory
from trnslurm.saves.background import in_background
from trnslurm.saves.commit import Exchange, SaveOutcome, Saving
from trnslurm.saves.memory import HostCopy
from trnslurm.train.checkpoint.manifest import (
    CheckpointManifest,
    differences,
    facts_of,
    settings_of,
    shorten,
)
from trnslurm.train.checkpoint.reading import find_best, newest_whole
from trnslurm.train.checkpoint.state import (
    TensorShard,
    TrainingState,
    cut_rows,
    load_whole,
    own_rows,
)
from trnslurm.train.checkpoint.tensors import open_own, open_rows, pieces_of, texts_of
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.store import Store, open_store
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import JobPlan

# The kinds of tensors in a checkpoint without the optimizer's state.
MINIMAL = ["parameter"]
# Hashing the largest checkpoint from a slow disk may take long; without a bound a worker whose
# rank 0 has died would wait forever.
ELECTION_S = 2 * 3600
# How often worker 0 checks between saves whether a newer attempt has begun.
FENCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """What is saved, which checkpoints are kept, and how long a save may take."""

    keep_last: int = 2
    """The number of newest checkpoints to keep."""
    keep_every: int = 0
    """Checkpoints of every keep_every-th step are kept permanently. 0 keeps none."""
    keep_best: str = ""
    """The score whose best checkpoint (highest score or lowest loss) is kept. Empty keeps none."""
    save_optimizer: bool = True
    """Whether the optimizer's state is saved. Otherwise a checkpoint has only parameters."""
    patience_s: float = 1800
    """If a worker does not answer for this long, the save fails."""


class Checkpoints:
    """The checkpoints of a run, as one worker sees them. All workers make the same calls.

    A precompile saves none, because its losses are not valid.
    """

    def __init__(
        self,
        device: Device,
        plan: JobPlan,
        environment: Environment,
        policy: CheckpointPolicy,
        *,
        facts: dict[str, Any] | None = None,
        store: Store | None = None,
    ) -> None:
        """Open the run's checkpoints.

        The facts are additional values that a run must have in common with a checkpoint, such as
        its data.
        """
        self._root = environment.files.checkpoints
        self._device = device
        self._environment = environment
        self._global_batch = plan.batch.global_batch
        self._facts = facts_of(plan, facts or {})
        self._settings = settings_of(plan)
        self._policy = policy
        self._exchange = Exchange(device.rank, device.world, open_store("checkpoint", store))
        self._memory = HostCopy()
        self._active = environment.phase == "train"
        self._saves = 0
        self._running: Future[SaveOutcome] | None = None
        self._next_look = 0.0
        self._kept: dict[str, dict[str, Tensor]] = {}
        self.last: SaveOutcome | None = None
        """How the last finished save of this attempt ended."""

    def keep(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Save additional tensors under this kind, and load them in place when a run resumes."""
        self._kept[kind] = {name: tensor.detach() for name, tensor in tensors.items()}

    def resume(self, optimizer: TrainingState) -> int:
        """Load the newest complete checkpoint, if there is one; return its step, or 0."""
        saved = self.newest()
        if saved is None:
            return 0
        self.load(saved, optimizer)
        return saved.step

    def newest(self) -> CheckpointManifest | None:
        """Find the newest complete checkpoint: worker 0 looks, and announces it to all workers."""
        if not self._active:
            return None
        if self._device.rank == 0:
            manifest = self._elect()
            found = manifest.to_json().decode() if manifest else ""
            self._exchange.send("newest", {"manifest": found})
            return manifest
        message = self._exchange.receive("newest", ELECTION_S, keep=True)
        if message is None:
            raise TrainError(
                f"{self._root}: worker 0 did not report which checkpoint to resume from"
            )
        found = message["manifest"]
        return (
            CheckpointManifest.from_json(found.encode(), where=str(self._root)) if found else None
        )

    def load(self, manifest: CheckpointManifest, optimizer: TrainingState) -> None:
        """Load parameters and optimizer; raise a TrainError if the checkpoint does not fit."""
        checkpoint = self._root / checkpoint_name(manifest.step)
        shapes = {name: list(shape) for name, shape in optimizer.whole_shapes().items()}
        kinds = list(optimizer.kinds)
        fresh = manifest.kinds == MINIMAL != kinds
        wrong = [
            *differences(manifest.facts, self._facts),
            *differences({"optimizer": kinds if fresh else manifest.kinds}, {"optimizer": kinds}),
            *differences(manifest.shapes, shapes),
            *(
                f"{kind} has different tensors"
                for kind, kept in _shapes_of(self._kept).items()
                if manifest.kept.get(kind, kept) != kept
            ),
        ]
        if wrong:
            more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
            raise TrainError(
                f"{checkpoint} is from another training run: {', '.join(wrong[:3])}{more}; "
                "start a new run, or use the same values as before"
            )
        thawed = [name for name in manifest.frozen if name not in optimizer.frozen]
        if thawed and not fresh and kinds != MINIMAL:
            raise TrainError(
                f"{checkpoint} has no optimizer state for {', '.join(shorten(thawed))}, which "
                "were frozen when it was saved: freeze them as before, or start a new run with "
                f"train.init_from={checkpoint}"
            )
        # With moments of 0 updates count from 0 too, or the first updates would be far too large.
        read = open_rows(checkpoint, manifest)
        optimizer.load(read, updates=0 if fresh else manifest.step)
        if manifest.owners and not fresh:
            optimizer.load_own_state(open_own(checkpoint, manifest))
        for kind, tensors in self._kept.items():
            if kind in manifest.kept:
                load_whole(tensors, kind, read)
        self._device.say(
            f"resuming from {checkpoint.name}, written by {manifest.workers} workers "
            f"({manifest.device}) in attempt {manifest.attempt}"
        )
        if fresh:
            self._device.say(
                "note: the checkpoint has no optimizer state, so the moments start at zero, as at "
                "step 0"
            )
        frozen = [name for name in optimizer.frozen if name not in manifest.frozen]
        for change, names in (("frozen", frozen), ("trained again", thawed)):
            if names:
                self._device.say(f"note: now {change}: {', '.join(shorten(names))}")
        for kind in self._kept.keys() - manifest.kept.keys():
            self._device.say(
                f"note: the checkpoint has no {kind}, so it starts with the job's initial values"
            )
        for change in differences(manifest.settings, self._settings):
            self._device.say(f"note: {change}")

    def save(self, step: int, optimizer: TrainingState, *, score: float | None = None) -> None:
        """Save the state after a step; training waits only for the copy to host memory.

        `score` is the score that keep_best names, if this step was evaluated. Call save after the
        step has been given to the device (Device.sync). It waits for an earlier save that is still
        in progress.
        """
        if not self._active:
            # If this needs a graph, the precompile must see it.
            self._memory.copy(pieces_of([*optimizer.shards(), *self._kept_shards()]))
            return
        self._saves += 1
        start = time.monotonic()
        with self._device.timer("checkpoint"):
            self._settle()
            shards, own = optimizer.shards(), optimizer.own_state()
            if not self._policy.save_optimizer:
                shards, own = [shard for shard in shards if shard.kind in MINIMAL], None
            self._memory.copy(pieces_of([*shards, *self._kept_shards()]), texts_of(own))
        policy = self._policy
        saving = Saving(
            root=self._root,
            exchange=self._exchange,
            topic=f"save-{self._saves}",
            manifest=self._manifest(step, optimizer, score),
            memory=self._memory,
            keep_last=policy.keep_last,
            keep_every=policy.keep_every,
            patience_s=policy.patience_s,
            stall_s=time.monotonic() - start,
            newer=lambda: newer_attempt(self._environment),
            best=lambda: find_best(self._root, policy.keep_best) if policy.keep_best else None,
        )
        self._running = in_background("checkpoint", saving.run)

    def poll(self) -> None:
        """Check for a finished save without waiting for other workers; call it at every step.

        Raise a TrainError if a newer attempt has begun. Either a save notices that, or worker 0,
        which checks every few seconds.
        """
        if self._active and self._device.rank == 0 and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + FENCE_S
            with suppress(OSError):  # an unreadable directory does not prove a newer attempt
                self._give_way()
        if self._running and self._running.done():
            self._settle()

    def wait(self) -> None:
        """Wait for the last save."""
        with self._device.timer("checkpoint"):
            self._settle()

    def require_last(self) -> None:
        """Wait for the last save; raise a TrainError if it failed.

        Call it at the end of training. Otherwise the steps since the last checkpoint could be lost
        silently.
        """
        self.wait()
        if self.last and self.last.failure:
            raise TrainError(
                f"the last checkpoint, of step {self.last.step}, could not be made "
                f"({self.last.failure}): fix that and run again, to resume from the previous "
                "checkpoint"
            )

    def _settle(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            self.last = running.result()
            if self.last.overtaken:
                raise overtaken(self.last.overtaken, self._environment.attempt)
            self._device.say(str(self.last))

    def _kept_shards(self) -> Iterator[TensorShard]:
        """Yield this worker's rows of the tensors that the job keeps and that all workers have."""
        for kind, tensors in self._kept.items():
            for name, tensor in tensors.items():
                if rows := own_rows(tensor.shape, self._device.rank, self._device.world):
                    yield TensorShard(name, kind, rows, *cut_rows(tensor, rows))

    def _kinds(self, optimizer: TrainingState) -> list[str]:
        return list(optimizer.kinds) if self._policy.save_optimizer else MINIMAL

    def _manifest(
        self, step: int, optimizer: TrainingState, score: float | None
    ) -> CheckpointManifest:
        best = self._policy.keep_best
        return CheckpointManifest(
            format=CHECKPOINT_FORMAT,
            step=step,
            samples=step * self._global_batch,
            attempt=self._environment.attempt,
            workers=self._device.world,
            device=self._device.name,
            facts=self._facts,
            settings=self._settings,
            kinds=self._kinds(optimizer),
            shapes={name: list(shape) for name, shape in optimizer.whole_shapes().items()},
            frozen=optimizer.frozen,
            owners=optimizer.owners(),
            kept=_shapes_of(self._kept),
            files={},
            score={} if score is None or not best else {best: score},
        )

    def _elect(self) -> CheckpointManifest | None:
        self._give_way()
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            directory.sweep(self._root, self._environment.attempt)
            return self._newest_whole()
        except OSError as error:
            raise TrainError(f"{error.filename or self._root}: {error.strerror}") from None

    def _newest_whole(self) -> CheckpointManifest | None:
        manifest, damaged = newest_whole(self._root)
        if manifest is None and damaged:
            path, reason = damaged[0]
            raise TrainError(
                f"{path} is damaged ({reason}), and no other checkpoint is whole; to start from "
                f"step 0, move {self._root} away"
            )
        # Set aside, or they would count among the newest that are kept.
        for path, reason in damaged:
            aside = directory.set_aside(path, self._environment.attempt)
            self._device.say(f"warning: {path} is damaged ({reason}): kept as {aside.name}")
        return manifest

    def _give_way(self) -> None:
        """Raise a TrainError if a newer attempt has begun."""
        if newer := newer_attempt(self._environment):
            raise overtaken(newer, self._environment.attempt)


def overtaken(newer: int, attempt: int) -> TrainError:
    """Return the error of an attempt after a newer one has begun."""
    return TrainError(
        f"a newer attempt ({newer}) of this run has begun; attempt {attempt} stops and saves "
        "nothing more"
    )


def newer_attempt(environment: Environment) -> int | None:
    """Return the newest attempt of the phase that the batch scripts have begun after this one."""
    attempt = environment.attempt
    newest = max(environment.files.attempt_numbers(environment.phase), default=attempt)
    return newest if newest > attempt else None


def _shapes_of(kept: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, list[int]]]:
    return {
        kind: {name: list(tensor.shape) for name, tensor in tensors.items()}
        for kind, tensors in kept.items()
    }
