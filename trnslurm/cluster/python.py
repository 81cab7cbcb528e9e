"""Starts a cluster's Python on this host in the same way as the batch script."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trnslurm.config.schema import Cluster
from trnslurm.errors import TrnslurmError
from trnslurm.render.container import container_words
from trnslurm.render.search_path import search_path
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.slurm.commands import without_overrides

_PR_SET_PDEATHSIG = 1
_ANSWER_S = 30
_NOT_FOUND = 127  # bash's exit code for a command that does not exist
# Prints the version and packages of a Python as JSON; must run on any Python 3.
_PROBE = """
import json, platform, shutil, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
def imported(module):  # in another process, because it can crash
    import subprocess
    code = "import {0}; print(); print(getattr({0}, '__version__', ''))".format(module)
    done = subprocess.run([sys.executable, "-c", code], cwd="/", stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    said = (done.stderr if done.returncode else done.stdout).split("\\n")
    said = [line.strip() for line in said if line.strip()] or ["exit code %d" % done.returncode]
    return {"imported": done.returncode == 0, "said": said[-1]}
names, commands, imports = (word.split(",") for word in sys.argv[1:4])
packages = {n: version(n) for n in names}
modules = dict(word.split("=") for word in imports if word)
print(json.dumps({"python": platform.python_version(), "executable": sys.executable,
                  "host": platform.node(), "packages": packages,
                  "commands": {c: shutil.which(c) for c in commands if c},
                  "imports": {m: imported(m) for n, m in modules.items() if packages.get(n)}}))
"""
# Runs in the interpreter itself, so that missing modules give one line instead of a traceback.
_MISSING = """
import sys
from importlib.util import find_spec
missing = [name for name in sys.argv[1:] if find_spec(name) is None]
if missing:
    sys.exit(f"error: {sys.executable} has no {', '.join(missing)}: install trnslurm there with "
             "its [train] extra, or set python: in the cluster profile")
"""


def interpreter(cluster: Cluster) -> str:
    """Return the cluster's Python; the local cluster's default is our own interpreter."""
    own = scheduler_of(cluster).is_here and cluster.python == "python3"
    return sys.executable if own else cluster.python


def preamble(cluster: Cluster) -> list[str]:
    """Return the bash lines that make the cluster's Python usable."""
    path = search_path(interpreter(cluster), cluster.slurm.bin_dir)
    env = [f"export {name}={shlex.quote(value)}" for name, value in sorted(cluster.env.items())]
    return ["set -e", f"export PATH={shlex.quote(path)}", *cluster.activate, *env]


def probe_script(
    cluster: Cluster,
    names: Sequence[str],
    commands: Sequence[str] = (),
    imports: Mapping[str, str] | None = None,
) -> str:
    """Return bash lines that run the probe in the jobs' Python, or in the container's image.

    The probe prints the versions of packages and the paths of commands. `imports` maps packages to
    modules, which the probe imports if the package is installed.
    """
    modules = [f"{name}={module}" for name, module in (imports or {}).items()]
    lists = (names, commands, modules)
    arguments = [",".join(words) for words in lists]
    clean = "unset PYTHONPATH PYTHONHOME; export PYTHONNOUSERSITE=1"  # as in the batch script
    container = cluster.container
    if container.image is not None:
        asked = f"{clean}; {shlex.join([container.python, '-c', _PROBE, *arguments])}"
        if container.runtime == "pyxis":  # srun has already started this in the image
            return f"{asked}\n"
        inside = " ".join(container_words(container, ["/tmp"]))
        return "\n".join([*preamble(cluster), f"{inside} bash -c {shlex.quote(asked)}", ""])
    probe = shlex.join([interpreter(cluster), "-", *arguments])
    here_document = [f"{probe} <<'END_OF_PROBE'", _PROBE, "END_OF_PROBE", ""]
    return "\n".join([*preamble(cluster), clean, *here_document])


def probe_answer(output: str) -> dict[str, Any] | None:
    """Return the probe's answer, the last line after any output of `activate`, or None."""
    try:
        answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return answer


def versions_here(cluster: Cluster, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages that the cluster's Python has on this host."""
    python = interpreter(cluster)
    # Unlike os.access, os.path.exists is False for a name that this locale cannot encode.
    missing = python.startswith("/") and not os.path.exists(python)  # noqa: PTH110
    if missing and cluster.container.image is None:
        raise TrnslurmError(f"there is no {python} on this host")
    try:
        done = subprocess.run(
            ["/bin/bash", "-s"],
            input=probe_script(cluster, names),
            cwd="/",
            capture_output=True,
            encoding="utf-8",
            timeout=_ANSWER_S,
            check=False,
            env=without_overrides(os.environ),
        )
    except subprocess.TimeoutExpired:
        raise TrnslurmError(f"{python} did not answer on this host within {_ANSWER_S} s") from None
    if done.returncode == _NOT_FOUND:
        raise TrnslurmError(f"there is no {python} on this host")
    answer = probe_answer(done.stdout) if done.returncode == 0 else None
    if answer is None:
        words = " ".join(done.stderr.split()[-20:]) or "it did not print an answer"
        raise TrnslurmError(f"{python} fails on this host: {words}")
    return {name: version for name, version in answer["packages"].items() if version is not None}


def run_python(
    cluster: Cluster,
    arguments: Sequence[str],
    *,
    cwd: Path,
    pythonpath: str | Path,
    modules: Sequence[str] = (),
    streams: tuple[IO[bytes], IO[bytes]] | None = None,
) -> int:
    """Run the cluster's Python on this host until it ends, and return its exit code.

    The program prints to the terminal, or to `streams` instead of stdout and stderr. Fail if the
    interpreter lacks one of the `modules`. On Ctrl-C, send TERM and raise KeyboardInterrupt when
    the program has ended; on INT, an interpreter that is still importing would print a traceback.
    """
    libc = ctypes.CDLL(None)
    out, err = streams or (None, None)
    try:
        child = subprocess.Popen(
            ["/bin/bash", "-c", _script(cluster, arguments, pythonpath, modules)],
            cwd=cwd,
            env=without_overrides(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            umask=cluster.umask,  # as in the batch scripts
            process_group=0,  # so that only we pass on Ctrl-C, once
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    except OSError as error:
        raise TrnslurmError(f"{error.filename or cwd}: {error.strerror}") from None
    try:
        _wait(child)
    except KeyboardInterrupt:
        child.terminate()
        _wait(child)
        raise
    finally:  # end its whole process group
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise TrnslurmError(f"{interpreter(cluster)} was killed ({name}) in {cwd}")
    return child.returncode


def _script(
    cluster: Cluster, arguments: Sequence[str], pythonpath: str | Path, modules: Sequence[str]
) -> str:
    python = shlex.quote(interpreter(cluster))
    absent = (
        f"error: there is no Python at {interpreter(cluster)} here: set python: in the cluster "
        "profile"
    )
    return "\n".join(
        [
            *preamble(cluster),
            f"export PYTHONPATH={shlex.quote(str(pythonpath))}",
            "export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1",
            # Otherwise transformers loads accelerate, which loads torch_xla. It is not needed here.
            "export USE_TORCH_XLA=0",
            f"if ! command -v {python} > /dev/null; then",
            f"  echo {shlex.quote(absent)} >&2",
            "  exit 1",
            "fi",
            f"{python} -c {shlex.quote(_MISSING)} {shlex.join(modules)}",
            # Not as bash's arguments, because a script that activate sources would read them as
            # its own.
            f"exec {python} {shlex.join(arguments)}",
        ]
    )


def _wait(child: subprocess.Popen[bytes]) -> None:
    """Wait for a child without reaping it, so that its process group's id stays in use."""
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
