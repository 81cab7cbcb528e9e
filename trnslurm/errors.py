"""The one exception tree: what a user sees as a single line on stderr with exit code 1."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrnslurmError(Exception):
    """Base of every error that is the user's to fix: where, what was set, what to do."""


class ConfigError(TrnslurmError):
    """A profile, recipe, preset or --set that cannot be used."""


class PlanError(TrnslurmError):
    """A batch that cannot be laid out exactly on the workers asked for."""


class RenderError(TrnslurmError):
    """A template or a value that cannot become a script."""


class RunError(TrnslurmError):
    """A run directory that is missing, damaged or not ours."""


class NotYetError(RunError):
    """What a run does not allow now, but will by itself."""


class SlurmError(TrnslurmError):
    """A Slurm command that is missing, failed or did not answer in time."""


class SubmitError(TrnslurmError):
    """A job that was refused; nothing was left running."""


class NoAnswerError(SubmitError):
    """sbatch gave up waiting: whether the controller has the job is not known."""


class SandboxError(TrnslurmError):
    """A sandbox that cannot be made, is not up, or refused a fault."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return ` (did you mean "x"?)` for the nearest known word, or an empty string."""
    nearest = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{nearest[0]}"?)' if nearest else ""
