"""How attempts go from stage to stage on a real Slurm, and in the simulated one.

    python -m tests.simulate.traces NAME DIRECTORY

writes traces/NAME.json from the state/stages.jsonl of all runs below a directory, such as those of
the fault matrix. A test compares what is there with the simulator, so that its Slurm stays true.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

TRACES = Path(__file__).parent / "traces"
Line = tuple[float, str, str, str]
"""When, from which stage, to which, and by what event."""
Seconds = dict[str, list[float]]
"""For each way from stage to stage, how long the first of them lasted."""


def ways(lines: Iterable[Line]) -> Iterator[tuple[str, float | None]]:
    """Yield each step of an attempt's program, and how long it was in the stage that it left."""
    before: tuple[float, str] | None = None
    for at, left, entered, event in lines:
        same = before and before[1] == left
        yield f"{left} > {entered}: {general(event)}", at - before[0] if before and same else None
        before = at, entered


def general(event: str) -> str:
    """Return an event without names and numbers."""
    event = re.sub(r"code (?!0\b)\d+", "code 1", event)
    event = re.sub(r"asked: .* did not respond", "asked: some nodes did not respond", event)
    return event.partition(" (")[0] if event.startswith("told") else event


def read(directory: Path) -> tuple[int, Seconds]:
    """Return how many programs have left their stages below a directory, and what they did."""
    found: Seconds = {}
    files = sorted(directory.rglob("stages.jsonl"))
    for file in files:
        told = [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]
        lines = [(one["time"], one["from"], one["to"], one["event"]) for one in told]
        for way, seconds in ways(lines):
            found.setdefault(way, []).extend([] if seconds is None else [round(seconds, 1)])
    return len(files), found


def main(name: str, directory: str) -> int:
    """Write a trace."""
    runs, found = read(Path(directory))
    TRACES.mkdir(exist_ok=True)
    lines = [f"  {json.dumps(way)}: {json.dumps(sorted(found[way]))}" for way in sorted(found)]
    text = f'{{"runs": {runs}, "ways": {{\n' + ",\n".join(lines) + "\n}}\n"
    (TRACES / f"{name}.json").write_text(text, encoding="ascii")
    print(f"{name}: {runs} runs, {len(found)} ways from stage to stage")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
