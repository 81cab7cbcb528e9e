"""Rendered bundles and what came of them: `trnslurm render`, then `bash train.sh`, as by hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..processes import run_process

REPO = Path(__file__).parents[2]
LIMIT_S = 240
# Recipe and preset: every recipe's small one, of llama3_clm both strategies for cpu and cuda.
RECIPES = {
    "gpt2_zero1": ("gpt2_zero1", "tiny"),
    "bert_pretrain": ("bert_pretrain", "tiny"),
    "bert_mrpc": ("bert_mrpc", "tiny"),
    "bert_sentiment": ("bert_sentiment", "tiny"),
    "bert_ner": ("bert_ner", "tiny"),
    "fsdp": ("llama3_clm", "tiny"),
    "deepspeed": ("llama3_clm", "tiny_deepspeed"),
}
# CPUs and GPUs draw other random numbers.
NO_DROPOUT = {
    "gpt2_zero1": ("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    "llama3_clm": (),
}
NO_DROPOUT_OF_BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A training that has ended, so or so."""

    directory: Path
    code: int

    @property
    def log(self) -> str:
        """All logs of all attempts."""
        return "".join(file.read_text() for file in sorted(self.directory.glob("logs/*.log")))

    def well(self) -> Ended:
        """Check that it ended well."""
        assert self.code == 0, f"exit {self.code}\n{self.log[-6000:]}"
        return self

    def column(self, key: str) -> dict[int, float]:
        """A number of every step; of the newest attempt, where a step was done again."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line[key] for line in map(json.loads, lines)}


class Trainings:
    """Makes and runs trainings below a directory, on one device."""

    def __init__(self, *, device: str, root: Path, path: str) -> None:
        self._device = device
        self.root = root
        self._number = 0
        home = root / "home"
        home.mkdir()
        self._environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TRNSLURM_", "SLURM_", "XDG_", "PYTEST_"))
        }
        self._environ |= {"HOME": str(home), "PATH": path, "PYTHONPATH": str(REPO)}
        self.trained: Callable[[str], Ended] = cache(self._trained)
        """A recipe's preset on the device, without dropout, from first to last step; once."""

    def render(
        self,
        name: str,
        *,
        device: str = "",
        workers: int = 1,
        dropout: bool = False,
        **sets: object,
    ) -> Path:
        """Render a bundle; sets name keys as train__lr."""
        recipe, preset = RECIPES[name]
        self._number += 1
        output = self.root / f"{self._number}-{name}"
        values = {"device": device or self._device, "data_root": self.root / "data"}
        if not dropout:
            values |= {f"model.{key}": 0.0 for key in NO_DROPOUT.get(recipe, NO_DROPOUT_OF_BERT)}
        values |= {key.replace("__", "."): value for key, value in sets.items()}
        chosen = [recipe, "--cluster", "local", "--preset", preset]
        if recipe.startswith("bert"):
            self._prepare(*chosen)
        command = ["render", *chosen, "--nodes", "1", "--workers", str(workers)]
        for key, value in values.items():
            command += ["--set", f"{key}={value}"]
        self._trnslurm(*command, "--output", str(output))
        return output

    def render_script(self, script: Path, words: list[str], **sets: object) -> Path:
        """Render a bundle of a custom script with one worker, which is given these words."""
        self._number += 1
        output = self.root / f"{self._number}-{script.stem}"
        values = {"device": self._device, **sets}
        chosen = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        self._trnslurm(
            *("render", str(script), "--cluster", "local", "--workers", "1", *chosen),
            *("--output", str(output), "--", *words),
            cwd=script.parent,
        )
        return output

    def start(self, bundle: Path, python: str = sys.executable) -> subprocess.Popen[bytes]:
        """Start a bundle's training, in a process group of its own."""
        with (bundle / "logs/script.log").open("ab") as log:
            return subprocess.Popen(
                ["bash", "train.sh"],
                cwd=bundle,
                env=self._environ | {"TRNSLURM_PYTHON": python},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, bundle: Path, process: subprocess.Popen[bytes]) -> Ended:
        """Wait for its end; what takes too long is ended."""
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        return Ended(directory=bundle, code=code)

    def run(self, bundle: Path, python: str = sys.executable) -> Ended:
        """Train to the end."""
        return self.wait(bundle, self.start(bundle, python))

    def again_from(self, ended: Ended, step: int) -> Ended:
        """Train a copy of a run again that has come no further than a checkpoint."""
        self._number += 1
        copy = self.root / f"{self._number}-again"
        shutil.copytree(ended.directory, copy)
        for checkpoint in (copy / "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step-")) > step:
                shutil.rmtree(checkpoint)
        for file in (*copy.glob("state/*"), *copy.glob("logs/*"), copy / "metrics.jsonl"):
            file.unlink()
        return self.run(copy)

    def _trained(self, name: str) -> Ended:
        return self.run(self.render(name)).well()

    def _prepare(self, *chosen: str) -> None:
        # It keeps what it has made before.
        self._trnslurm("data", "prepare", *chosen, "--set", f"data_root={self.root / 'data'}")

    def _trnslurm(self, *arguments: str, cwd: Path | None = None) -> None:
        done = run_process(
            [sys.executable, "-m", "trnslurm", *arguments],
            env=self._environ,
            cwd=cwd or self.root,
            timeout_s=LIMIT_S,
        )
        assert done.code == 0, f"trnslurm {' '.join(arguments)}\n{done.out}{done.err}"


def apart(one: Ended, other: Ended, key: str = "loss") -> float:
    """Return how far two runs differ at most, relatively, in the steps that both have."""
    ones, others = one.column(key), other.column(key)
    steps = ones.keys() & others.keys()
    assert steps
    return max(abs(ones[step] - others[step]) / abs(others[step]) for step in steps)
