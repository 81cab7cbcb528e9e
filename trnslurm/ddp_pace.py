"""Publishes a breakdown of a custom script's step time, measured by DistributedDataParallel.

In synchronous training, a step takes equally long on every worker. In every hundredth step, DDP
itself times its forward pass, its backward pass, and how long the worker then waits for the others'
gradients. On a GPU it uses CUDA events, which measure the device's time rather than the host's
(logger.cpp, reducer.cpp and reducer_cuda.cpp in torch/csrc/distributed/c10d, PyTorch 2.9). More
frequent timing could break a script's capture of a CUDA graph, which has to wait for eleven steps
(docs.pytorch.org/docs/2.9/notes/cuda.html). The wait for a batch is timed here, in DataLoader. A
script with no DDP module, or with several, does not provide enough information.

An error ends only the measurement, never the training. Standard library only: the script's own
PyTorch is used.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import math
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from trnslurm.pace import LOOK_S, Pace, Spent, WorkerTime

# When the model is looked for, and how often at most its times are read.
_BEGIN_S, _READ_S = 10.0, 1.0
_KEY = "trnslurm/pace/{rank}"


class DdpPace:
    """The measurements of one worker."""

    def __init__(self, file: Path, rank: int, world: int, store: Any) -> None:
        """Publish in a process group's store. Worker 0 compares the workers and writes the file."""
        self._rank, self._world, self._store = rank, world, store
        self._pace = Pace(file) if rank == 0 else None
        self._model: Any = None
        self._next = time.monotonic() + _BEGIN_S
        self._step: int | None = None
        self._iteration = 0
        self._data_s = 0.0
        self._spent = Spent()
        self._closed = threading.Event()

    def step_done(self, step: int | None = None) -> None:
        """Read DDP's timings occasionally. Call it after every step, in the main thread."""
        self._step = self._step if step is None else step
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _READ_S
        try:
            self._begin() if self._model is None else self._read()
        except Exception:
            self._next = math.inf

    def _begin(self) -> None:
        ddp: Any = sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
        # Instances refer to their class; a list of all objects would take five times as long.
        (model,) = (each for each in gc.get_referrers(ddp) if type(each) is ddp)
        self._model = weakref.ref(model)
        # A separate connection: a call that waits blocks all others on the script's own.
        self._store = self._store.clone()
        self._time_data()
        thread = threading.Thread(target=self._publish, name="pace", daemon=True)
        thread.start()
        atexit.register(self._close, thread)

    def _close(self, thread: threading.Thread) -> None:
        """Make sure that no thread is inside a PyTorch call when Python ends."""
        self._closed.set()
        thread.join(1.0)

    def _read(self) -> None:
        told = self._model()._get_ddp_logging_data()
        iteration, before = told["iteration"], self._iteration
        if iteration == before:
            return
        self._iteration = iteration
        data_s, self._data_s = self._data_s, 0.0
        backward_s, collective_s, overlap_s = (
            told[f"backward_{name}_time"] / 1e9
            for name in ("compute", "comm", "compute_comm_overlap")
        )
        if not (before and backward_s and collective_s):
            return
        spent = {"data": data_s / (iteration - before), "collectives": collective_s - overlap_s}
        whole_s = told["forward_compute_time"] / 1e9 + backward_s + sum(spent.values())
        self._spent = self._spent.with_step(spent, whole_s)

    def _time_data(self) -> None:
        """Add up how long the script waits for its batches, except during an evaluation."""
        torch: Any = sys.modules["torch"]
        loader: Any = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
        plain, thread, model = loader.__next__, threading.get_ident(), self._model

        @functools.wraps(plain)
        def timed(batches: Any) -> Any:
            start = time.monotonic()
            try:
                return plain(batches)
            finally:
                trains = torch.is_grad_enabled() and getattr(model(), "training", False)
                if trains and threading.get_ident() == thread:
                    self._data_s += time.monotonic() - start

        loader.__next__ = timed

    def _publish(self) -> None:
        """Send worker 0 the results so far, and let it compare the workers."""
        keys = [_KEY.format(rank=rank) for rank in range(self._world)]
        with suppress(Exception):  # the store may be gone
            node = int(os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")))
            while not self._closed.wait(LOOK_S):
                told = [node, socket.gethostname(), *self._spent]
                self._store.set(keys[self._rank], json.dumps(told))
                if self._pace and self._store.check(keys):
                    workers = map(json.loads, self._store.multi_get(keys))
                    step = self._iteration if self._step is None else self._step
                    self._pace.look(step, [WorkerTime(n, h, Spent(*s)) for n, h, *s in workers])
