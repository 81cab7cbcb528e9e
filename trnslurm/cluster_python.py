"""A cluster's Python on this host: started as the batch script starts it, with our terminal."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trnslurm.config import Cluster
from trnslurm.errors import TrnslurmError
from trnslurm.render import search_path
from trnslurm.slurm import without_overrides

_PR_SET_PDEATHSIG = 1
# Asked of the Python itself, so that what is missing is one line and no traceback.
_MISSING = """
import sys
from importlib.util import find_spec
missing = [name for name in sys.argv[1:] if find_spec(name) is None]
if missing:
    sys.exit(f"error: {sys.executable} has no {', '.join(missing)}: install trnslurm there with "
             "its [train] extra, or set python: in the cluster profile")
"""


def interpreter(cluster: Cluster) -> str:
    """Return the cluster's Python; on the local cluster the default is the one that runs us."""
    own = cluster.scheduler == "local" and cluster.python == "python3"
    return sys.executable if own else cluster.python


def preamble(cluster: Cluster) -> list[str]:
    """Return the bash lines that make the cluster's Python usable."""
    path = search_path(interpreter(cluster), cluster.slurm.bin_dir)
    env = [f"export {name}={shlex.quote(value)}" for name, value in sorted(cluster.env.items())]
    return ["set -e", f"export PATH={shlex.quote(path)}", *cluster.activate, *env]


def run_python(
    cluster: Cluster,
    arguments: Sequence[str],
    *,
    cwd: Path,
    pythonpath: Path,
    modules: Sequence[str] = (),
    umask: int = -1,
) -> int:
    """Run the cluster's Python here until it ends, its output ours; return its exit code.

    It must have the modules. On Ctrl-C it is asked to end (TERM: a Python that still imports would
    answer INT with a traceback), and KeyboardInterrupt is raised when it has ended.
    """
    libc = ctypes.CDLL(None)
    try:
        child = subprocess.Popen(
            ["/bin/bash", "-c", _script(cluster, arguments, pythonpath, modules)],
            cwd=cwd, env=without_overrides(os.environ), stdin=subprocess.DEVNULL, umask=umask,
            process_group=0,  # Ctrl-C comes from us, once, whoever sent it
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )  # fmt: skip
    except OSError as error:
        raise TrnslurmError(f"{error.filename or cwd}: {error.strerror}") from None
    try:
        _wait(child)
    except KeyboardInterrupt:
        child.terminate()
        _wait(child)
        raise
    finally:
        _end(child)
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise TrnslurmError(f"{interpreter(cluster)} was killed ({name}) in {cwd}")
    return child.returncode


def _script(
    cluster: Cluster, arguments: Sequence[str], pythonpath: Path, modules: Sequence[str]
) -> str:
    python = shlex.quote(interpreter(cluster))
    absent = f"error: no Python at {interpreter(cluster)} here: set python: in the cluster profile"
    return "\n".join(
        [
            *preamble(cluster),
            f"export PYTHONPATH={shlex.quote(str(pythonpath))}",
            "export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1",
            f"if ! command -v {python} > /dev/null; then",
            f"  echo {shlex.quote(absent)} >&2",
            "  exit 1",
            "fi",
            f"{python} -c {shlex.quote(_MISSING)} {shlex.join(modules)}",
            # Not as bash's own arguments: a script that activate sources would take them for its.
            f"exec {python} {shlex.join(arguments)}",
        ]
    )


def _wait(child: subprocess.Popen[bytes]) -> None:
    """Wait until it has ended, without collecting it: the number of its group stays taken."""
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Leave nothing of its process group behind."""
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
