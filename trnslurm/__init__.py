"""trnslurm: multi-node training jobs on Slurm, for AWS Trainium first.

A training script of one's own may import it: see contract.py.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trnslurm.contract import report, saved, should_stop

__version__ = "0.1.0"
__all__ = ["report", "saved", "should_stop"]


def __getattr__(name: str) -> Any:
    """Import what a script calls when it is called: the command line needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'trnslurm' has no attribute {name!r}")
    from trnslurm import contract

    return getattr(contract, name)
