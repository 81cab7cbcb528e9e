"""A sharded training on this machine, from its recipe to a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..json_lines import read_lines

pytestmark = pytest.mark.rest

TINY = ("llama3_clm", "--cluster", "local", "--preset", "tiny")


def test_a_llama_learns_on_two_nodes_and_is_exported(run_cli, home: Path) -> None:
    runs = ("--set", f"run_root={home}/runs")
    trained = run_cli("submit", *TINY, "--nodes", "2", *runs)
    assert trained.code == 0, trained
    assert "COMPLETED" in trained.out
    (run,) = (home / "runs").iterdir()
    strategy = json.loads((run / "strategy.json").read_text())
    assert strategy["fsdp_transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]
    lines = read_lines(run / "metrics.jsonl")
    # 257 tokens, all about as likely at first.
    assert abs(lines[0]["loss"] - 5.55) < 0.1
    assert lines[-1]["step"] == 30 and lines[-1]["loss"] < 3.0
    for line in lines:
        assert abs(line["tokens_per_s_per_device"] - line["tokens_per_s"] / 2) < 0.11
    assert "per device" in run_cli("logs", "last").out

    exported = run_cli("export", "last", "--json")
    assert exported.code == 0, exported
    result = json.loads(exported.out)
    assert result["step"] == 30 and result["parameters"] == 106_944
    config = json.loads((Path(result["directory"]) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_groups_of_two_workers_go_on_on_another_number_of_nodes(run_cli, home: Path) -> None:
    alone = ("--set", "device=cpu", "--set", f"run_root={home}/runs", "--set", "steps=6")
    tensor = (*TINY[:-1], "tiny_tensor", *alone)
    for options in (
        ("submit", *tensor, "--nodes", "2", "--set", "train.stop_at=3"),
        ("resume", "last", "--nodes", "1"),
        ("submit", *tensor, "--set", "strategy.tensor.workers=1", "--set", "workers_per_node=1"),
    ):
        done = run_cli(*options)
        assert done.code == 0, done
    resumed, one = sorted((home / "runs").iterdir())
    assert json.loads((resumed / "strategy.json").read_text()) == {"workers": 2}
    lines, alike = (read_lines(run / "metrics.jsonl") for run in (resumed, one))
    assert [line["attempt"] for line in lines] == [1] * 3 + [2] * 3
    for line, other in zip(lines, alike, strict=True):
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(other[key], rel=1e-6)
