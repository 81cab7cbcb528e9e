"""What a test makes of a training while it runs, through files in the run directory's drill/:

pace                 seconds before each step
crash                a step: every attempt dies of an exception in it
hold                 a point and an attempt: its workers wait there as long as the file says so
held-POINT-A-RANK    a worker is there
began-A              worker 0 of attempt A has all workers beside it, and is about to load
samples-RANK.jsonl   what each worker trained on, step by step
disk-RANK.jsonl      see disk.py
"""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trnslurm.saves import commit, directory
from trnslurm.saves.memory import HostCopy
from trnslurm.train.data.units import Unit
from trnslurm.train.environment import Environment
from trnslurm.train.loop.reports import JsonLines

_LOOK_S = 0.02


class Drill:
    """One worker's obedience."""

    def __init__(self, environment: Environment, *, pause_s: float) -> None:
        self._root = environment.run_dir / "drill"
        self._root.mkdir(exist_ok=True)
        self._attempt = environment.attempt
        self._rank = environment.rank
        self._pause_s = pause_s
        self._samples = JsonLines(self._root / f"samples-{self._rank}.jsonl")
        self._hold_at("write", HostCopy, "write")
        self._hold_at("manifest", commit, "write_manifest")
        self._hold_at("rename", directory, "put_in_place")
        directory.shutil = _HalfRemoval(lambda: self._hold("removal"))

    def began(self) -> None:
        """Say that all workers are there."""
        if self._rank == 0:
            (self._root / f"began-{self._attempt}").touch()

    def pause(self, step: int) -> None:
        """Wait before a step, and crash in it if that is asked for."""
        if self._read("crash") == str(step):
            raise ValueError(f"told to crash in step {step}")
        time.sleep(float(self._read("pace") or self._pause_s))

    def note(self, step: int, units: Sequence[Unit]) -> None:
        """Write down the samples that this worker has trained on in a step."""
        samples = [unit.first + i for unit in units if unit.weight for i in range(unit.size)]
        self._samples.write({"attempt": self._attempt, "step": step, "samples": samples})

    def _hold_at(self, point: str, owner: Any, name: str) -> None:
        """Wait at a point before a function is called."""
        function: Callable[..., Any] = getattr(owner, name)

        def hold_first(*args: Any, **more: Any) -> Any:
            self._hold(point)
            return function(*args, **more)

        setattr(owner, name, hold_first)

    def _hold(self, point: str) -> None:
        words = f"{point} {self._attempt}"
        while self._read("hold") == words:
            (self._root / f"held-{point}-{self._attempt}-{self._rank}").touch()
            time.sleep(_LOOK_S)

    def _read(self, name: str) -> str:
        try:
            return (self._root / name).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""


class _HalfRemoval:
    """Stands for shutil: deletes one file of a directory, waits, and deletes the rest."""

    def __init__(self, hold: Callable[[], None]) -> None:
        self._hold = hold

    def rmtree(self, path: Path) -> None:
        for file in sorted(path.iterdir())[:1]:
            file.unlink()
        self._hold()
        shutil.rmtree(path)
