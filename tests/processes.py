"""Commands that tests run to their end, and what runs on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    @property
    def ok(self) -> str:
        """What it printed; it must have succeeded."""
        assert self.code == 0, self
        return self.out

    @property
    def error(self) -> str:
        """The one error line, and nothing else, that went to stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), self
        assert self.code and self.out == "", self
        return lines[0].removeprefix("error: ")


def run_process(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    feed: str = "",
    timeout_s: float = 600,
    umask: int = -1,
) -> Done:
    """Run a command, which reads what it is fed."""
    done = subprocess.run(
        argv, env=env, cwd=cwd, input=feed, capture_output=True, text=True, timeout=timeout_s,
        check=False, umask=umask,
    )  # fmt: skip
    return Done(code=done.returncode, out=done.stdout, err=done.stderr)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_with(word: str) -> list[str]:
    """Return the processes with a word in their command line or environment, without zombies."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes()
            facts = command + (directory / "environ").read_bytes()
        except OSError:
            continue
        if word.encode() in facts and directory.name != str(os.getpid()):
            found.append(f"{directory.name}: {command.replace(bytes(1), b' ').decode()}")
    return found
