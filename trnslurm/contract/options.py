"""The options of node/attempt.py: the last line of a batch script gives them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

BY_SHELL = '"$0"'
"""The value of `script` in a batch script: its own path, as bash knows it."""
BESIDE = "---"
"""After it in the command is another one: it starts one server of a role. There is one for each
component of a heterogeneous job, in their order."""


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class AttemptOptions:
    """What a batch script tells its attempt, and the command that the attempt runs."""

    nodes: int = _option(0, "refuse an allocation of another size")
    graphs: bool = _option(False, "the phase needs compiled graphs")
    max_crashes: int = _option(1, "in a row, then give up")
    requeue: bool = _option(False, "the job may be requeued")
    script: str = _option("", "run it again for the next attempt's launch")
    exclude_hours: float = _option(0.0, "0: leave no node out")
    leave_out_slow: bool = _option(False, "a slow node as well")
    spares: int = _option(0, "nodes beside --nodes")
    fewer: bool = _option(False, "it may continue on fewer nodes")
    grow_minutes: float = _option(0.0, "on fewer nodes, before it gives way to more; 0: never")
    standby: bool = _option(False, "start the next attempt ahead")
    expedite: bool = _option(False, "it has --requeue=expedite")
    hang_minutes: float = _option(0.0, "0: never look for one")
    retry_s: Sequence[float] = _option(
        (10.0, 30.0), "pauses before Slurm's controller is asked again"
    )
    served: int = _option(0, "nodes of roles, beside --nodes and --spares")
    command: list[str] = field(default_factory=list)

    @property
    def step(self) -> list[str]:
        """The command that starts the workers."""
        return self.command[: self._beside]

    @property
    def server(self) -> list[str]:
        """The commands that start a server of a role; empty: there are no roles."""
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
    """Return the options, and the command that follows them."""
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
