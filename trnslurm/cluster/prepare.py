"""Prepares data on this host with the cluster's Python, because the launcher has no tokenizers.

That Python imports our package, but no other package from our site-packages, which are for another
interpreter.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trnslurm.cluster.python import interpreter, run_python
from trnslurm.config.schema import Cluster
from trnslurm.errors import TrnslurmError

_PACKAGE = Path(__file__).resolve().parent.parent
_MODULES = ("numpy", "tokenizers")
_HOME = re.compile(r"^((?:--[\w-]+=)?)~/")


def prepare_here(cluster: Cluster, arguments: Sequence[str], *, otherwise: str) -> int:
    """Run `trnslurm.prepare` in our terminal until it ends, and return its exit code.

    `otherwise` is the advice if this host lacks the cluster's Python.
    """
    python = interpreter(cluster)
    if python.startswith("/") and not Path(python).exists():
        raise TrnslurmError(f"the cluster's Python, {python}, is not on this host: {otherwise}")
    if cluster.scheduler == "slurm":  # the local cluster's ~ is ours, which the program expands
        arguments = [
            _HOME.sub(lambda found: f"{found[1]}{cluster.expand('~/')}", word) for word in arguments
        ]
    umask = 0o027 if cluster.group_readable else 0o077  # as the scripts set it
    with tempfile.TemporaryDirectory(prefix="trnslurm-") as directory:
        here = Path(directory)
        (here / _PACKAGE.name).symlink_to(_PACKAGE)
        words = ["-m", f"{_PACKAGE.name}.prepare", *arguments]
        return run_python(cluster, words, cwd=here, pythonpath=here, modules=_MODULES, umask=umask)
