"""Checkpoints for any script: trnslurm.save() and trnslurm.load().

    state = {"model": model, "optimizer": optimizer, "loader": loader}
    first = trnslurm.load(state)                    # the steps that are done; 0 at the start
    for step in range(first + 1, steps + 1):
        train(step)
        if step % 500 == 0 or trnslurm.should_stop():
            trnslurm.save(step, state)              # writes while training continues

All workers make the same calls. Each worker saves its own part of sharded tensors (FSDP2, tensor
parallelism) and a share of the tensors that all workers have. Any number of workers can load the
checkpoint. These calls need PyTorch 2.4 or newer and work without a launcher. In a trnslurm run,
they also report the checkpoint.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from trnslurm import calls
from trnslurm.contract.checkpoints import checkpoint_name, checkpoints_in
from trnslurm.contract.rundir import CHECKPOINTS, RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.saves import directory as directories
from trnslurm.saves.background import in_background
from trnslurm.saves.commit import Exchange, SaveOutcome, Saving
from trnslurm.saves.manifest import (
    NAME,
    OF_SCRIPTS,
    DamagedError,
    check_sizes,
    file_name,
    hash_files,
    read_manifest,
    sealed,
    unsealed,
)
from trnslurm.saves.memory import DTYPES, HostCopy
from trnslurm.saves.pieces import Files, Part, fingerprint, parts_of, to_write
from trnslurm.saves.state import load_part, saved_of
from trnslurm.saves.values import decode, encode

_PATIENCE_S = 1800.0
# Hashing the largest checkpoint from a slow disk may take a long time.
_ELECTION_S = 2 * 3600.0
_NAMED = 3
_OF_WORKERS = "each_worker"


def save(
    step: int,
    state: Mapping[str, Any],
    *,
    each_worker: Mapping[str, Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
    keep: int = 2,
    keep_every: int = 0,
    wait: bool = False,
) -> None:
    """Save a state after a step; training waits only until the state is copied to host memory.

    The state may contain models, optimizers, other objects with state_dict() and load_state_dict(),
    tensors, numbers, and lists and dicts of them. Everything except a DTensor must be the same on
    all workers. Put values that differ, such as random states, into `each_worker`. The checkpoint
    is step-N in the directory, which defaults to the run's directory of checkpoints, or to
    ./checkpoints outside a run. The `keep` newest checkpoints and those of every keep_every-th step
    are kept. If a save fails, it prints a warning, and the next save is tried as usual. With
    `wait`, and for the last save, a failure is an error.
    """
    if keep < 1:
        raise ValueError(f"trnslurm.save: keep is {keep}: it must be 1 or more")
    saver = _saver(directory)
    saver.save(int(step), state, each_worker or {}, keep, keep_every)
    if wait or calls.ends_now():
        saver.settle(strict=wait)


def load(
    state: MutableMapping[str, Any],
    *,
    each_worker: MutableMapping[str, Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> int:
    """Load the newest complete checkpoint into a state in place; return its step, or 0 without one.

    The number of workers may differ from that of the save. In that case, `each_worker` is not
    loaded. The state may be a part of what was saved, such as only the model.
    """
    return _saver(directory).load(state, each_worker)


@dataclass(frozen=True)
class _Manifest:
    """What a checkpoint contains besides its tensors."""

    step: int
    attempt: int
    workers: int
    values: dict[str, Any]
    """The values that are not tensors, and the names of the tensors."""
    files: dict[str, Any] = field(default_factory=dict)
    format: str = OF_SCRIPTS

    def with_files(self, files: dict[str, Any]) -> _Manifest:
        return replace(self, files=files)

    def to_json(self) -> bytes:
        return sealed(asdict(self))


class _Saver:
    """The checkpoints in one directory, as this worker sees them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rank, self.world, store = _place(f"trnslurm/save/{crc32(str(root).encode())}")
        self._exchange = Exchange(self.rank, self.world, store)
        self._memory = HostCopy()
        self._calls = 0
        self._running: Future[SaveOutcome] | None = None
        run_dir = os.environ.get(Variable.RUN_DIR) or None
        self._run = RunFiles(Path(run_dir)) if run_dir else None
        self._attempt = int(os.environ.get(Variable.ATTEMPT, "0")) if run_dir else 0
        self._own = run_dir is not None and root.is_relative_to(Path(run_dir).absolute())
        """Whether only this run writes here, so that leftovers can be removed."""
        self._swept = False

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        each_worker: Mapping[str, Any],
        keep: int,
        keep_every: int,
    ) -> None:
        start = time.monotonic()
        self.settle()
        tensors: dict[str, Tensor] = {}
        values = {
            name: encode(saved_of(value, state), name, tensors) for name, value in state.items()
        }
        parts = parts_of(tensors, self.rank, self.world)
        own: dict[str, Tensor] = {}
        told = json.dumps(encode(dict(each_worker), f"worker-{self.rank}", own))
        pieces, texts = to_write(
            parts | {n: Part(t, (0,) * t.dim(), tuple(t.shape), mine=True) for n, t in own.items()}
        )
        for piece in pieces:
            if piece.tensor.dtype not in DTYPES:
                raise TypeError(
                    f"trnslurm.save: {piece.key} has dtype {piece.tensor.dtype}, which "
                    "safetensors does not support: convert it to another dtype"
                )
        self._memory.copy(pieces, {**texts, _OF_WORKERS: told})
        self._calls += 1
        saving = Saving(
            root=self.root,
            exchange=self._exchange,
            topic=f"save-{self._calls}",
            manifest=_Manifest(step, self._attempt, self.world, values),
            memory=self._memory,
            keep_last=keep,
            keep_every=keep_every,
            patience_s=_PATIENCE_S,
            stall_s=time.monotonic() - start,
            newer=self._newer,
            best=lambda: None,
            alike=fingerprint(parts),
        )
        self._running = in_background("checkpoint", lambda: self._write(saving))

    def _write(self, saving: Saving) -> SaveOutcome:
        if not self._swept:  # the same on all workers: before any of them writes
            failure = ""
            try:
                self._sweep()
            except OSError as error:
                failure = f"{error.strerror}: '{error.filename or self.root}'"
            self._swept = not (
                failure := str(self._say(saving.topic, {"failed": failure})["failed"])
            )
            if failure:
                return SaveOutcome(saving.manifest.step, 0, failure, "", saving.stall_s, 0.0)
        outcome = saving.run()
        if self.rank == 0 and not outcome.failure and not outcome.overtaken:
            try:
                calls.saved(outcome.step, self.root / checkpoint_name(outcome.step))
            except OSError as error:
                return replace(outcome, warning=f"it could not be reported ({error.strerror})")
        return outcome

    def settle(self, *, strict: bool = False) -> None:
        """Wait for the save in progress, and print how it ended."""
        if self._running is None:
            return
        running, self._running = self._running, None
        outcome = running.result()
        if outcome.overtaken:
            raise RuntimeError(
                f"a newer attempt ({outcome.overtaken}) of this run has begun: attempt "
                f"{self._attempt} saves nothing more"
            )
        if strict and outcome.failure:
            raise RuntimeError(f"no checkpoint of step {outcome.step}: {outcome.failure}")
        if self.rank == 0:
            print(outcome, flush=True)

    def load(self, state: MutableMapping[str, Any], each_worker: Any) -> int:
        self.settle()
        self._calls += 1
        found = self._elect(f"load-{self._calls}")
        if found is None:
            return 0
        manifest = _Manifest(**unsealed(read_manifest(found)))
        same = file_name(self.rank, manifest.workers) if manifest.workers == self.world else None
        files = Files(found, manifest.files, same)
        try:
            wrong: list[str] = []
            for name, value in list(state.items()):
                wrong = wrong or load_part(name, value, state, manifest.values, files)
            if not wrong and each_worker is not None and same:
                self._load_own(each_worker, files, same)
        except DamagedError as error:
            raise RuntimeError(f"{found} could not be read ({error})") from None
        if wrong:
            more = f" (and {len(wrong) - _NAMED} more)" if len(wrong) > _NAMED else ""
            raise ValueError(
                f"trnslurm.load: {found} is from another training run: "
                f"{'; '.join(wrong[:_NAMED])}{more}: use another directory, or build the same "
                "state as when it was saved"
            )
        if self.rank == 0:
            print(
                f"resuming from {found.name}, saved by {manifest.workers} "
                f"worker{'s' * (manifest.workers > 1)} in attempt {manifest.attempt}",
                flush=True,
            )
        return manifest.step

    def _load_own(self, each_worker: MutableMapping[str, Any], files: Files, name: str) -> None:
        told = json.loads(files.texts_of(name).get(_OF_WORKERS, "{}"))
        each_worker.update(decode(told, files.first))

    def _newer(self) -> int | None:
        if self._run is None:
            return None
        newest = max(self._run.attempt_numbers("train"), default=0)
        return newest if newest > self._attempt else None

    def _elect(self, topic: str) -> Path | None:
        """Find the newest complete checkpoint; all workers share the work of checking it."""
        if self._own:
            self._sweep()
        candidates = self._candidates() if self.rank == 0 else []
        damaged: list[tuple[Path, str]] = []
        number = 0
        while True:
            number += 1
            name = candidates[0].name if candidates else ""
            told = self._say(f"{topic}/{number}", {"name": name, "damaged": bool(damaged)})
            if not told["name"]:
                if told["damaged"]:
                    raise RuntimeError(
                        f"all checkpoints in {self.root} are damaged"
                        + (f": {damaged[0][0].name}: {damaged[0][1]}" if damaged else "")
                        + ": to start from step 0, move the directory away"
                    )
                return None
            found = self.root / str(told["name"])
            self._exchange.send(f"{topic}/{number}/{self.rank}", {"wrong": self._check(found)})
            wrong = ""
            if self.rank == 0:
                answers = [
                    self._exchange.receive(f"{topic}/{number}/{rank}", _ELECTION_S)
                    or {"wrong": f"worker {rank} did not report what it read"}
                    for rank in range(self.world)
                ]
                wrong = next((one["wrong"] for one in answers if one["wrong"]), "")
            if not self._say(f"{topic}/{number}/all", {"wrong": wrong})["wrong"]:
                self._set_aside(damaged)
                return found
            damaged += [(candidates.pop(0), wrong)] if self.rank == 0 else []

    def _say(self, topic: str, message: dict[str, Any]) -> dict[str, Any]:
        """Send worker 0's message to all workers."""
        if self.rank == 0:
            self._exchange.send(topic, message)
            return message
        told = self._exchange.receive(topic, _ELECTION_S, keep=True)
        if told is None:
            raise RuntimeError(f"{self.root}: worker 0 did not report what to resume from")
        return told

    def _candidates(self) -> list[Path]:
        if newer := self._newer():
            raise RuntimeError(f"a newer attempt ({newer}) of this run has begun")
        return checkpoints_in(self.root)

    def _sweep(self) -> None:
        """Delete what earlier attempts left half written, which also stops those attempts."""
        self._swept = True
        if self.rank == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            directories.sweep(self.root, self._attempt)

    def _check(self, checkpoint: Path) -> str:
        """Check this worker's share of the files; return what is wrong."""
        try:
            values = check_sizes(checkpoint)
        except DamagedError as error:
            if not (checkpoint / NAME).exists():
                raise RuntimeError(_foreign(checkpoint)) from None
            return str(error)
        if values.get("format") != OF_SCRIPTS:
            raise RuntimeError(_foreign(checkpoint))
        mine = sorted(values["files"])[self.rank :: self.world]
        try:
            hash_files(checkpoint, {name: values["files"][name] for name in mine})
        except DamagedError as error:
            return str(error)
        return ""

    def _set_aside(self, damaged: list[tuple[Path, str]]) -> None:
        for path, reason in damaged:
            then = "trying an older one"
            if self._own:
                then = f"kept as {directories.set_aside(path, self._attempt).name}"
            print(f"warning: {path} is damaged ({reason}): {then}", flush=True)


