"""The tiny GPT-2 on tokens of other libraries, as they lie."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from trnslurm.train.data.text import open_text
from trnslurm.train.errors import TrainError

from ..train.attempts import Run
from ..train.test_tokens import change_index, describe, write_data
from .test_formats import STREAM, WRITTEN


@pytest.mark.rest
def test_a_training_on_megatrons_tokens_resumes_bitwise(tmp_path: Path) -> None:
    changes = {
        "data": str(WRITTEN / "megatron"), "steps": 12, "train__eval_every": 0,
        "train__save_every": 4,
    }  # fmt: skip
    whole = Run(tmp_path / "whole", **changes)
    assert f"{len(STREAM):,} tokens in 17 blocks of 64" in whole.undisturbed()
    killed = Run(tmp_path / "killed", **changes)
    with killed.attempt(1) as attempt:
        attempt.reach(6)
        for rank in (0, 1):
            attempt.signal(rank, signal.SIGKILL)
        assert attempt.end() != 0
    killed.undisturbed(2)
    losses = {line["step"]: line["loss"] for line in killed.lines()}
    assert losses == {line["step"]: line["loss"] for line in whole.lines()}
    assert len(losses) == 12


def test_the_samples_are_those_of_prepared_data(tmp_path: Path) -> None:
    data = np.array(STREAM, "<u2").tobytes()
    prepared = write_data(tmp_path / "prepared", vocab_size=200)
    train = describe(prepared / "train.bin", data) | {"tokens": len(STREAM), "documents": 12}
    change_index(prepared, lambda told: told["splits"].update(train=train))
    ours = open_text(prepared, seq_len=50, seed=3).samples(0, 60)
    for name in ("megatron", "datatrove", "mds/zstd", "parquet", "jsonl"):
        text = open_text(WRITTEN / name, seq_len=50, seed=3, vocab_size=200)
        assert (text.num_tokens, text.num_blocks) == (len(STREAM), 22)
        assert torch.equal(text.samples(0, 60), ours)


def test_text_has_the_splits_and_refuses_tokens_that_the_model_lacks(tmp_path: Path) -> None:
    options = {"seq_len": 64, "seed": 1}
    held_out = open_text(WRITTEN / "arrow", split="eval", **options)
    assert (held_out.num_tokens, held_out.num_blocks) == (len(STREAM) - 699, 6)
    rows = {tuple(row) for row in held_out.samples(0, 6).tolist()}
    filled = STREAM[699:] + STREAM[699 : 699 + 6 * 64 - held_out.num_tokens]
    assert rows == {tuple(filled[at : at + 64]) for at in range(0, 6 * 64, 64)}
    with pytest.raises(TrainError, match=r"no split .*eval.*, or set train.eval_every=0"):
        open_text(WRITTEN / "megatron", split="eval", **options)
    with pytest.raises(TrainError, match=r"vocab_size is 150: .*megatron needs 200"):
        open_text(WRITTEN / "megatron", vocab_size=150, **options)
