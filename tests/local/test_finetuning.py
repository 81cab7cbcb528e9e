"""Fine-tuning on this machine and without a network: from rows to scores, and to a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..json_lines import read_lines

pytestmark = pytest.mark.rest

TINY = ("bert_mrpc", "--preset", "tiny", "--cluster", "local")
PRETRAIN = ("bert_pretrain", "--preset", "tiny", "--cluster", "local")
ON_CPU = ("--set", "device=cpu")


def test_pairs_are_told_apart_on_two_nodes(run_cli, home: Path) -> None:
    runs = f"run_root={home}/runs"
    prepared = run_cli("data", "prepare", *TINY)
    data = home / "trnslurm-data/mrpc-tiny-seqlen32"
    assert prepared.out.startswith(f"Prepared {data}: train 320 samples ("), prepared

    trained = run_cli("submit", *TINY, "--nodes", "2", *ON_CPU, "--set", runs)
    assert trained.code == 0, trained
    assert "COMPLETED" in trained.out
    (run,) = (home / "runs").iterdir()
    last = read_lines(run / "metrics.jsonl")[-1]
    # Half of the pairs are equivalent: chance is 0.5.
    assert last["step"] == 60 and last["eval_accuracy"] > 0.9 and last["eval_f1"] > 0.9
    assert f"eval_accuracy {last['eval_accuracy']:.4f}" in run_cli("logs", "last").out

    exported = run_cli("export", "last", "--json")
    assert exported.code == 0, exported
    folder = Path(json.loads(exported.out)["directory"])
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "not_equivalent", "1": "equivalent"}
    assert (folder / "tokenizer.json").is_file()


def test_it_goes_on_from_a_pretraining_with_its_tokenizer(run_cli, home: Path) -> None:
    runs = ("--set", f"run_root={home}/runs")
    few = (*ON_CPU, "--set", "steps=3", "--set", "train.eval_every=0")
    assert run_cli("data", "prepare", *PRETRAIN).code == 0
    pretrained = run_cli("submit", *PRETRAIN, *few, *runs)
    assert pretrained.code == 0, pretrained

    shards = home / "trnslurm-data/bert-tiny-seqlen32"
    own = home / "trnslurm-data/mrpc-own"
    prepared = run_cli("data", "prepare", *TINY, "--tokenizer", shards, "--output", own)
    assert prepared.code == 0, prepared
    here = ("--set", f"data.path={own}")
    trained = run_cli("submit", *TINY, *here, *few, *runs, "--from", "last")
    assert trained.code == 0, trained
    run = max((home / "runs").glob("*bert_mrpc*"))
    [first] = (home / "runs").glob("*bert_pretrain*")
    assert json.loads((run / "plan.json").read_text())["train"]["init_from"] == str(
        first / "checkpoints/step-00000003"
    )
    log = run_cli("logs", "last").out
    assert "new: classifier.weight, classifier.bias; left out: cls." in log
    assert "512 of" in log and len(read_lines(run / "metrics.jsonl")) == 3
