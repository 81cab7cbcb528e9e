"""What submit says of data that another library wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

WRITTEN = Path(__file__).parents[1] / "datasets/written"
SUBMIT = ("submit", "gpt2_zero1", "--preset", "tiny", "--dry-run")
PLAN = ("plan", "gpt2_zero1", "--preset", "tiny", "--cluster", "local", "--nodes", "1")
NOT_EVALUATED = ("--set", "train.eval_every=0")


@pytest.fixture
def said(site, cli):
    """Submit with data on this machine, and return the lines about the data."""

    def submit(data: Path | str, *options: str, cluster: str = "local") -> str:
        done = cli(*SUBMIT, "--cluster", cluster, "--set", f"data.path={data}", *options)
        lines = [each for each in done.err.splitlines() if each.startswith(("Data:", "error:"))]
        assert len(lines) == 1, done.err
        assert (done.code == 0) == lines[0].startswith("Data: ")
        return lines[0]

    return submit


def test_it_says_what_the_data_is(said, tmp_path: Path) -> None:
    megatron = WRITTEN / "megatron"
    assert said(megatron, *NOT_EVALUATED) == "Data: Megatron, 12 documents, 1,052 tokens"
    assert said(megatron / "a_text", *NOT_EVALUATED) == "Data: Megatron, 7 documents, 601 tokens"
    assert said(WRITTEN / "arrow") == "Data: Arrow, 699 tokens"
    assert said(WRITTEN / "mds/zstd", *NOT_EVALUATED) == "Data: MDS, 1,052 tokens"
    assert said(WRITTEN / "parquet", *NOT_EVALUATED) == "Data: Parquet, 1,052 tokens"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.md").touch()
    assert said(tmp_path / "other").startswith(f"error: no prepared data at {tmp_path}/other: ")


def test_it_refuses_what_does_not_fit(said, tmp_path: Path) -> None:
    assert said(WRITTEN / "megatron") == (
        f"error: {WRITTEN}/megatron: there is no split eval or validation or valid or val or dev "
        "(pass --set train.eval_every=0 to train without it)"
    )
    assert "a single file has no split eval" in said(WRITTEN / "megatron/a_text")
    assert said(WRITTEN / "arrow", "--set", "model.vocab_size=150") == (
        f"error: model.vocab_size is 150, but the data at {WRITTEN}/arrow contains token 199: "
        "set model.vocab_size to the vocabulary size of the data's tokenizer"
    )
    shutil.copytree(WRITTEN / "datatrove", tmp_path / "corpus")
    cut = tmp_path / "corpus/00000_shuffled.ds"
    cut.write_bytes(b"12")
    assert said(tmp_path / "corpus", *NOT_EVALUATED) == (
        f"error: {cut}: damaged: is 2 bytes, but its index lists 601 tokens"
    )


def test_a_host_without_the_python_leaves_it_to_the_job(said, site, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    site.profile("mine", scheduler="local", instance_type="local", python=str(tmp_path / "python"))
    line = said(WRITTEN / "arrow", cluster="mine")
    assert line.startswith(f"Data: {WRITTEN}/arrow, which could not be checked on this host (")


def test_a_plan_says_so_too(site, cli) -> None:
    def plan(name: str, *options: str) -> list[str]:
        done = cli(*PLAN, "--set", f"data.path={WRITTEN / name}", *options)
        assert done.code == 0
        return [each for each in done.out.splitlines() if "ata: " in each or "data cannot" in each]

    assert plan("arrow") == ["Data: Arrow, 699 tokens"]
    [line] = plan("arrow", "--set", "seq_len=512", "--set", "model.n_positions=512")
    assert line.startswith(
        "This data cannot be used: seq_len is 512, but the eval split of the data at "
    )
