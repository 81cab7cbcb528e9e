"""First parameters from elsewhere: a folder of Hugging Face, a .pt file of AWS's sample."""

import pathlib

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from trnslurm.contract.checkpoints import CHECKPOINT_FORMAT, checkpoint_name
from trnslurm.saves.manifest import file_name, write_manifest
from trnslurm.saves.memory import HostCopy, Piece
from trnslurm.train.checkpoint.manifest import CheckpointManifest
from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.errors import TrainError

SMALL = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}


def make_model(**changes):
    return GPT2LMHeadModel(GPT2Config(**SMALL | changes))


def save_checkpoint(root, step, model):
    """Write a model's parameters as a run would."""
    directory = root / checkpoint_name(step)
    directory.mkdir(parents=True)
    memory = HostCopy()
    memory.copy(Piece(f"parameter/{name}", p.data) for name, p in model.named_parameters())
    size, sha256 = memory.write(directory / file_name(0, 1))
    manifest = CheckpointManifest(
        format=CHECKPOINT_FORMAT, step=step, samples=8 * step, attempt=1, workers=1, device="cpu",
        facts={}, settings={}, kinds=["parameter"],
        files={file_name(0, 1): {"bytes": size, "sha256": sha256}},
        shapes={name: list(p.shape) for name, p in model.named_parameters()},
    )  # fmt: skip
    write_manifest(directory, manifest)


def assert_same(model, other):
    for (name, parameter), (_, expected) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), name


def test_a_folder(weird_path):
    saved, model = make_model(), make_model()
    saved.save_pretrained(weird_path)
    load_parameters(model, str(weird_path))

    assert_same(model, saved)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_embd": 16}, "transformer.wte.weight has shape [11, 8] instead of [11, 16]"),
        ({"n_layer": 3}, "missing: transformer.h.2.ln_1.weight, "),
    ],
)
def test_a_folder_of_another_model_is_refused(tmp_path, changes, words):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(TrainError, match="does not match the model") as error:
        load_parameters(make_model(**changes), str(tmp_path))

    assert words in str(error.value)


def test_the_newest_whole_of_a_directory_of_checkpoints(tmp_path, capsys):
    root, model = tmp_path / "checkpoints", make_model()
    for step in (2, 10):
        saved = make_model()
        save_checkpoint(root, step, saved)
    load_parameters(model, str(root))
    assert_same(model, saved)
    assert capsys.readouterr().out == f"initial parameters: {root}/step-00000010\n"

    (root / "step-00000010/rank-00000-of-00001.safetensors").write_bytes(b"damaged")
    load_parameters(model, str(root))
    assert capsys.readouterr().out == f"initial parameters: {root}/step-00000002\n"
    (root / "step-00000002/manifest.json").unlink()
    with pytest.raises(
        TrainError, match="has no complete checkpoint: step-00000010: rank-00000-of"
    ):
        load_parameters(model, str(root))


def test_a_name_that_is_not_in_the_local_cache(monkeypatch, tmp_path):
    with pytest.raises(TrainError) as error:
        load_parameters(make_model(), "nobody/nothing")

    assert "nobody/nothing is neither a model directory nor a model in" in str(error.value)
    assert "\n" not in str(error.value)


BERT = BertConfig(
    vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=8,
)  # fmt: skip
DECODER = "cls.predictions.decoder"


def old_layout(model):
    """The tensors of a BERT by the names that bert-large-uncased on the Hub has them."""
    norm = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {"bert.embeddings.position_ids": torch.arange(8).unsqueeze(0)}
    for name, tensor in model.state_dict().items():
        for new, old in norm.items():
            name = name.replace(new, old)
        renamed[name] = tensor.clone()
    del renamed[f"{DECODER}.bias"]
    return renamed


