"""The exceptions that a user sees as a single line on stderr, with exit code 1."""

from __future__ import annotations

from collections.abc import Iterable


class TrnslurmError(Exception):
    """The base of all errors that the user can fix; says where, what was set, what to do."""


class TrnslurmWarning(UserWarning):
    """What the user should know of what was asked for, and can be done all the same."""


class ConfigError(TrnslurmError):
    """A profile, recipe, preset or option that cannot be used."""


class PlanError(TrnslurmError):
    """A batch that cannot be laid out exactly on the workers asked for."""


class RenderError(TrnslurmError):
    """A template or a value that cannot become a script."""


class RunError(TrnslurmError):
    """A run directory that is missing, damaged or another user's."""


class RunFailedError(RunError):
    """A run that has ended and not completed, with its cause as far as it is known."""


class NotYetError(RunError):
    """A request that a run cannot serve now, but later."""


class SlurmError(TrnslurmError):
    """A Slurm command that is missing, failed or did not answer in time."""


class SubmitError(TrnslurmError):
    """A job that was refused; nothing was left running."""


class NoAnswerError(SubmitError):
    """sbatch gave up waiting: it is unknown whether the controller has the job."""


class RemoteError(TrnslurmError):
    """A host that ssh does not reach, or where nothing can be started."""


class ConnectionLostError(RemoteError):
    """A connection that broke, and may be made again."""


class SandboxError(TrnslurmError):
    """A sandbox that cannot be made, is not up, or refused a fault."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return ` (did you mean "x"?)` for the nearest known word, or nothing."""
    import difflib  # only for what is wrong

    nearest = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{nearest[0]}"?)' if nearest else ""
