"""The link between ssh and sshd, as ssh's ProxyCommand: it breaks as the test has planned.

    python link.py DIRECTORY sshd -i …

Each connection takes the first line of DIRECTORY/plan, if there is one: JSON with how many bytes it
carries `up` to the server or `down` from it, or the pattern of a file `until` there is one; whether
it then is `silent`, instead of being cut; and how many bytes it carries at a time (`slowly`).
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path


def take_plan(directory: Path) -> dict[str, object]:
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = directory / "plan"
        lines = file.read_text().splitlines() if file.exists() else []
        file.write_text("".join(f"{line}\n" for line in lines[1:]))
        with (directory / "connections").open("a") as log:
            log.write(f"{lines[:1]}\n")
    return json.loads(lines[0]) if lines else {}


def main(directory: Path, argv: list[str]) -> None:
    plan = take_plan(directory)
    left = {"up": plan.get("up", -1), "down": plan.get("down", -1)}
    chunk = int(plan.get("slowly", 1 << 16))
    ours, theirs = socket.socketpair()
    # A server of its own, which lives on for a while after its link is cut, as a real one does.
    subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, close_fds=True)
    theirs.close()
    ends = {0: ("up", ours.fileno()), ours.fileno(): ("down", 1)}
    while True:
        if "until" in plan and glob.glob(str(plan["until"])):  # noqa: PTH207
            break
        ready, _, _ = select.select(list(ends), [], [], 0.01)
        for end in ready:
            way, to = ends[end]
            limit = min(chunk, left[way]) if left[way] >= 0 else chunk
            if limit == 0:
                return finish(plan)
            data = os.read(end, limit)
            if not data:
                return None
            if left[way] >= 0:
                left[way] -= len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(to, view) :]
            if "slowly" in plan:
                time.sleep(0.001)
    return finish(plan)


def finish(plan: dict[str, object]) -> None:
    while plan.get("silent"):  # until ssh gives up
        if not os.read(0, 1 << 16):
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
