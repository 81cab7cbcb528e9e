"""Records a few steps of a worker on request, and reports where their time went.

`trnslurm profile RUN` writes a request into the run directory. Each worker checks for it
occasionally after a step. A worker that is asked records the next steps with torch.profiler, and
writes a trace for Perfetto and a summary. With a recipe's `profile`, worker 0 does so without a
request. Our jobs and the contract call Tracer.step_done. Standard library only: the worker's own
PyTorch does the work, if the worker has imported it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable

# 1,000 workers then list a directory 100 times a second.
_LOOK_S = 10.0
MOST_STEPS = 100
_BY_RECIPE, _RECIPE = Variable.PROFILE, "recipe"
SPAN = "trnslurm: "
"""The prefix of our own spans' names."""
_STEP = "ProfilerStep"
OTHER, IDLE = "other computing", "Python, or waiting"
COLLECTIVES = "collectives"
_BESIDE = "collectives not hidden by other work"
# Where one is inside another, the first of this list counts.
_KINDS = {
    COLLECTIVES: rf"{SPAN}collectives|nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter",
    "data": rf"{SPAN}data|DataLoader",
    "evaluation and saving": rf"{SPAN}(eval|checkpoint)",
    "attention": r"attention|flash|fmha",
    "matrix products": r"aten::((addm|m|bm|baddbm)m|linear|matmul|conv|mkldnn)|gemm|cutlass|nvjet",
    "optimizer": r"Optimizer|adam|_foreach_|lamb",
    "copies": r"memcpy|memset|aten::(_to_)?copy",
    OTHER: "",
}


class Tracer:
    """The part of one worker, which looks for requests and records."""

    def __init__(self, files: RunFiles, rank: int) -> None:
        self._files, self._rank = files, rank
        self._next_look = time.monotonic() + _LOOK_S
        self._done = read_json(files.profile_request).get("id")  # of an earlier attempt
        # A recipe's: after how many steps, and how many.
        self._after, self._steps = map(int, os.environ.get(_BY_RECIPE, "0 0").split())
        first = not files.profile_file(_RECIPE, rank, "summary.json").exists()
        self._after = self._after if rank == 0 and first else 0
        self._recording: Any = None
        self.records = False
        """Whether the next step is recorded."""
        self.counts = self._after > 0
        """Whether step_done must be called after every step, rather than only occasionally."""
        self._request: dict[str, Any] = {}
        self._left = 0
        self._began = 0.0

    def step_done(self) -> None:
        """Start or end a recording, if it is time."""
        self._after -= 1
        if self.records:
            self._left -= 1
            if self._left <= 0:
                self._end()
            else:
                self._recording.step()
        elif self._after == 0:
            self._begin({"id": _RECIPE, "steps": self._steps})
        elif time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            self._look()
        self.records = self._recording is not None
        self.counts = self.records or self._after > 0

    def _look(self) -> None:
        file = self._files.profile_request
        with suppress(OSError):
            # The directory is listed: NFS may answer from memory for a single file.
            if file.name not in os.listdir(file.parent):  # noqa: PTH208
                return
        request = read_json(file)
        which, steps, workers = (request.get(name) for name in ("id", "steps", "workers"))
        if which == self._done or not isinstance(which, str) or not re.fullmatch(r"[\w-]+", which):
            return
        self._done = which
        asked = isinstance(workers, list) and self._rank in workers
        if asked and isinstance(steps, int) and 0 < steps <= MOST_STEPS:
            self._begin(request)

    def _begin(self, request: dict[str, Any]) -> None:
        self._request, self._left = request, request["steps"]
        torch: Any = sys.modules.get("torch")
        if torch is None:
            self._write({"problem": "the worker has not imported PyTorch"})
            return
        if request.get("memory") and not torch.cuda.is_available():
            self._write({"problem": "only GPU memory can be recorded, and this worker has no GPU"})
            return
        try:
            profiler: Any = importlib.import_module("torch.profiler")  # the worker's own
            kinds = profiler.ProfilerActivity
            which = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
            # Only with a schedule does it mark where a step begins: ProfilerStep#0.
            always: Any = profiler.ProfilerAction.RECORD
            recording = profiler.profile(activities=which, schedule=lambda _: always)
            if request.get("memory"):
                # https://docs.pytorch.org/docs/2.9/torch_cuda_memory.html
                torch.cuda.memory._record_memory_history(stacks="python")
            recording.start()
        except Exception as error:  # another profiler may be active
            if request.get("memory"):
                torch.cuda.memory._record_memory_history(enabled=None)
            self._write({"problem": f"torch.profiler: {error}"})
            return
        self._recording, self._began = recording, time.monotonic()

    def _end(self) -> None:
        recording, self._recording = self._recording, None
        seconds = time.monotonic() - self._began
        request = self._request
        try:
            recording.stop()
            if request.get("memory"):
                self._dump_memory(sys.modules["torch"].cuda.memory)
        except Exception as error:
            self._write({"problem": f"torch.profiler: {error}"})
            return

        def write() -> None:
            try:
                trace = self._files.profile_file(request["id"], self._rank, "json.gz")
                trace.parent.mkdir(parents=True, exist_ok=True)
                recording.export_chrome_trace(str(trace))
                facts = {"steps": request["steps"], "seconds": round(seconds, 6)}
                told = shares(spans_of(recording.events()), seconds)
                self._write(facts | {"shares": told, "trace": trace.name})
            except Exception as error:
                self._write({"problem": f"{type(error).__name__}: {error}"})

        # Training goes on meanwhile.
        threading.Thread(target=write, name="trace", daemon=True).start()

    def _dump_memory(self, memory: Any) -> None:
        place = self._files.profile_file(self._request["id"], self._rank, "memory.pickle")
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            memory._dump_snapshot(str(place))
        finally:
            memory._record_memory_history(enabled=None)

    def _write(self, facts: Mapping[str, Any]) -> None:
        file = self._files.profile_file(self._request["id"], self._rank, "summary.json")
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"rank": self._rank, "host": os.uname().nodename, **facts})


