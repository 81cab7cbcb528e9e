"""A checkpoint as a Hugging Face folder: what transformers makes of it."""

import filecmp
import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from trnslurm.saves.manifest import write_manifest
from trnslurm.train.checkpoint.reading import prove
from trnslurm.train.data.text import END_OF_TEXT, open_text
from trnslurm.train.errors import TrainError
from trnslurm.train.export import folder

from .folders import FOLDER, TOKENIZER, VOCAB_SIZE, change_plan, load, logits, model_of, names

TEXT = Path(__file__).parents[3] / "jobs" / "gpt2_zero1" / "text.txt"


def test_the_folder_gives_the_logits_of_the_checkpoint(export, run_dir, capfd):
    out, err = export()
    folder = run_dir / "exported" / "step-6"
    assert (out, err) == (f"Wrote {folder} (step 6, 0.1 M parameters)\n", "")
    assert names(folder) == sorted(FOLDER + TOKENIZER)
    assert names(run_dir / "exported") == ["step-6"]

    model = load(folder)
    assert capfd.readouterr().err == ""
    assert torch.equal(logits(model), logits(model_of(run_dir, 6)))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config.eos_token_id == model.generation_config.eos_token_id


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_model_is_written_as_save_pretrained_does(
    export, run_dir, tmp_path, monkeypatch, dtype
):
    """Byte for byte, though its parameters are read one at a time."""
    read: list[str] = []
    written: list[int] = []
    reader, write = folder.parameter_reader, folder.write_each

    def reader_that_tells(*words):
        one = reader(*words)
        return lambda name: read.append(name) or one(name)

    def write_and_count(path, entries, read_one, about):
        assert len(read) == sum(written), "it has read ahead"
        written.append(len(entries))
        write(path, entries, read_one, about)

    small = functools.partial(folder.split_torch_state_dict_into_shards, max_shard_size="80KB")
    monkeypatch.setattr(folder, "split_torch_state_dict_into_shards", small)
    monkeypatch.setattr(folder, "parameter_reader", reader_that_tells)
    monkeypatch.setattr(folder, "write_each", write_and_count)
    export("--dtype", dtype)
    assert len(written) > 1 and len({*read}) == len(read)
    model = model_of(run_dir, 6).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "whole", max_shard_size="80KB")
    files = names(tmp_path / "whole")
    _, differ, missing = filecmp.cmpfiles(
        tmp_path / "whole", run_dir / "exported/step-6", files, shallow=False
    )
    assert {*differ} <= {"config.json", "generation_config.json"} and not missing


def test_the_log_says_how_many_epochs_the_steps_are(trained):
    assert re.search(r"\n  steps   6 of [0-9,]+ tokens each, 1 epoch\n", trained.output)


def test_the_folder_has_the_loss_that_training_saw(export, run_dir, trained, data):
    export()
    model = load(run_dir / "exported" / "step-6")
    # The preset's eval_samples, seq_len and seed.
    tokens = open_text(data, split="eval", seq_len=64, seed=1234).samples(0, 8)
    with torch.no_grad():
        flat = model(tokens).logits[:, :-1].flatten(0, 1)
    loss = cross_entropy(flat, tokens[:, 1:].flatten()).item()
    assert loss == pytest.approx(trained.lines()[-1]["eval_loss"], rel=1e-5)


def test_an_earlier_step_in_bfloat16(export, run_dir, tmp_path, stable):
    output = tmp_path / "new" / "half"
    out, _ = export("--step", 3, "--dtype", "bfloat16", "--output", output, "--json")
    whole = model_of(run_dir, 3)
    stable.json("export", json.loads(out))
    assert json.loads(out) == {
        "directory": str(output),
        "step": 3,
        "parameters": sum(parameter.numel() for parameter in whole.parameters()),
        "dtype": "bfloat16",
        "tokenizer": True,
    }
    half = load(output, dtype="auto")
    for (name, parameter), wanted in zip(half.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter, wanted.bfloat16()), name
    # Of logits up to 3 or so, in 8 bits of mantissa.
    assert torch.allclose(logits(half), logits(whole), atol=0.05)
    assert not torch.equal(logits(half), logits(whole))


def test_the_best_by_its_score(export, run_dir):
    with pytest.raises(TrainError, match=r"no checkpoint has a score\. Set train\.keep_best"):
        export("--step", "best")
    followed = run_dir / "follow/eval/best/step-00000003"
    followed.parent.mkdir(parents=True)
    followed.symlink_to(run_dir / "checkpoints" / followed.name)
    assert "step-3 (step 3" in export("--step", "best", "--output", run_dir / "a/step-3")[0]
    for step, score in ((3, 0.75), (6, 0.5)):
        checkpoint = run_dir / "checkpoints" / f"step-{step:08d}"
        write_manifest(checkpoint, replace(prove(checkpoint), score={"macro_f1": score}))
    out, err = export("--step", "best")
    folder = run_dir / "exported" / "step-3"
    assert (out, err) == (f"Wrote {folder} (step 3, 0.1 M parameters)\n", "")
    assert torch.equal(logits(load(folder)), logits(model_of(run_dir, 3)))


def test_the_tokenizer_is_that_of_the_data(export, run_dir, data):
    export()
    folder = run_dir / "exported" / "step-6"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    index = json.loads((data / "index.json").read_text())
    text = "It's a  test: Käse, 目录\n\nof bytes"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == index["vocab_size"] == VOCAB_SIZE
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == index["end_of_text"]
    assert tokenizer.model_max_length == 64
    model = load(folder)
    assert model.config.eos_token_id == index["end_of_text"]
    prompt = tokenizer("The", return_tensors="pt")
    said = model.generate(
        **prompt, max_new_tokens=5, do_sample=False, pad_token_id=index["end_of_text"]
    )
    assert tokenizer.decode(said[0]).startswith("The")


@pytest.mark.parametrize("job_text", [True, False])
def test_bytes_have_an_end_and_no_tokenizer(export, run_dir, job_text):
    change_plan(run_dir, data="" if job_text else str(TEXT))
    _, err = export()
    assert err == ""
    assert names(run_dir / "exported" / "step-6") == FOLDER
    assert load(run_dir / "exported" / "step-6").config.eos_token_id == END_OF_TEXT


def test_data_that_is_gone_costs_the_tokenizer_only(export, run_dir, tmp_path):
    change_plan(run_dir, data=str(tmp_path / "gone"))
    _, err = export()
    assert err.startswith(f"warning: exported without a tokenizer: {tmp_path / 'gone'}: no ")
    assert names(run_dir / "exported" / "step-6") == FOLDER
    assert load(run_dir / "exported" / "step-6").config.eos_token_id is None


def test_data_that_is_another_now_costs_the_tokenizer(export, run_dir, data):
    checkpoint = run_dir / "checkpoints" / "step-00000006"
    manifest = prove(checkpoint)
    write_manifest(checkpoint, replace(manifest, facts=manifest.facts | {"data": "another"}))
    _, err = export()
    assert err == (
        f"warning: exported without a tokenizer: {data} has changed since this run was trained on "
        "it; --tokenizer DIR adds one\n"
    )
    assert names(run_dir / "exported" / "step-6") == FOLDER
