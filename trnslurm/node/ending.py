"""Decides how an attempt of a training ended, and whether its job begins again.

    python -m trnslurm.node.ending begin --attempt 3 --max-crashes 3
    python -m trnslurm.node.ending end --attempt 3 --max-crashes 3 --exit-code 1 --requeue

The batch script asks, in the run directory: `begin` prints why the run is given up, or nothing;
`end` prints a line each for the state, the reason, the cause, the state if Slurm refuses to requeue
the job, and the nodes to leave out (`-`: as they are). The lines are safe to read in a shell and to
put into JSON by hand. Crashes count per job, so whoever submits the run again begins anew.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trnslurm.node import left_out
from trnslurm.node.left_out import read_json

CRASH = "crash"
_CHECKPOINT = re.compile(r"step-(\d{8})")
_STATE_FILE = re.compile(r"train-(\d+)\.json")
_MAX_REASON = 300


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What an attempt's state file says."""

    state: str = "STARTING"
    reason: str = ""
    cause: str = ""
    job_id: str = ""
    hosts: str = ""
    checkpoint: int = 0
    """The newest checkpoint's step when it began."""

    @property
    def crashed(self) -> bool:
        """Whether it failed, or died without a word. Being ended by Slurm is no crash."""
        return self.state in ("STARTING", "RUNNING", "FAILED") or self.cause == CRASH


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that decides how an attempt ended."""

    attempts: Sequence[Attempt]
    """Those of this job, oldest first; the last is the one that has ended."""
    exit_code: int
    newest: int
    """The newest checkpoint's step, 0 if there is none."""
    max_crashes: int
    requeue: bool
    """Whether the script may requeue its job."""
    stop: str | None = None
    """Why the workers were asked to stop; None: they were not."""
    saved: int | None = None
    """The step that they saved for it, and then ended all together."""
    cancelled: bool = False
    """Whether a person has cancelled the run."""
    trouble: str = ""
    """What a node's preflight or a watchdog found."""
    newer: int = 0
    """The newest attempt of the run, if that is another one: it has taken over."""

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    @property
    def progress(self) -> bool:
        return self.newest > self.last.checkpoint


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the state file will say of an attempt."""

    state: str
    reason: str
    cause: str
    refused: str
    """The state instead of REQUEUED, should Slurm refuse to requeue the job."""


def judge(facts: Facts) -> Verdict:
    """Return how the attempt ended."""
    if facts.newer:  # to begin again would be to take over from it in turn
        return _final("FAILED", f"attempt {facts.newer} has taken over")
    if facts.exit_code == 0 and facts.saved is None:
        return _final("COMPLETED", "")  # by itself, whatever else was asked of it meanwhile
    by_slurm = "" if facts.last.state == "RUNNING" else facts.last.state
    if facts.cancelled:
        return _final("CANCELLED", _saved(facts))
    if by_slurm == "REQUEUED":
        return _again("REQUEUED", "requeued", _and("requeued", _saved(facts)))
    if by_slurm == "CANCELLED":
        # On this machine TERM is all there is: a shutdown, or a closed terminal.
        local = facts.last.job_id.startswith("local-")
        stopped = local and facts.saved is not None
        return _final("STOPPED" if stopped else "CANCELLED", _saved(facts))
    if by_slurm == "PREEMPTED":
        return _stopped_by(facts, "preempted", "PREEMPTED")
    if by_slurm == "TIMEOUT" or (facts.saved is not None and facts.stop == "time limit"):
        return _time_limit(facts)
    if facts.saved is not None:
        return _final("STOPPED", _and(facts.stop or "", _saved(facts)))
    return _crash(facts)


def _time_limit(facts: Facts) -> Verdict:
    if facts.progress:
        return _stopped_by(facts, "time limit", "TIMEOUT")
    # Whatever it did then would only be done again, and again.
    return _final("TIMEOUT", "time limit; it ended without a new checkpoint", "time limit")


def _stopped_by(facts: Facts, cause: str, word: str) -> Verdict:
    reason = _and(cause, _saved(facts))
    final = word if facts.saved is None else "STOPPED"
    if not facts.requeue:
        return _final(final, reason, cause)
    return _again(final, cause, reason)


def _crash(facts: Facts) -> Verdict:
    what = facts.trouble or f"exit code {facts.exit_code} while running on {facts.last.hosts}"
    if not facts.requeue:
        return _final("FAILED", what, CRASH)
    crashes = crashes_in_a_row(facts.attempts, facts.newest)
    if crashes >= facts.max_crashes:
        return _final("FAILED", given_up(crashes, what), CRASH)
    if crashes:
        nth = f"crash {crashes} of {facts.max_crashes} without a new checkpoint"
        return _again("FAILED", CRASH, f"{nth}: {what}")
    return _again("FAILED", CRASH, f"crash after step {facts.newest} was saved: {what}")


def crashes_in_a_row(attempts: Sequence[Attempt], newest: int) -> int:
    """Count the crashes since an attempt left a newer checkpoint than it had found."""
    crashes = 0
    left = newest
    for attempt in reversed(attempts):
        if left > attempt.checkpoint:
            break
        crashes += attempt.crashed
        left = attempt.checkpoint
    return crashes


def given_up(crashes: int, what: str) -> str:
    """Say why a run does not begin again."""
    many = f"{crashes} crashes in a row" if crashes > 1 else "a crash"
    return f"given up after {many} without a new checkpoint: {what}"


def _final(state: str, reason: str, cause: str = "") -> Verdict:
    return Verdict(state=state, reason=reason, cause=cause, refused=state)


def _again(refused: str, cause: str, reason: str) -> Verdict:
    return Verdict(state="REQUEUED", reason=reason, cause=cause, refused=refused)


def _saved(facts: Facts) -> str:
    if facts.saved is not None:
        return f"saved step {facts.saved}"
    return f"step {facts.newest} was saved before" if facts.newest else ""


def _and(*words: str) -> str:
    return "; ".join(word for word in words if word)


def one_line(text: str) -> str:
    """Return text without what would break a line, a shell's word or JSON written by hand."""
    plain = " ".join(text.split()).replace('"', "'").replace("\\", "/")
    return "".join(c for c in plain if c.isprintable() and c.isascii())[:_MAX_REASON]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer."""
    options = parse(argv)
    attempts = read_attempts(options.attempt)
    if options.when == "begin":
        *earlier, this = attempts
        crashes = crashes_in_a_row(earlier, this.checkpoint)
        if crashes >= options.max_crashes:
            print(one_line(given_up(crashes, earlier[-1].reason or "it ended without a word")))
        return 0
    excluded, trouble = left_out.update(
        options.attempt, attempts[-1].hosts.split(","), options.excluded.split(),
        hours=options.exclude_hours, now=time.time(),
    )  # fmt: skip
    verdict = judge(read_facts(options, attempts, trouble))
    lines = (verdict.state, verdict.reason, verdict.cause, verdict.refused, excluded)
    print(*map(one_line, lines), sep="\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="ending")
    parser.add_argument("when", choices=("begin", "end"))
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--max-crashes", type=int, required=True)
    parser.add_argument("--exit-code", type=int, default=0, help="srun's")
    parser.add_argument("--requeue", action="store_true", help="the script may requeue its job")
    parser.add_argument("--exclude-hours", type=float, default=0.0, help="0: leave no node out")
    parser.add_argument("--excluded", default="", help="nodes that the job leaves out already")
    return parser.parse_args(argv)


def read_attempts(attempt: int) -> list[Attempt]:
    """Return the attempts of this one's job up to it, oldest first."""
    numbers = [int(m[1]) for f in Path("state").iterdir() if (m := _STATE_FILE.fullmatch(f.name))]
    found = [read_attempt(number) for number in sorted(numbers) if number <= attempt]
    return [a for a in found[:-1] if a.job_id == found[-1].job_id] + found[-1:]


