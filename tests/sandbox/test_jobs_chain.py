"""BERT in two phases on a real Slurm: the second waits, and goes on from the first one's result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertForPreTraining

from ..train.make_shards import make_shards

pytestmark = pytest.mark.rest

BERT = "bert_pretrain"


def make_data(root: Path) -> None:
    for name, seq_len, max_pred in (("bert-tiny-seqlen32", 32, 5), ("bert-tiny-seqlen64", 64, 10)):
        for split, sizes in (("training", [9, 7]), ("test", [8])):
            shape = {"split": split, "seq_len": seq_len, "max_pred": max_pred}
            make_shards(root / name, sizes, **shape)


def test_phase_1_phase_2_export(user) -> None:
    data = user.home / "data"
    make_data(data)
    # Without XLA there is nothing to compile, which saves most of the time. Phase 1 ends early.
    small = ("device=cpu", "tiny:train.stop_at=2", "tiny_phase2:steps=2", f"data_root={data}")
    one, two = user.submit_chain(BERT, *small, nodes=2)
    assert [run.path.name.split("-", 2)[2] for run in (one, two)] == [
        "bert_pretrain-tiny", "bert_pretrain-tiny_phase2",
    ]  # fmt: skip
    assert two.job()["Dependency"].startswith(f"afterok:{one.jobs['train']}")
    assert two.status()["reason"] == f"waiting for {one.path.name}"
    two.until("COMPLETED", 300)
    assert one.state == "COMPLETED"
    taken = one.path / "checkpoints/step-00000002"
    assert f"initial parameters: {taken}\n" in two.logs("-n", "0")
    # By hand it would have been the same checkpoint, and be named.
    words = (BERT, "--preset", "tiny_phase2", "--from", str(one.path), "--json")
    shown = json.loads(user.trnslurm("show", *words, *user.options(2)[:2]))
    assert shown["config"]["train"]["init_from"] == str(taken)

    user.trnslurm("export", str(two.path), "--format", "hf", "-o", user.home / "exported")
    for kind in (AutoModel, BertForPreTraining):
        model = kind.from_pretrained(user.home / "exported")
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert model.config.max_position_embeddings == 64


def test_phase_2_does_not_start_after_a_failure(user) -> None:
    make_data(user.home / "data")
    one, two = user.submit_chain(BERT, f"data_root={user.home / 'data'}", "activate=[exit 3]")
    assert list(one.jobs) == list(two.jobs) == ["precompile", "train"]
    two.until("CANCELLED")
    assert one.state == "FAILED"
    assert f": CANCELLED (precompile: never started: {one.path.name} is FAILED)" in two.shown()