def _foreign(checkpoint: Path) -> str:
    return f"{checkpoint} was not written by trnslurm.save: use another directory"


def _place(purpose: str) -> tuple[int, int, Any]:
    """Return the rank, the number of workers, and a new connection to the process group's store."""
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                "trnslurm.save: several workers were started, but this one has not initialized a "
                "process group: call torch.distributed.init_process_group() first"
            )
        return 0, 1, _HostStore()
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    torch_dist: Any = dist  # its stubs do not list these names
    store = torch_dist.distributed_c10d._get_default_store()
    # A waiting call blocks all others on its connection.
    if hasattr(store, "clone"):
        own = store.clone()
    else:
        own = torch_dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                            is_master=False)  # fmt: skip
    prefixed = torch_dist.PrefixStore(f"{purpose}/{restart}", own)
    return dist.get_rank(), dist.get_world_size(), prefixed


class _HostStore:
    """The store of a worker that is the only one."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._told[key] = value

    def wait(self, keys: list[str], timeout: Any) -> None:
        """Return at once, because the only worker has already set all keys."""

    def get(self, key: str) -> str:
        return self._told[key]

    def delete_key(self, key: str) -> None:
        del self._told[key]


_savers: dict[Path, _Saver] = {}


def _saver(directory: str | os.PathLike[str] | None) -> _Saver:
    root = Path(directory or os.environ.get(Variable.CHECKPOINTS) or CHECKPOINTS).absolute()
    if root not in _savers:
        if not _savers:
            # Later, at atexit's time, no thread can be started (Python 3.12, Lib/threading.py).
            getattr(threading, "_register_atexit", atexit.register)(_finish)
        _savers[root] = _Saver(root)
    return _savers[root]


def _finish() -> None:
    """Wait for the last save, unless this process has failed and the others may be gone."""
    if hasattr(sys, "last_value"):
        return
    try:
        for saver in _savers.values():
            saver.settle(strict=True)
    except Exception as error:  # Python would ignore it here, and end with code 0
        print(f"error: {error}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
