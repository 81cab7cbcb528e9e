"""Processes many pieces, in several processes if that helps; they end with their parent."""

import contextlib
import multiprocessing
import os
import signal
import threading
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare.errors import KeptError
from trnslurm.prepare.progress import P, Progress

# How often signals are handled while processes are working.
_LOOK_S = 0.2


M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class Work(ABC, Generic[P, M]):
    """The work on each piece, which writes a file and returns facts about that file.

    Every worker gets a copy.
    """

    name: ClassVar = "tokenizing"
    unit: ClassVar = "bytes"
    """The unit of the pieces' sizes."""

    directory: Path
    """The directory of the finished pieces."""

    @abstractmethod
    def find(self, piece: P) -> M | None:
        """Return what an earlier run made from the piece, if it is complete."""

    @abstractmethod
    def start(self) -> Callable[[P], M]:
        """Set up one worker; return the function that processes a piece."""

    def path(self, number: int) -> Path:
        """Return the file of a finished piece."""
        return self.directory / f"{number:07}.npz"

    def arrays(self, number: int) -> dict[str, NDArray[Any]]:
        """Return the arrays of a finished piece."""
        arrays = read_arrays(self.path(number))
        if arrays is None:
            raise KeptError(f"{self.path(number)} is damaged")
        return arrays


def read_arrays(path: Path) -> dict[str, NDArray[Any]] | None:
    """Read a file of arrays, or return None if it is missing or damaged (it has checksums)."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def finish(pieces: list[P], work: Work[P, M], processes: int) -> list[M]:
    """Process the pieces that are not finished yet; return the facts about every piece."""
    work.directory.mkdir(exist_ok=True)
    made = {n: found for n, piece in enumerate(pieces) if (found := work.find(piece)) is not None}
    left = [number for number in range(len(pieces)) if number not in made]
    total = sum(piece.size for piece in pieces)
    done = total - sum(pieces[number].size for number in left)
    progress = Progress(work.name, total, before=done, unit=work.unit)
    processes = min(processes, len(left))
    todo = [pieces[number] for number in left]
    results: Iterator[tuple[int, M]] = iter(())
    if processes > 1:
        results = _run(todo, work, processes)
    elif todo:  # in this process: starting another takes longer than most work
        _set_up(work)
        results = enumerate(map(_do_piece, todo))
    for place, result in results:
        made[left[place]] = result
        done += todo[place].size
        progress.show(done)
    progress.finish()
    return [made[number] for number in range(len(pieces))]


def _run(todo: list[P], work: Work[P, M], processes: int) -> Iterator[tuple[int, M]]:
    """Work in processes; yield each piece when it is done. Only a few pieces wait at a time."""
    waiting = iter(range(len(todo)))
    running: dict[Future[M], int] = {}
    is_forked = _is_alone()
    if is_forked:
        _set_up(work)
    context = multiprocessing.get_context("fork" if is_forked else "spawn")
    here = None if is_forked else work
    # Before signals are blocked: Python may start a helper process with the pool, and unblock them.
    pool = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(here,))
    with _signals_blocked() as let_in:
        try:
            while True:
                while len(running) < 2 * processes and (place := next(waiting, None)) is not None:
                    running[pool.submit(_do, todo[place])] = place
                if not running:
                    return
                let_in()
                for future in wait(running, _LOOK_S, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool:
            # The others may be waiting for a lock that the dead one held, and they block TERM,
            # which the pool sends them.
            for worker in multiprocessing.active_children():
                worker.kill()
            raise KeptError(
                f"a {work.name} process died (if memory is short, use fewer --processes)"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[Callable[[], None]]:
    """Block the signals that Ctrl-C and scancel send; yield a function that lets them in.

    Workers inherit the block, and finish their pieces. So no handler raises in the middle of the
    pool's code, which would leave a lock locked.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def let_in() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    try:
        yield let_in
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_alone() -> bool:
    """Check whether this process has only one thread, including library threads.

    If so, it can be forked. A fork takes milliseconds, while a new Python interpreter takes a
    quarter of a second to import and load everything again. But a lock that another thread holds
    would never be released in the copy. tokenizers has threads after training, and pyarrow after
    reading.
    """
    return len([*Path("/proc/self/task").iterdir()]) == 1


def _start(work: Work[Any, Any] | None) -> None:
    """Start as a worker; a forked worker gets no work, because its parent has set it up."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if work:
        _set_up(work)


def _set_up(work: Work[Any, Any]) -> None:
    global _do_piece
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one CPU
    _do_piece = work.start()


def _end_with_parent() -> None:
    """End this process when its parent is gone, which a pool does not notice by itself."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _do(piece: Any) -> Any:
    return _do_piece(piece)


_do_piece: Callable[[Any], Any]
