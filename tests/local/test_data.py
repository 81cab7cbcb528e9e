"""From a text to a training on its tokens, on this machine and without a network."""

from __future__ import annotations

import json
from pathlib import Path

SMALL = ("gpt2_zero1", "--preset", "small", "--cluster", "local")


def test_a_text_is_prepared_and_trained_on(run_cli, home: Path) -> None:
    runs = f"run_root={home}/runs"
    refused = run_cli("submit", *SMALL, "--set", runs)
    assert refused.err.splitlines()[-1] == (
        "error: no prepared data at ~/trnslurm-data/gpt2-small: trnslurm data prepare gpt2_zero1 "
        "--preset small --cluster local"
    )
    prepared = run_cli("data", "prepare", *SMALL, timeout_s=120)
    data = home / "trnslurm-data/gpt2-small"
    assert prepared.code == 0, prepared
    assert prepared.out.startswith(f"Prepared {data}: train ")
    assert "tokenizing: 100%" in prepared.err
    before = {file: file.stat().st_mtime_ns for file in data.iterdir()}
    again = run_cli("data", "prepare", *SMALL, timeout_s=120)
    assert again.code == 0 and "nothing to do" in again.out
    assert {file: file.stat().st_mtime_ns for file in data.iterdir()} == before
    assert run_cli("data", "verify", *SMALL).out == f"{data}: as its index says\n"

    steps = ("--set", "steps=3", "--set", "train.log_every=1", "--set", "device=cpu")
    trained = run_cli("submit", *SMALL, *steps, "--set", runs, timeout_s=240)
    assert trained.code == 0, trained
    (run,) = (home / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    # 512 tokens, all about as likely at first.
    assert len(losses) == 3 and abs(losses[0] - 6.24) < 0.2
    assert list(data.parent.iterdir()) == [data]
