"""Tests for a machine with a GPU: `make test-gpu`. With DEVICE=cpu they rehearse without one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import machine
from .trainings import Trainings

Case = dict[str, Any]
_cases: dict[str, Case] = {}


def _doc(item: pytest.Item) -> str:
    text = getattr(item, "function", item).__doc__ or ""
    return text.strip().partition("\n")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With DRY_RUN=1 list what would run, each with its command, and run nothing."""
    if not os.environ.get("TRNSLURM_GPU_LIST"):
        return None
    print()
    for item in session.items:
        print(f"make test-gpu ONLY='{item.name}'\n    {_doc(item)}")
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take down how a test ended, and what it says that it saw."""
    if report.when == "call" or report.outcome != "passed":
        skipped = isinstance(report.longrepr, tuple)
        _cases[report.nodeid] = {
            # Without the group that pytest-xdist appends.
            "case": report.nodeid.partition("::")[2].partition("@")[0],
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "seen": dict(report.user_properties),
            "reason": report.longrepr[2].removeprefix("Skipped: ") if skipped else "",
        }


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was seen as a table for docs, and write it as JSON; the main process does."""
    results = os.environ.get("TRNSLURM_GPU_RESULTS")
    if not _cases or hasattr(config, "workerinput") or not results:
        return
    cases = sorted(_cases.values(), key=lambda case: case["case"])
    device = os.environ["TRNSLURM_GPU_DEVICE"]
    record = {"device": device, "machine": machine.facts(device), "cases": cases}
    Path(results).mkdir(parents=True, exist_ok=True)
    Path(results, "tests.json").write_text(json.dumps(record, indent=1) + "\n")
    terminalreporter.section(record["machine"][0])
    for line in ("| case | outcome | seen |", "|---|---|---|", *map(_row, cases)):
        terminalreporter.write_line(line)


def _row(case: Case) -> str:
    seen = case["reason"] or ", ".join(f"{name} {value}" for name, value in case["seen"].items())
    return f"| `{case['case']}` | {case['outcome']} | {seen} |"


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test; without one nothing is passed off as seen."""
    name = os.environ.get("TRNSLURM_GPU_DEVICE", "cuda")
    if problem := machine.missing(name):
        pytest.exit(f"error: {problem}", returncode=1)
    return name


@pytest.fixture(scope="session")
def gpus(device: str) -> int:
    """How many GPUs there are; a CPU serves any number of workers."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else 8


@pytest.fixture(scope="session")
def trainings(
    device: str, tmp_path_factory: pytest.TempPathFactory, path_without_slurm: str
) -> Trainings:
    """What renders and runs trainings of this device."""
    return Trainings(device=device, root=tmp_path_factory.mktemp("gpu"), path=path_without_slurm)


@pytest.fixture
def saw(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Note figures for the table."""

    def note(**figures: object) -> None:
        for name, value in figures.items():
            text = f"{value:.1e}" if isinstance(value, float) else value
            record_property(name.replace("_", " "), text)

    return note
