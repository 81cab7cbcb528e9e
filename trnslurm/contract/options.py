"""The options of node/attempt.py, given on the last line of a batch script."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

BY_SHELL = '"$0"'
"""The value of `script` in a batch script: its own path, as bash knows it."""
BESIDE = "---"
"""Separates another command that follows and starts one server of a role. There is one for each
component of a heterogeneous job, in order."""


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class AttemptOptions:
    """What a batch script passes to its attempt, including the command that the attempt runs."""

    nodes: int = _option(0, "reject an allocation of another size")
    graphs: bool = _option(False, "the phase needs compiled graphs")
    max_crashes: int = _option(1, "give up after this many in a row")
    requeue: bool = _option(False, "the job can be requeued")
    script: str = _option("", "the script that launches the next attempt")
    exclude_hours: float = _option(0.0, "how long to exclude bad nodes; 0: never")
    leave_out_slow: bool = _option(False, "exclude slow nodes as well")
    spares: int = _option(0, "nodes in addition to --nodes")
    fewer: bool = _option(False, "the run can continue on fewer nodes")
    grow_minutes: float = _option(0.0, "minutes on fewer nodes before a requeue for more; 0: never")
    standby: bool = _option(False, "start standby workers for the next attempt")
    expedite: bool = _option(False, "the job has --requeue=expedite")
    hang_minutes: float = _option(0.0, "end a hang after this time; 0: never")
    retry_s: Sequence[float] = _option(
        (10.0, 30.0), "pauses between requests to Slurm's controller"
    )
    served: int = _option(0, "nodes of roles, in addition to --nodes and --spares")
    command: list[str] = field(default_factory=list)

    @property
    def step(self) -> list[str]:
        """The command that starts the workers."""
        return self.command[: self._beside]

    @property
    def server(self) -> list[str]:
        """The commands that start a server of a role; empty if there are no roles."""
        return self.command[self._beside + 1 :]

    @property
    def _beside(self) -> int:
        return self.command.index(BESIDE) if BESIDE in self.command else len(self.command)

    def words(self) -> str:
        """Return the options that differ from the defaults as shell words."""
        return " ".join(self._words())

    def _words(self) -> Iterator[str]:
        for each in fields(self):
            value, name = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if each.name in ("retry_s", "command") or value == each.default:
                continue
            if each.name == "script":
                yield f"{name}={BY_SHELL}"
            else:
                shown = f"{value:g}" if isinstance(value, float) else value
                yield name if value is True else f"{name}={shown}"


def parse(argv: Sequence[str]) -> AttemptOptions:
    """Return the options and the command that follows them."""
    parser = argparse.ArgumentParser(
        prog="attempt", usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]", allow_abbrev=False
    )
    given = [each for each in fields(AttemptOptions) if each.name != "command"]
    for each in given:
        name, known = f"--{each.name.replace('_', '-')}", {"help": each.metadata["help"]}
        if each.default is False:
            parser.add_argument(name, action="store_true", **known)
        elif each.name == "retry_s":
            parser.add_argument(name, type=float, nargs="*", metavar="SECONDS", **known)
        else:
            parser.add_argument(name, type=type(each.default), **known)
    parser.set_defaults(**{each.name: each.default for each in given})
    at = argv.index("--") if "--" in argv else len(argv)
    found = vars(parser.parse_args(argv[:at])) | {"command": list(argv[at + 1 :])}
    if not found["command"]:
        parser.error("no command")
    return AttemptOptions(**found)
