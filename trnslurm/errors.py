"""Errors that the command line prints as one line on stderr, with exit code 1."""

from __future__ import annotations

from collections.abc import Iterable


class TrnslurmError(Exception):
    """Base class of all errors that the user can fix. The text says where, what, and what to do."""


class TrnslurmWarning(UserWarning):
    """A problem that does not stop the request."""


class ConfigError(TrnslurmError):
    """A profile, recipe, preset or option that cannot be used."""


class PlanError(TrnslurmError):
    """A batch that cannot be divided exactly over the requested workers."""


class RenderError(TrnslurmError):
    """A template or a value that cannot be rendered into a script."""


class RunError(TrnslurmError):
    """A run directory that is missing, damaged or owned by another user."""


class RunFailedError(RunError):
    """A run that ended without completing. The text includes the cause, if known."""


class NotYetError(RunError):
    """A request that cannot be met until the run reaches another state."""


class SlurmError(TrnslurmError):
    """A Slurm command that is missing, failed or did not answer in time."""


class SubmitError(TrnslurmError):
    """A submission that was rejected. Nothing is left running."""


class NoAnswerError(SubmitError):
    """sbatch did not get an answer in time, so the controller may or may not have the job."""


class RemoteError(TrnslurmError):
    """A host that ssh cannot reach, or that cannot start a command."""


class ConnectionLostError(RemoteError):
    """A connection that broke; connecting again may work."""


class SandboxError(TrnslurmError):
    """A sandbox that cannot be created, is not running, or rejected a fault."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return ` (did you mean "x"?)` for the nearest known word, or an empty string."""
    import difflib  # needed for errors only

    nearest = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{nearest[0]}"?)' if nearest else ""
