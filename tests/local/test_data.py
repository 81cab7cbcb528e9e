"""From a text to a training on its tokens, on this machine and without a network."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, models

from ..json_lines import read_lines
from ..prepare.bucket import Bucket

pytestmark = pytest.mark.rest

STAND_INS = Path(__file__).parents[1] / "prepare" / "stand_ins"
SMALL = ("gpt2_zero1", "--preset", "small", "--cluster", "local")
TINY = ("bert_pretrain", "--preset", "tiny", "--cluster", "local")
TWEETS = ("bert_sentiment", "--preset", "tiny", "--cluster", "local")


def test_a_text_is_prepared_and_trained_on(run_cli, home: Path) -> None:
    runs = f"run_root={home}/runs"
    refused = run_cli("submit", *SMALL, "--set", runs)
    assert refused.err.splitlines()[-1] == (
        "error: no prepared data at ~/trnslurm-data/gpt2-small: run trnslurm data prepare "
        "gpt2_zero1 --preset small --cluster local"
    )
    prepared = run_cli("data", "prepare", *SMALL)
    data = home / "trnslurm-data/gpt2-small"
    assert prepared.code == 0, prepared
    assert prepared.out.startswith(f"Prepared {data}: train ")
    assert "tokenizing: 100%" in prepared.err
    before = {file: file.stat().st_mtime_ns for file in data.iterdir()}
    again = run_cli("data", "prepare", *SMALL)
    assert again.code == 0 and "nothing to do" in again.out
    assert {file: file.stat().st_mtime_ns for file in data.iterdir()} == before
    assert run_cli("data", "verify", *SMALL).out == f"{data}: complete, matches its index\n"

    steps = ("--set", "steps=3", "--set", "train.log_every=1", "--set", "device=cpu")
    trained = run_cli("submit", *SMALL, *steps, "--set", runs)
    assert trained.code == 0, trained
    (run,) = (home / "runs").iterdir()
    lines = read_lines(run / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    # 512 tokens, all about as likely at first.
    assert len(losses) == 3 and abs(losses[0] - 6.24) < 0.2
    assert list(data.parent.iterdir()) == [data]


def test_berts_shards_are_prepared_published_fetched_and_trained_on(
    run_cli, home: Path, monkeypatch
) -> None:
    """What is prepared from a directory of text is unlike what is published in this only: a tar."""
    runs = f"run_root={home}/runs"
    refused = run_cli("submit", *TINY, "--set", runs)
    assert refused.err.splitlines()[-1] == (
        "error: no prepared data at ~/trnslurm-data/bert-tiny-seqlen32: run trnslurm data prepare "
        "bert_pretrain --preset tiny --cluster local"
    )
    prepared = run_cli("data", "prepare", *TINY)
    data = home / "trnslurm-data/bert-tiny-seqlen32"
    assert prepared.code == 0, prepared
    assert "from 131 documents in 4 shards, eval 97 samples" in prepared.out
    assert run_cli("data", "verify", *TINY).out == f"{data}: complete, matches its index\n"

    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.add(data, "somebody's shards")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Bucket(files={"/shards.tar": tar.getvalue()}) as bucket:
        url = f"data.published={bucket.url('/shards.tar')}"
        fetched = run_cli("data", "fetch", *TINY, "--set", url, "--set", "data.path=theirs")
    assert fetched.out.startswith(f"Fetched {data.with_name('theirs')}: 5 shards with 1,"), fetched
    theirs = ("--set", "data.path=theirs")
    assert "of 32 tokens, at most 5 of them" in run_cli("data", "verify", *TINY, *theirs).out

    steps = ("--set", "steps=3", "--set", "device=cpu", "--set", "train.save_every=0")
    trained = run_cli("submit", *TINY, *theirs, *steps, "--set", runs)
    assert trained.code == 0, trained
    (run,) = (home / "runs").iterdir()
    lines = read_lines(run / "metrics.jsonl")
    losses = [line["mlm_loss"] for line in lines if "mlm_loss" in line]
    # 512 tokens, all about as likely at first.
    assert len(losses) == 3 and abs(losses[0] - 6.24) < 0.2
    assert any("eval_mlm_loss" in line for line in lines)


def test_tweets_are_prepared_trained_on_by_two_nodes_and_the_best_exported(
    run_cli, home: Path
) -> None:
    for words, error in {
        ("--label-column", "mood"): "line 1: there is no column mood, only text, labels: choose",
        ("--label", "good", "--label", "bad"): "is not one of good, bad, nor a number from 0 to 1",
        ("--task", "mrcp"): "--task mrcp: must be a GLUE task (cola, sst2, mrpc,",
    }.items():
        refused = run_cli("data", "prepare", *TWEETS, *words)
        [line] = [line for line in refused.err.splitlines() if line.startswith("error: ")]
        assert refused.code == 1 and error in line, refused
    assert not (home / "trnslurm-data").exists() or not any((home / "trnslurm-data").iterdir())
    prepared = run_cli("data", "prepare", *TWEETS)
    assert "train 336 samples (negative 112, neutral 112, positive 112), eval" in prepared.out

    options = ("--nodes", "2", "--set", "device=cpu", "--set", f"run_root={home}/runs")
    trained = run_cli("submit", *TWEETS, *options)
    assert trained.code == 0 and "COMPLETED" in trained.out, trained
    (run,) = (home / "runs").iterdir()
    lines = read_lines(run / "metrics.jsonl")
    scores = {
        line["step"]: line["eval_macro_f1"]
        for line in lines
        if "eval_macro_f1" in line and line["step"] > 1  # of which there is no checkpoint
    }
    assert lines[-1]["eval_accuracy"] > 0.8, "a third is chance"
    done = run_cli("export", run, "--step", "best", "--json")
    assert (done.code, done.err) == (0, ""), done
    assert json.loads(done.out)["step"] == max(scores, key=lambda step: scores[step])


def test_what_is_fetched_is_what_is_prepared(run_cli, home: Path, tmp_path: Path) -> None:
    """With stand-ins for the Hub's libraries, which no network is needed for."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
export PYTHONPATH="$PYTHONPATH:{STAND_INS}" STAND_IN_CALLS='{tmp_path}/calls'
export STAND_IN_TOKENIZER='{tmp_path}/words.json'
exec '{sys.executable}' "$@"
""")
    python.chmod(0o755)
    words = Tokenizer(models.WordLevel({"<eos>": 0, "Text": 1}, unk_token="<eos>"))
    words.save(str(tmp_path / "words.json"))
    profile = {"scheduler": "local", "instance_type": "local", "python": str(python)}
    file = tmp_path / "mine/cluster-config/hub.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(profile))
    xl = ("gpt2_zero1", "--path", tmp_path / "mine", "--cluster", "hub",
          "--set", "data.dataset=wikitext")  # fmt: skip

    fetched = run_cli("data", "fetch", *xl)
    hub = home / "trnslurm-data/hub/wikitext--wikitext-103-raw-v1--gpt2"
    assert fetched.out.startswith(f"Fetched {hub}: train 6 rows, "), fetched
    assert "is already fetched; there is nothing to do" in run_cli("data", "fetch", *xl).out
    prepared = run_cli("data", "prepare", *xl)
    data = home / "trnslurm-data/wikitext-103"
    assert prepared.code == 0, prepared
    index = json.loads((data / "index.json").read_text())
    # Rows join into articles, and the dataset has its own split for evaluation.
    assert [index["splits"][name]["documents"] for name in ("train", "eval")] == [2, 1]
    assert index["vocab_size"] == 2
