"""Claims the keys that a submission will compile, or waits for runs that are compiling them."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from trnslurm.cluster.cache import CompileCache
from trnslurm.cluster.claims import Claim, drop_claim, update_claim
from trnslurm.console import Console
from trnslurm.errors import RunError
from trnslurm.node.graphs.manifest import CacheError
from trnslurm.records.run import RunDir
from trnslurm.submission.job import Job
from trnslurm.submission.lock import this_holder
from trnslurm.submission.precompile import Need, need_of

_POLL_S = 0.2


class Claims:
    """The claims of one submission, which are released if it fails."""

    def __init__(self, cache: CompileCache, console: Console) -> None:
        self._cache, self._console = cache, console
        self._taken: list[tuple[Claim, RunDir]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for claim, _ in self._taken:
                with contextlib.suppress(OSError):
                    drop_claim(claim)

    def decide(self, job: Job, run: RunDir, *, waits: bool) -> Need:
        """Decide whether a run needs a precompile job. `waits`: the run waits for another run."""
        if waits:  # a claim would make other runs wait as well
            need = need_of(job, self._cache)
            if _nothing_to_wait_for(need):
                need = replace(need, decision="cold", other=None)
            return need
        return self._claim(job, run)

    def complete(self) -> None:
        """Write the ids of the precompile jobs into the claims, so other runs can wait for them."""
        for claim, run in self._taken:
            jobs = run.record().jobs
            with contextlib.suppress(OSError):  # then other runs compile as well
                job = jobs.get("local") or jobs["precompile"]
                update_claim(claim, replace(claim.holder, job=job))
        self._taken.clear()

    def _claim(self, job: Job, run: RunDir) -> Need:
        """Return what the job needs, and claim its key if the job compiles it."""
        while True:
            need = need_of(job, self._cache)
            if _nothing_to_wait_for(need):
                self._console.say(f"Waiting: {need.left_out}")
                time.sleep(_POLL_S)
            elif need.decision != "cold" or self._take(need, run):
                return need

    def _take(self, need: Need, run: RunDir) -> bool:
        """Claim the key. Return False if another run has claimed it in the meantime."""
        cache, key = self._cache, need.compiled.key
        try:
            claim = cache.take_claim(
                key, this_holder(run=str(run.path)), after=cache.newest_claim(key)
            )
        except CacheError as error:  # the precompile job could not write either
            raise RunError(str(error)) from None
        except OSError as error:
            place = error.filename or cache.root
            self._console.warn(f"{place}: {error.strerror}: others may compile the same graphs")
            return True
        if claim is None:
            return False
        # The run with the stale claim may have completed since.
        if cache.look_up(need.job.ingredients or {}).warm:
            drop_claim(claim)
            return False
        self._taken.append((claim, run))
        return True


def _nothing_to_wait_for(need: Need) -> bool:
    """Check whether the compiling run has no job that Slurm could wait for."""
    if need.decision != "compiling" or need.other is None:
        return False
    return not (need.job.has_queue and need.other.holder.job)
