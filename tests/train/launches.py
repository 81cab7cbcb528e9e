"""Launches of workers that run several trainings one after another, and what those leave behind."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..free_port import free_port
from ..warm import torchrun
from .conftest import JOB, make_environment, strategy_of, tiny_plan

SCENARIOS = Path(__file__).with_name("scenarios.py")
TIMEOUT_S = 900


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
        return [line[key] for line in self.metrics]


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
            plan = tiny_plan(device, 1, workers, job=self.job, **changes)
            attempt = 1 + len(list(run_dir.glob("plan-*.json")))
            path = run_dir / f"plan-{attempt}.json"
            path.write_text(json.dumps(plan))
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
        self.outputs.append(self._run(workers, device, environ))

    def _run(self, workers: int, device: str, environ: dict[str, str]) -> str:
        done = torchrun(
            ["--nnodes=1", f"--nproc_per_node={workers}", "--master_addr=127.0.0.1",
             f"--master_port={free_port()}", str(SCENARIOS), "options.json"],
            cwd=self.directory,
            env=make_environment(device, "train", self.directory) | environ,
            timeout_s=TIMEOUT_S,
            xla=device.startswith("xla"),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def results(self, name: str) -> list[dict[str, Any]]:
        """Give every worker's result of the last attempt."""
        return self.attempts(name)[-1]

    def outcome(self, name: str) -> Outcome:
        lines = (self.directory / name / "metrics.jsonl").read_text().splitlines()
        attempts = self.attempts(name)
        ledger = sorted(entry for attempt in attempts for one in attempt for entry in one["ledger"])
        return Outcome(
            metrics=[json.loads(line) for line in lines], results=attempts[-1], ledger=ledger
        )

    def attempts(self, name: str) -> list[list[dict[str, Any]]]:
        """Give every worker's result of each attempt."""
        paths = sorted((self.directory / name).glob("result-*.json"))
        attempts = sorted({path.suffixes[-2] for path in paths})
        return [
            [json.loads(path.read_text()) for path in paths if path.suffixes[-2] == attempt]
            for attempt in attempts
        ]
