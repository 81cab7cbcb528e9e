"""`python -m trnslurm.prepare`, text to give it, and what it made."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from trnslurm.prepare.__main__ import main

from .. import processes
from ..processes import run_process

REPO = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "trnslurm.prepare"]


@dataclass(frozen=True, kw_only=True)
class Done(processes.Done):
    """What the command returned and printed."""

    @property
    def error(self) -> str:
        """The error line: the last, after lines of progress."""
        *progress, line = self.err.splitlines()
        assert self.code == 1 and line.startswith("error: ") and self.out == "", self
        assert all(": 100%" in said or "%, " in said for said in progress), self
        return line.removeprefix("error: ")


@pytest.fixture(scope="session")
def text() -> Path:
    """The short text of a job: 138 paragraphs."""
    return REPO / "jobs" / "gpt2_zero1" / "text.txt"


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TOKENIZERS_"))}
    return kept | {"PYTHONPATH": str(REPO)} | changes


@pytest.fixture
def prepare(
    run_prepare: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Done]:
    """Run the command to its end, in this process if its environment will do, to save a start.

    It starts no processes, as on a machine with one CPU, unless --processes says so.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):  # it sets them
        monkeypatch.setenv(name, os.environ.get(name, "true"))

    def run(*arguments: str | Path | int | float, **environ: str) -> Done:
        if environ:
            return run_prepare(*arguments, **environ)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        monkeypatch.setattr(sys, "argv", ["prepare", *map(str, arguments)])
        capsys.readouterr()
        code: str | int | None = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capsys.readouterr()
        # An exit code of words is for stderr.
        said = f"{code}\n" if isinstance(code, str) else ""
        return Done(code=1 if said else int(code or 0), out=out, err=err + said)

    return run


@pytest.fixture(scope="session")
def run_prepare() -> Callable[..., Done]:
    """Run the command to its end, as a process."""

    def run(*arguments: str | Path | int | float, **environ: str) -> Done:
        done = run_process([*COMMAND, *map(str, arguments)], env=environment(**environ))
        return Done(**vars(done))

    return run


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prepared data, read without trnslurm."""

    path: Path
    index: dict[str, Any]

    def tokens(self, split: str) -> list[int]:
        found: list[int] = np.fromfile(
            self.path / f"{split}.bin", {"uint16": "<u2", "uint32": "<u4"}[self.index["dtype"]]
        ).tolist()
        return found

    def documents(self, split: str) -> list[str]:
        """The texts, from between the ends of text."""
        tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        documents: list[list[int]] = [[]]
        for token in self.tokens(split):
            if token == self.index["end_of_text"]:
                documents.append([])
            else:
                documents[-1].append(token)
        assert documents.pop() == []
        texts: list[str] = tokenizer.decode_batch(documents, skip_special_tokens=False)
        return texts

    def files(self) -> dict[str, str]:
        """The checksum of each file: what differs is named, not printed."""
        return {path.name: checksum(path.read_bytes()) for path in self.path.iterdir()}


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="session")
def read_data() -> Callable[[Path], Data]:
    """Read prepared data."""

    def read(path: Path) -> Data:
        return Data(path=path, index=json.loads((path / "index.json").read_text()))

    return read


@pytest.fixture
def words_tokenizer(tmp_path: Path) -> Callable[[int], Path]:
    """Make a tokenizer.json of so many words w0, w1, …, the first of them the end of text."""

    def make(count: int) -> Path:
        words = {"<eos>": 0} | {f"w{number}": number for number in range(1, count)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        path = tmp_path / f"words-{count}.json"
        tokenizer.save(str(path))
        return path

    return make


@pytest.fixture
def refused(request, prepare, left_beside, tmp_path) -> Callable[..., str]:
    """Run the command of the file's KIND; return the error line, and check that nothing is left."""
    output = tmp_path / "out" / "data"

    def run(*arguments: str | Path | int | float) -> str:
        error: str = prepare(*request.module.KIND, "--output", output, *arguments).error
        assert not output.exists()
        assert left_beside(output) == []
        return error

    return run


@pytest.fixture
def left_beside() -> Callable[[Path], list[str]]:
    """Return the names beside an output that are made from its own."""

    def find(output: Path) -> list[str]:
        names = [path.name for path in output.parent.iterdir()] if output.parent.exists() else []
        return [name for name in names if name.startswith(f".{output.name}")]

    return find
