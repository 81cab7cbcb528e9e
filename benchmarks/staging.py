"""How long workers of one node import from a shared file system, and from a staged copy.

    .venv/bin/python benchmarks/staging.py --workers 32

The file system is a stand-in on this machine that is throttled to a node's share of a busy one
(throttled.py). Every measurement mounts it anew, so a node has nothing of it in its cache. Needs
root, or a user who may make namespaces.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reporting
import throttled

ROOT = Path(__file__).resolve().parents[1]
INSIDE = "TRNSLURM_BENCHMARK_INSIDE"
IMPORTS = "import networkx, numpy, pyarrow, sympy"
# PyTorch and what belongs to it: gigabytes, most of which no import reads.
LEFT_OUT = (
    "torch",
    "nvidia",
    "triton",
    "_XLAC",
    "functorch",
    "trnslurm",
    "_editable",
    "__editable",
)
SHARED, FIRST, LATER, LIMIT = "shared", "staged, first job", "staged, later job", "own disk (limit)"


def main() -> None:
    """Time all ways in turn, and print medians and ratios."""
    parser = reporting.make_parser("Measure what staging an environment spares.", rounds=1)
    parser.add_argument("--workers", default="1,8,32", help="numbers of workers (1,8,32)")
    parser.add_argument("--requests-per-s", type=float, default=1500, help="(1500)")
    parser.add_argument("--mb-per-s", type=float, default=125, help="(125)")
    parser.add_argument("--late-ms", type=float, default=0.5, help="of every answer (0.5)")
    options = parser.parse_args()
    reporting.require("networkx", "numpy", "pyarrow", "sympy")
    if INSIDE not in os.environ:  # mounts end with the namespace
        user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
        again = [sys.executable, *sys.argv]
        os.execvpe("unshare", ["unshare", "--mount", *user, *again], os.environ | {INSIDE: "1"})
    limits = {k: getattr(options, k) for k in ("requests_per_s", "mb_per_s", "late_ms")}
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory), limits)
        rows = [place.pack()]
        counts = [int(word) for word in options.workers.split(",")]
        measured: dict[tuple[int, str], list[reporting.Row]] = {}
        for _ in range(options.rounds):
            for workers in counts:
                for way, measure in place.ways().items():
                    measured.setdefault((workers, way), []).append(measure(workers))
    for (workers, way), found in measured.items():
        shared = measured[workers, SHARED]
        ratios = [one["s"] / other["s"] for one, other in zip(found, shared, strict=True)]
        rows.append(
            {key: statistics.median(one[key] for one in found) for key in ("s", "requests", "mb")}
            | {"name": way, "workers": workers, "ratio": statistics.median(ratios)}
        )
    columns = {
        "name": ("", ""), "workers": ("workers", ""), "s": ("s", ",.1f"), "ratio": ("ratio", ".2f"),
        "requests": ("requests", ",.0f"), "mb": ("MB read", ",.0f"),
    }  # fmt: skip
    title = (
        f"An environment of {place.files:,} files, {place.mb:,.0f} MB, at"
        f" {options.requests_per_s:,g} requests/s, {options.mb_per_s:g} MB/s and"
        f" {options.late_ms:g} ms, medians of {options.rounds} rounds, and ratios to {SHARED}"
    )
    reporting.report(title, rows, columns, options.json)


class Place:
    """A shared file system with an environment, and the disk of one node."""

    def __init__(self, directory: Path, limits: dict[str, float]) -> None:
        self._source, self._shared = directory / "source", directory / "shared"
        self._local, self._limits = directory / "local", limits
        for path in (self._source, self._shared, self._local):
            path.mkdir()
        environment = self._source / "environment"
        command = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
        subprocess.run(command, check=True)
        packages = next(environment.glob("lib/python*/site-packages"))
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if path.is_dir() and not path.name.startswith(LEFT_OUT):
                shutil.copytree(path, packages / path.name, symlinks=True)
            elif path.is_file() and not path.name.startswith(LEFT_OUT) and path.suffix != ".pth":
                shutil.copy2(path, packages)
        found = [path for path in environment.rglob("*") if path.is_file()]
        self.files, self.mb = len(found), sum(path.stat().st_size for path in found) / 1e6
        self._archive = ""

    def ways(self) -> dict[str, Callable[[int], reporting.Row]]:
        """Return how a node's workers may start; each leaves what the next one needs."""
        return {SHARED: self._import, FIRST: self._unpack, LATER: self._use, LIMIT: self._own}

    def pack(self) -> reporting.Row:
        """Make the archive, as the first node of the first job does."""

        def run() -> None:
            said = self._staging("pack", str(self._source))
            self._archive = str(self._shared / Path(said).relative_to(self._source))

        return self._measured(run) | {"name": "pack, once", "workers": None, "ratio": None}

    def _import(self, workers: int) -> reporting.Row:
        return self._measured(lambda: self._start(self._python, workers))

    def _unpack(self, workers: int) -> reporting.Row:
        shutil.rmtree(self._local)
        self._local.mkdir()
        return self._use(workers)

    def _use(self, workers: int) -> reporting.Row:
        def run() -> None:
            copy = self._staging("unpack", self._archive, str(self._local))
            if not copy.startswith(str(self._local)):
                sys.exit(f"error: there is no copy, but {copy}")
            self._start(copy, workers)

        return self._measured(run)

    def _own(self, workers: int) -> reporting.Row:
        (python,) = self._local.glob("*/*/bin/python")
        return self._measured(lambda: self._start(str(python), workers))

    @property
    def _python(self) -> str:
        return str(self._shared / "environment/bin/python")

    def _measured(self, run: Callable[[], None]) -> reporting.Row:
        with throttled.mounted(self._source, self._shared, **self._limits) as server:
            begun = time.monotonic()
            run()
            seconds = time.monotonic() - begun
            return {"s": seconds, "requests": server.requests, "mb": server.bytes / 1e6}

    def _staging(self, *words: str) -> str:
        command = [self._python, "-m", "trnslurm.node.staging", *words]
        (process,) = self._started(command, 1, stdout=subprocess.PIPE)
        out, _ = process.communicate()
        return str(out.strip())

    def _start(self, python: str, workers: int) -> None:
        for process in self._started([python, "-c", IMPORTS], workers):
            if process.wait():
                sys.exit(f"error: a worker ended with {process.returncode}")

    def _started(self, command: list[str], number: int, **more: Any) -> list[subprocess.Popen[str]]:
        """Start programs of the mount by another, as this process has to serve it meanwhile."""
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        return [
            subprocess.Popen(
                ["/usr/bin/env", *command], env=environ, stdin=subprocess.DEVNULL, text=True, **more
            )
            for _ in range(number)
        ]


if __name__ == "__main__":
    main()