Span = tuple[float, float, str]
"""The start and end in seconds, and the kind."""


def spans_of(events: Iterable[Any]) -> list[Span]:
    """Return what a device did, or else what the busiest thread did.

    Computation hides the collectives of other streams and threads.
    """
    on_device: list[Span] = []
    threads: dict[int, list[Span]] = {}
    for event in events:
        kind = kind_of(event.name)
        # A step, or the forward pass of DistributedDataParallel: only what is inside counts. Older
        # versions of PyTorch do not say what is an annotation.
        annotates = event.name.startswith(_STEP) or getattr(event, "is_user_annotation", False)
        if kind == OTHER and annotates:
            continue
        span = (event.time_range.start / 1e6, event.time_range.end / 1e6, kind)
        if "CUDA" in str(event.device_type):
            on_device.append(span)
        else:
            threads.setdefault(event.thread, []).append(span)
    if on_device:
        return _beside(on_device)
    computing = {
        thread: sum(end - start for start, end, kind in spans if kind != COLLECTIVES)
        for thread, spans in threads.items()
    }
    main = max(computing, key=lambda thread: computing[thread], default=0)
    others = [span for thread, spans in threads.items() if thread != main for span in spans]
    return threads.get(main, []) + _beside(span for span in others if span[2] == COLLECTIVES)


def _beside(spans: Iterable[Span]) -> list[Span]:
    """Return spans in which collectives count only where nothing hides them."""
    return [(*span[:2], _BESIDE if span[2] == COLLECTIVES else span[2]) for span in spans]


def kind_of(name: str) -> str:
    """Return the purpose of an operation or a kernel."""
    return next(kind for kind, words in _KINDS.items() if re.search(words, name, re.IGNORECASE))


def shares(spans: Sequence[Span], seconds: float) -> dict[str, float]:
    """Return the share of the time that each kind took, largest first, and the rest."""
    order = [*_KINDS, _BESIDE]
    marks = [(start, 1, kind) for start, _, kind in spans] + [(e, -1, kind) for _, e, kind in spans]
    under_way = dict.fromkeys(order, 0)
    took = dict.fromkeys(order, 0.0)
    before = 0.0
    for at, change, kind in sorted(marks):
        if now := next((name for name in order if under_way[name]), None):
            took[now] += at - before
        under_way[kind] += change
        before = at
    took[COLLECTIVES] += took.pop(_BESIDE)
    rest = max(0.0, seconds - sum(took.values()))
    known = sorted(took.items(), key=lambda pair: -pair[1])
    told = [(kind, time_s) for kind, time_s in known if time_s > 0] + [(IDLE, rest)]
    return {kind: round(time_s / (seconds or 1.0), 4) for kind, time_s in told}
