"""python -m tests.simulate [--minutes M | --seed N]: random faults, in virtual time."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from trnslurm.node.attempt.machine import TABLE

from . import followers
from .plans import check, plan_of, shrunk
from .world import World, name_of

_MOST_SHOWN = 10
_MANY, _EVERY = 1000, 500  # so often a job is that large
_OF_FOLLOWERS = 0.1
"""The share of time for jobs that follow."""


def main() -> int:
    """Try schedules until the time is over, or show one."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the seed to begin with")
    parser.add_argument("--seed", type=int, help="show this schedule")
    options = parser.parse_args()
    if options.seed is not None:
        return show(options.seed)
    until = time.monotonic() + 60 * options.minutes
    covered: Counter[tuple[str, str]] = Counter()
    ends: Counter[str] = Counter()
    broken = 0
    for seed in itertools.count(options.first):
        if time.monotonic() > until:
            break
        plan = plan_of(seed, most(seed))
        try:
            ends[check(plan, covered).machine.state.state] += 1
        except AssertionError as error:
            broken += 1
            if broken <= _MOST_SHOWN:
                small, why = shrunk(plan, str(error))
                print(f"seed {seed}: {why}\n  {small}", flush=True)
    broken += follow_until(time.monotonic() + 60 * options.minutes * _OF_FOLLOWERS, options.first)
    tried = seed - options.first
    print(
        f"{tried} schedules, {broken} broke an invariant; "
        + ", ".join(f"{name} {count}" for name, count in ends.most_common())
    )
    never = [
        f"{stage}, {name_of(kind)}" for stage, kind in TABLE if not covered[stage, name_of(kind)]
    ]
    print(
        f"{len(TABLE) - len(never)} of {len(TABLE)} entries of the table; not: {'; '.join(never)}"
    )
    return int(broken > 0)


def follow_until(until: float, first: int) -> int:
    """Try jobs that follow a training; return how many schedules broke an invariant."""
    broken = seed = 0
    for seed in itertools.count(first):
        if time.monotonic() > until:
            break
        with tempfile.TemporaryDirectory() as place:
            try:
                followers.check(seed, Path(place))
            except AssertionError as error:
                broken += 1
                print(f"jobs that follow, seed {seed}: {error}", flush=True)
    print(f"{seed - first} schedules of jobs that follow, {broken} broke an invariant")
    return broken


def most(seed: int) -> int:
    """Return the largest job of a seed."""
    return 16 if seed % _EVERY else _MANY


def show(seed: int) -> int:
    """Tell a schedule step by step."""
    plan = plan_of(seed, most(seed))
    world = World(plan)
    print(plan)
    try:
        world.run()
    except AssertionError as error:
        print(f"broken: {error}")
    print(*world.trail, world.machine.state, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
