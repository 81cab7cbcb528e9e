"""Decides which statements of a batch script run, from the file and the user's shell."""

from __future__ import annotations

from trnslurm.adopt.conditions import holds, matches
from trnslurm.adopt.environment import SETS_UP
from trnslurm.adopt.kinds import (
    STARTING,
    only_says,
)  # fmt: skip
from trnslurm.adopt.settings import Asked, Settings
from trnslurm.adopt.shell import (
    Block,
    Command,
    Compound,
    Statement,
    Word,
)

MOST_ROUNDS = 64


class Flow(Settings):
    """The conditions, loops and functions of a batch script."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._functions: dict[str, list[Statement]] = {}
        self._set_up_before = False
        self._succeeded: bool | None = True
        """Whether the previous command succeeds, or None if only the job knows."""

    def _is_skipped(self, command: Statement) -> bool:
        """Check whether `&&` or `||` before a command keeps it from running, and report it."""
        joined = {"&&": True, "||": False}.get(command.after)
        before, self._succeeded = self._succeeded, True
        if joined is not None and before is not joined:
            self._succeeded = before
            if before is None and not only_says(Block(command.line, command.raw)):
                self._variables.forget_assigned(command.raw)
                self._say(
                    command.line, command.raw, "unclear", "whether it runs is known only in the job"
                )
                return True
            if command.after == "||" and self._set_up_before:
                self._setting.allow_failure()
            self._say(
                command.line, command.raw, "left out", "the previous command keeps it from running"
            )
            return True
        if isinstance(command, Block):
            self._set_up_before = False
            if command.raw.startswith(("[[", "((")):
                self._succeeded = holds([command], self._variables)
            return False
        self._set_up_before = command.head in SETS_UP
        if command.head in ("[", "[[", "test"):
            self._succeeded = holds([command], self._variables)
        elif command.head in ("false", "grep", "command", "which", "type", "pgrep", "ls"):
            self._succeeded = None
        return False

    def _chosen(self, block: Block, whole: Compound) -> list[Statement] | None:
        """Return the statements of a block that run, or None if only the job knows."""
        if whole.kind == "for":
            words = [each for word in whole.words for each in self._variables.words(word)]
            several = len(words) > 1 and (STARTING.search(block.raw) or len(words) > MOST_ROUNDS)
            if several or any(self._variables.unknown(word) for word in words):
                return None
            body: list[Statement] = []
            for word in words:  # quoted by its parts
                value = Word(word.raw, tuple(p._replace(quoted=True) for p in word.parts))
                given = Command(block.line, "", ((whole.name, value),), (), (), ";",
                                background=False)  # fmt: skip
                body += [given, *whole.branches[0].body]
            return body
        for branch in whole.branches:
            held: bool | None = True
            if whole.kind == "case":
                held = matches(whole.words[0], branch.patterns, self._variables)
            elif branch.test:
                held = holds(branch.test, self._variables)
            if held is None:
                return None
            if held:
                return branch.body
        return []
