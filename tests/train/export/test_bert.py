"""BERT's export: files of AWS's sample, and tokenizers."""

import functools
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BertConfig, BertForPreTraining

from trnslurm.train.data.shards.index import ShardSplit, index_shards, read_shard_index
from trnslurm.train.errors import TrainError

from ...processes import run_process
from ..conftest import JOBS, tiny_plan
from ..make_shards import make_shards
from ..measures import import_job

pytestmark = pytest.mark.rest

JOB = JOBS / "bert_pretrain"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "lamp", "##s"]


@pytest.fixture
def run_dir(weird_path):
    """What `trnslurm export` makes for a file of no run: a plan, and no checkpoints."""
    plan = tiny_plan("cpu", 1, 1, job=JOB, data=str(weird_path / "data"))
    (weird_path / "plan.json").write_text(json.dumps(plan))
    return weird_path


@pytest.fixture
def model(run_dir):
    """A model in a file of the sample's layout."""
    values = json.loads((run_dir / "plan.json").read_text())["model"]
    model = BertForPreTraining(BertConfig(**values)).eval()
    state = {
        f"module.{name.replace('transform.dense', 'transform.dense_act')}": tensor
        for name, tensor in model.state_dict().items()
    }
    torch.save({"model": state, "epoch": 1}, run_dir / "ckpt_3.pt")
    return model


@pytest.fixture
def export(run_dir, run_export):
    """Call the job's export script in this process; give what it printed."""
    return functools.partial(run_export, JOB, run_dir)


def write_tokenizer(directory: Path, words: list[str]) -> Path:
    """Write a tokenizer.json as data preparation does: without a frame of [CLS] and [SEP]."""
    directory.mkdir(exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_a_file_of_the_sample_with_the_tokenizer_of_a_folder(export, run_dir, model):
    hub = run_dir / "bert-large-uncased"
    hub.mkdir()
    (hub / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (hub / "README.md").touch()
    out, err = export("--from", run_dir / "ckpt_3.pt", "--tokenizer", hub)
    folder = run_dir / "exported" / "ckpt_3"
    assert (out, err) == (f"Wrote {folder} (from ckpt_3.pt, 0.1 M parameters)\n", "")

    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "model.safetensors", "vocab.txt",
    ]  # fmt: skip
    encoded = AutoTokenizer.from_pretrained(folder)("A lamps", return_tensors="pt")
    assert encoded.input_ids.tolist() == [[2, 5, 6, 7, 3]]
    loaded, info = BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    for (name, one), other in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert loaded(**encoded).prediction_logits.shape == (1, 5, 512)


def test_the_command_runs_the_recipes_script_on_a_file(run_dir, model, tmp_path):
    """In the code that the command sends, which has everything that the script imports."""
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    command = [sys.executable, "-m", "trnslurm", "export", str(run_dir / "ckpt_3.pt")]
    command += ["--recipe", "bert_pretrain", "--preset", "tiny", "--cluster", "local", "-o", "out"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_process(command, env=env, cwd=directory)
    assert done.code == 0, done.err
    assert done.out == f"Wrote {directory / 'out'} (from ckpt_3.pt, 0.1 M parameters)\n"
    loaded = BertForPreTraining.from_pretrained(directory / "out")
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_tokenizer_of_prepared_shards_gets_its_frame(export, run_dir, model):
    job = import_job(JOB / "export.py")
    path = write_tokenizer(run_dir / "data", WORDS) / "tokenizer.json"
    tokenizer = job.make_tokenizer(path, {"vocab_size": 512, "max_position_embeddings": 32})
    tokenizer.save_pretrained(run_dir / "saved")
    loaded = AutoTokenizer.from_pretrained(run_dir / "saved")
    assert loaded("A lamps", "a").input_ids == [2, 5, 6, 7, 3, 5, 3]
    assert loaded("A lamps", "a").token_type_ids == [0, 0, 0, 0, 0, 1, 1]
    assert (loaded.mask_token_id, loaded.pad_token_id, loaded.model_max_length) == (4, 0, 32)
    with pytest.raises(ValueError, match="it has 8 tokens, more than the model"):
        job.make_tokenizer(path, {"vocab_size": 7, "max_position_embeddings": 32})


def test_shards_that_are_others_now_cost_the_tokenizer(run_dir):
    job = import_job(JOB / "export.py")
    data = run_dir / "data"
    plan, manifest = SimpleNamespace(data=str(data), model={}), SimpleNamespace(facts={"data": "a"})
    changed = f"{data} has changed since this run was trained on it"
    with pytest.raises(TrainError, match=re.escape(changed)):
        job.find_tokens(plan, manifest, run_dir)

    make_shards(data, [3])
    split = ShardSplit(data, "train", run_dir)
    index_shards(split)
    with pytest.raises(TrainError, match=re.escape(changed)):
        job.find_tokens(plan, manifest, run_dir)
    manifest.facts["data"] = read_shard_index(split).fingerprint
    with pytest.raises(TrainError, match=re.escape(f"{data} has none")):
        job.find_tokens(plan, manifest, run_dir)


def test_what_does_not_suit_the_model_leaves_nothing(export, run_dir, model):
    many = write_tokenizer(run_dir / "many", WORDS + [f"word{n}" for n in range(600)])
    (run_dir / "none").mkdir()
    (run_dir / "broken").mkdir()
    (run_dir / "broken" / "tokenizer.json").write_text("{}")
    for directory, words in (
        (many, "has 608 tokens, but the model has 512"),
        (run_dir / "none", "has none of tokenizer.json, "),
        (run_dir / "broken", "has no loadable tokenizer"),
    ):
        with pytest.raises(TrainError, match=words) as error:
            export("--from", run_dir / "ckpt_3.pt", "--tokenizer", directory)
        assert "\n" not in str(error.value).replace(str(directory), "")
    torch.save({"model": {"more": torch.ones(1)}}, run_dir / "other.pt")
    with pytest.raises(
        TrainError, match=r"export: .*other\.pt does not match the model: missing: bert"
    ):
        export("--from", run_dir / "other.pt")
    assert not (run_dir / "exported").exists() or not any((run_dir / "exported").iterdir())