def read_attempt(number: int) -> Attempt:
    """Read a state file; a half-created one is that of an attempt that has just begun."""
    data = read_json(Path(f"state/train-{number}.json"))
    fields = {k: v for k, v in data.items() if k in Attempt.__dataclass_fields__}
    return Attempt(**fields)


def newer_attempt(attempt: int) -> int:
    """Return the newest attempt after this one, or 0."""
    numbers = (int(m[1]) for f in Path("state").iterdir() if (m := _STATE_FILE.fullmatch(f.name)))
    return max((number for number in numbers if number > attempt), default=0)


def read_facts(options: argparse.Namespace, attempts: Sequence[Attempt], trouble: str) -> Facts:
    """Return what the files say."""
    stop = Path(f"state/stop-train-{options.attempt}.json")
    stopped = read_json(Path(f"state/stopped-train-{options.attempt}.json"))
    return Facts(
        attempts=attempts, exit_code=options.exit_code, newest=newest_checkpoint(),
        max_crashes=options.max_crashes, requeue=options.requeue, trouble=trouble,
        newer=newer_attempt(options.attempt),
        stop=str(read_json(stop).get("cause", "")) if stop.exists() else None,
        saved=int(stopped["step"]) if stopped.get("saved") else None,
        cancelled=Path("state/cancelled.json").exists(),
    )  # fmt: skip


def newest_checkpoint() -> int:
    """Return the newest checkpoint's step, or 0."""
    return max(_steps(Path("checkpoints")), default=0)


def _steps(checkpoints: Path) -> Iterator[int]:
    for path in checkpoints.glob("step-*"):
        if match := _CHECKPOINT.fullmatch(path.name):
            yield int(match[1])


if __name__ == "__main__":
    sys.exit(main())
