"""trnslurm: multi-node training jobs on Slurm, for AWS Trainium first.

A custom training script may import trnslurm too: see calls.py.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trnslurm.api.pipeline import pipeline
    from trnslurm.api.plan import plan
    from trnslurm.api.render import render
    from trnslurm.api.run import Run, Runs, cancel, resume, runs
    from trnslurm.api.submit import each_checkpoint, submit, sweep
    from trnslurm.calls import report, saved, servers, should_stop
    from trnslurm.datasets.open import dataset
    from trnslurm.errors import RunFailedError, TrnslurmError, TrnslurmWarning
    from trnslurm.samples.batches import batches
    from trnslurm.samples.loader import loader
    from trnslurm.samples.mixture import mix
    from trnslurm.saves.script import load, save
    from trnslurm.submission.plan import Plan

if sys.version_info < (3, 9):  # noqa: UP036 - older Pythons run this file up to here
    sys.exit(
        f"error: {sys.executable} is Python {sys.version.split()[0]}, but nodes need 3.9 or "
        "newer: set python: in the cluster profile"
    )

__version__ = "0.1.0"
__all__ = [
    "Plan",
    "Run",
    "RunFailedError",
    "Runs",
    "TrnslurmError",
    "TrnslurmWarning",
    "batches",
    "cancel",
    "dataset",
    "each_checkpoint",
    "load",
    "loader",
    "mix",
    "pipeline",
    "plan",
    "render",
    "report",
    "resume",
    "runs",
    "save",
    "saved",
    "servers",
    "should_stop",
    "submit",
    "sweep",
]

# Imported at first use: nodes have only a few of these modules.
_WHERE = {
    "Plan": "trnslurm.submission.plan",
    "Run": "trnslurm.api.run",
    "RunFailedError": "trnslurm.errors",
    "Runs": "trnslurm.api.run",
    "TrnslurmError": "trnslurm.errors",
    "TrnslurmWarning": "trnslurm.errors",
    "batches": "trnslurm.samples.batches",
    "cancel": "trnslurm.api.run",
    "dataset": "trnslurm.datasets.open",
    "each_checkpoint": "trnslurm.api.submit",
    "load": "trnslurm.saves.script",
    "loader": "trnslurm.samples.loader",
    "mix": "trnslurm.samples.mixture",
    "pipeline": "trnslurm.api.pipeline",
    "plan": "trnslurm.api.plan",
    "render": "trnslurm.api.render",
    "report": "trnslurm.calls",
    "resume": "trnslurm.api.run",
    "runs": "trnslurm.api.run",
    "save": "trnslurm.saves.script",
    "saved": "trnslurm.calls",
    "servers": "trnslurm.calls",
    "should_stop": "trnslurm.calls",
    "submit": "trnslurm.api.submit",
    "sweep": "trnslurm.api.submit",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'trnslurm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """Makes plan, render and runs refer to the functions, not the subpackages of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        # An import of a subpackage sets it as an attribute.
        if not (name in _WHERE and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
