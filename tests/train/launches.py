"""Launches of workers that run several trainings one after another, and what those leave behind."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from trnslurm.contract.checkpoints import checkpoints_in
from trnslurm.train.checkpoint.manifest import CheckpointManifest, verify
from trnslurm.train.checkpoint.reading import Parameters

from ..json_lines import read_lines
from .conftest import JOB, run_workers, strategy_of, tiny_plan

SCENARIOS = Path(__file__).with_name("scenarios.py")
# Unlike Adam, SGD sees a wrong scale of the gradients; tests clip them in every step.
SGD = {"train__optimizer": "sgd", "train__lr": 0.3, "train__schedule": "constant"}
# Of BERT, and of its relatives; compiling takes longest, so the model is as small as can be.
SMALL = {
    "model__num_hidden_layers": 1, "model__hidden_size": 32, "model__intermediate_size": 64,
}  # fmt: skip
# Random numbers differ between XLA and PyTorch.
NO_DROPOUT = {"model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Scenario:
    """A training in a launch, from the newest checkpoint of its name if there is one."""

    name: str
    changes: dict[str, Any]
    change: str = "nothing"
    phase: str = "train"
    strategy: dict[str, Any] = field(default_factory=dict)
    """What its section of the recipe says otherwise."""


@dataclass(frozen=True)
class Outcome:
    """What all attempts of a training left."""

    metrics: list[dict[str, Any]]
    results: list[dict[str, Any]]
    """Of every worker of the last attempt."""
    ledger: list[list[Any]] = field(default_factory=list)
    """Of all attempts."""

    def column(self, key: str) -> list[float]:
        """Give a number of each line that has it."""
        return [line[key] for line in self.metrics if key in line]


@dataclass
class Launches:
    """Launches of workers, and what they left."""

    directory: Path
    data: Path
    job: Path = JOB
    outputs: list[str] = field(default_factory=list)

    def launch(
        self,
        workers: int,
        *scenarios: Scenario,
        device: str = "xla-cpu",
        cache=None,
        **environ: str,
    ):
        asked = []
        for scenario in scenarios:
            run_dir = self.directory / scenario.name
            run_dir.mkdir(exist_ok=True)
            changes = {"data": str(self.data)} | scenario.changes
            group = scenario.strategy.get("workers", 1)
            plan = tiny_plan(device, 1, workers, job=self.job, group=group, **changes)
            attempt = 1 + len(list(run_dir.glob("plan-*.json")))
            path = run_dir / f"plan-{attempt}.json"
            for file in (path, run_dir / "plan.json"):
                file.write_text(json.dumps(plan))
            if "strategy" in plan["train"]:
                (run_dir / "strategy.json").write_text(
                    json.dumps(strategy_of(plan, self.job, scenario.strategy))
                )
            asked.append(
                {"run_dir": str(run_dir), "plan": str(path), "attempt": attempt,
                 "phase": scenario.phase, "change": scenario.change}
            )  # fmt: skip
        job = str(self.job / "train.py")
        options = {"job": job, "device": device, "cache": cache, "scenarios": asked}
        (self.directory / "options.json").write_text(json.dumps(options))
        done = run_workers(
            workers, SCENARIOS, "options.json", cwd=self.directory, device=device, **environ
        )
        assert done.returncode == 0, done.stdout
        self.outputs.append(done.stdout)

    def results(self, name: str) -> list[dict[str, Any]]:
        """Give every worker's result of the last attempt."""
        return self.attempts(name)[-1]

    def outcome(self, name: str) -> Outcome:
        attempts = self.attempts(name)
        ledger = sorted(entry for attempt in attempts for one in attempt for entry in one["ledger"])
        metrics = read_lines(self.directory / name / "metrics.jsonl")
        return Outcome(metrics=metrics, results=attempts[-1], ledger=ledger)

    def saved(self, name: str) -> list[tuple[CheckpointManifest, dict[str, Tensor]]]:
        """Give the checkpoints of a training, and the parameters in each, the first one first."""
        paths = reversed(checkpoints_in(self.directory / name / "checkpoints"))
        manifests = [(path, verify(path)) for path in paths]
        return [(manifest, dict(Parameters(path, manifest))) for path, manifest in manifests]

    def attempts(self, name: str) -> list[list[dict[str, Any]]]:
        """Give every worker's result of each attempt."""
        paths = sorted((self.directory / name).glob("result-*.json"))
        attempts = sorted({path.suffixes[-2] for path in paths})
        return [
            [json.loads(path.read_text()) for path in paths if path.suffixes[-2] == attempt]
            for attempt in attempts
        ]

    def assert_trial_saw_every_graph(self, trial: str, name: str) -> None:
        """A training compiles nothing that a trial did not, and its last attempt nothing late."""
        assert all(result["misses"] > 0 for result in self.results(trial))
        outcome = self.outcome(name)
        assert {result["misses"] for result in outcome.results} == {0}
        attempt = outcome.metrics[-1]["attempt"]
        last = [line["graphs"] for line in outcome.metrics if line["attempt"] == attempt]
        assert last[-1] == last[1], "graphs after the second step"


def assert_same(
    outcome: Outcome, other: Outcome, keys: Sequence[str] = ("loss", "grad_norm"), rel: float = 1e-5
) -> None:
    """Numbers of a training are those of another, as far as the first goes."""
    for key in keys:
        found = outcome.column(key)
        assert found, key
        assert found == pytest.approx(other.column(key)[: len(found)], rel=rel), key


def assert_samples(outcome: Outcome, one: Outcome, number: int, norm: float) -> None:
    """Two trainings read the same samples, each once; all their gradients are clipped."""
    assert outcome.ledger == one.ledger
    assert [place for place, _ in outcome.ledger] == list(range(number))
    assert min(one.column("grad_norm")) > norm, "clipping is not always active"


def assert_bitwise(resumed: Outcome, whole: Outcome, keys: Sequence[str]) -> None:
    """A training that was resumed has the very numbers of one that was not."""
    for key in keys:
        assert resumed.column(key) == whole.column(key)
    assert resumed.results[0]["parameters"] == whole.results[0]["parameters"]
