"""Tokenizing, in many processes where that helps; none outlives the one that started them."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from trnslurm.prepare import chunks, tokenizer
from trnslurm.prepare.chunks import Chunk
from trnslurm.prepare.errors import KeptError
from trnslurm.prepare.progress import Progress

# How often signals are let in while chunks are worked on.
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every worker needs to know."""

    directory: Path
    """Of the finished chunks."""
    tokenizer: Path
    end_of_text: str
    dtype: str


def tokenize(todo: list[Chunk], work: Work, processes: int) -> dict[int, int]:
    """Tokenize the chunks that are not finished yet; give the number of documents in each."""
    work.directory.mkdir(exist_ok=True)
    documents = {}
    for chunk in todo:
        if finished := chunks.load(work.directory, chunk.number):
            documents[chunk.number] = len(finished.lengths)
    left = [chunk for chunk in todo if chunk.number not in documents]
    total = sum(chunk.bytes for chunk in todo)
    done = total - sum(chunk.bytes for chunk in left)
    progress = Progress("tokenizing", total, before=done)
    if left:
        processes = min(processes, len(left))
        run = _run_here(left, work) if processes == 1 else _run(left, work, processes)
        for chunk, count in run:
            documents[chunk.number] = count
            done += chunk.bytes
            progress.show(done)
    progress.finish()
    return documents


def _run_here(left: list[Chunk], work: Work) -> Iterator[tuple[Chunk, int]]:
    """Run the chunks one after another: a process of its own takes longer to start than most."""
    loaded = _load(work)
    for chunk in left:
        yield chunk, chunks.tokenize(chunk, loaded, work.dtype, work.directory)


def _run(left: list[Chunk], work: Work, processes: int) -> Iterator[tuple[Chunk, int]]:
    """Run the chunks, no more of them waiting than keep everyone busy; give the finished ones."""
    waiting = iter(left)
    running: dict[Future[int], Chunk] = {}
    # Spawned and not forked: the tokenizers library does not survive a fork from its threads.
    context = multiprocessing.get_context("spawn")
    # Made first: with it Python starts a helper of its own, and unblocks these signals then.
    pool = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(work,))
    with _signals_blocked() as let_in:
        try:
            while True:
                while len(running) < 2 * processes and (chunk := next(waiting, None)):
                    running[pool.submit(_tokenize, chunk)] = chunk
                if not running:
                    return
                let_in()
                for future in wait(running, _LOOK_S, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool:
            # The others may wait for a lock that the dead one held; and what the pool sends them,
            # TERM, they block.
            for worker in multiprocessing.active_children():
                worker.kill()
            raise KeptError(
                "a tokenizing process died (where memory is short, use fewer --processes)"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[Callable[[], None]]:
    """Block what Ctrl-C and scancel send to every process; give a function that lets it in.

    Workers started here block it too, and finish their chunks. And no handler raises in the middle
    of the pool, which would leave it with a lock that nobody gives back.
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


def _start(work: Work) -> None:
    """Set up one worker."""
    global _work, _loaded
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work, _loaded = work, _load(work)


def _load(work: Work) -> tokenizer.Loaded:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one CPU
    return tokenizer.load(work.tokenizer, work.end_of_text)


def _end_with_parent() -> None:
    """End this process when the parent is gone, which a pool alone does not notice."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _tokenize(chunk: Chunk) -> int:
    return chunks.tokenize(chunk, _loaded, _work.dtype, _work.directory)


_work: Work
_loaded: tokenizer.Loaded