def sample_layout(model):
    """The same by the names of AWS's sample when it began from a checkpoint of NVIDIA's."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        for dense in ("intermediate.dense.", "pooler.dense.", "transform.dense."):
            name = name.replace(dense, dense.replace("dense", "dense_act"))
        renamed[f"module.{name}"] = tensor
    return renamed


def test_the_layout_of_bert_on_the_hub(tmp_path):
    saved, model = BertForPreTraining(BERT), BertForPreTraining(BERT)
    BERT.save_pretrained(tmp_path)
    file, metadata = tmp_path / "model.safetensors", {"format": "pt"}
    save_file(old_layout(saved), file, metadata)
    load_parameters(model, str(tmp_path))
    assert_same(model, saved)

    save_file(old_layout(saved) | {"more": torch.ones(1)}, file, metadata)
    with pytest.raises(TrainError, match=r"does not match the model: not in the model: more$"):
        load_parameters(model, str(tmp_path))


def test_a_folder_with_half_of_the_heads(tmp_path):
    BertForMaskedLM(BERT).save_pretrained(tmp_path)
    with pytest.raises(TrainError, match=r"missing: bert\.pooler\.dense\.weight, .*seq_relat"):
        load_parameters(BertForPreTraining(BERT), str(tmp_path))


@pytest.mark.parametrize("layout", [sample_layout, old_layout, BertForPreTraining.state_dict])
def test_a_file_of_the_sample(weird_path, layout):
    saved, model = BertForPreTraining(BERT), BertForPreTraining(BERT)
    optimizer = torch.optim.AdamW(saved.parameters())
    content = {
        "model": layout(saved),
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).state_dict(),
        "files": [3, "a_training_0.hdf5"],
        "epoch": 1,
    }
    torch.save(content, weird_path / "ckpt_28125.pt")
    load_parameters(model, str(weird_path / "ckpt_28125.pt"))
    assert_same(model, saved)

    old_format, model = weird_path / "old.pt", BertForPreTraining(BERT)
    torch.save(content, old_format, _use_new_zipfile_serialization=False)
    load_parameters(model, str(old_format))
    assert_same(model, saved)
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bert.pooler.dense.bias": None}, "missing: bert.pooler.dense.bias"),
        ({"bert.more": torch.ones(1)}, "not in the model: bert.more"),
        ({"bert.pooler.dense.bias": torch.ones(9)}, "bert.pooler.dense.bias has shape [9] inste"),
        ({f"{DECODER}.bias": torch.ones(11)}, f"{DECODER}.bias differs from cls.predictions.bias"),
        ({"bert.embeddings.position_ids": torch.ones(1, 8)}, "position_ids differs from the model"),
        ({"module.bert.pooler.dense_act.bias": torch.ones(8)}, "two of its names become equal"),
    ],
)
def test_a_file_that_differs_is_refused(tmp_path, change, words):
    model = BertForPreTraining(BERT)
    state = dict(model.state_dict()) | change
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    torch.save({"model": state}, tmp_path / "a.pt")
    with pytest.raises(TrainError) as error:
        load_parameters(model, str(tmp_path / "a.pt"))

    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read (it is empty)"),
        (
            b"not a file of torch",
            "torch.load cannot read it: torch.save did not write it",
        ),
        (None, "cannot be read (No such file or directory)"),
        ({"model": pathlib.PurePosixPath("code")}, "torch.load cannot read it"),
        ({"model": [1, 2]}, "contains no model"),
        ([1, 2], "contains no model"),
    ],
)
def test_a_file_without_a_model_is_refused(tmp_path, content, words):
    file = tmp_path / "a.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(TrainError) as error:
        load_parameters(BertForPreTraining(BERT), str(file))

    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_head_of_ones_own_begins_anew_and_that_of_pretraining_is_left(tmp_path, capsys):
    config = BertConfig(**BERT.to_diff_dict() | {"num_labels": 3})
    saved, model = BertForPreTraining(config), BertForSequenceClassification(config)
    head = model.classifier.weight.clone()
    saved.save_pretrained(tmp_path / "folder")
    save_checkpoint(tmp_path / "checkpoints", 5, saved)
    for source in ("folder", "checkpoints/step-00000005"):
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight.zero_()
        load_parameters(model, str(tmp_path / source), own=("classifier.",))
        said = capsys.readouterr().out
        assert said.count("\n") == 1, said
        assert "new: classifier.weight, classifier.bias; left out: cls." in said
        assert_same(model.bert, saved.bert)
        assert torch.equal(model.classifier.weight, head)
    with pytest.raises(TrainError, match=r"missing: classifier\.weight, .*not in the model: cls\."):
        load_parameters(model, str(tmp_path / "folder"))

    # Only the head may differ; and one of the same name must be of the same labels.
    BertForMaskedLM(config).save_pretrained(tmp_path / "no-pooler")
    with pytest.raises(TrainError, match=r"missing: bert\.pooler\.dense\.weight"):
        load_parameters(model, str(tmp_path / "no-pooler"), own=("classifier.",))
    two = BertForSequenceClassification(BertConfig(**BERT.to_diff_dict() | {"num_labels": 2}))
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(
        TrainError, match=r"classifier\.weight has shape \[2, 8\] instead of \[3, 8"
    ):
        load_parameters(model, str(tmp_path / "two"), own=("classifier.",))
