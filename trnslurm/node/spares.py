"""Runs a command once on each spare node of a job, which is a node outside the attempt.

    python -m trnslurm.node.spares COMMAND [ARGUMENT ...]

The first arguments may be srun options, such as those of a container runtime.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from trnslurm.contract.variables import Variable


def main(argv: Sequence[str] | None = None) -> int:
    """Become srun, or end if there are no spares."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    if not words:
        print("usage: spares COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    if spares := spare_nodes(os.environ):
        own = [f"--nodes={len(spares)}", f"--nodelist={','.join(spares)}", "--ntasks-per-node=1"]
        os.execvp("srun", ["srun", *own, "--cpu-bind=none", "--overlap", *words])
    return 0


def spare_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the allocation that are not in the attempt."""
    chosen = environ[Variable.HOSTS].split(",")
    return [node for node in environ[Variable.ALLOCATION].split(",") if node not in chosen]


if __name__ == "__main__":
    sys.exit(main())
