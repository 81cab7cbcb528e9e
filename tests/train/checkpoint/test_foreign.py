"""First parameters from checkpoints that others wrote, by their own means."""

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import trnslurm
from trnslurm.saves import script
from trnslurm.train.checkpoint.foreign import open_foreign
from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.errors import TrainError
from trnslurm.train.sharded.values import saved_values

from ...processes import run_process
from .foreign_worker import make_model

WORKER = Path(__file__).with_name("foreign_worker.py")
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


def torchrun(workers, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={workers}", WORKER, *arguments]  # fmt: skip
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": os.environ["HOME"]}
    assert run_process(command, env=env).code == 0


def assert_same(model, wanted):
    for (name, here), there in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(here, there), name


@pytest.mark.rest
def test_what_fsdp_wrote_on_four_is_read_and_goes_back_to_three(tmp_path):
    torchrun(4, "save", tmp_path)
    wanted = make_model(1)
    for form in ("plain", "hf"):
        model = make_model(2)
        load_parameters(model, str(tmp_path / form))
        assert_same(model, wanted)
        read = saved_values(str(tmp_path / form), model)  # as a worker of three reads it
        weight = wanted.model.layers[0].mlp.up_proj.weight
        assert torch.equal(read("model.layers.0.mlp.up_proj.weight", "parameter", range(7, 14)),
                           weight[7:14])  # fmt: skip
    model.save_pretrained(tmp_path / "exported")
    torchrun(3, "back", tmp_path / "exported", tmp_path / "again")
    model = make_model(3)
    load_parameters(model, str(tmp_path / "again"))
    assert_same(model, wanted)


def in_titans_words(model, *, linear="", output="output"):
    """The parameters as torchtitan names and turns them: pairs of neighbors, not halves."""
    found = {}
    for name, tensor in model.state_dict().items():
        for old, new in (
            ("model.embed_tokens", "tok_embeddings"), ("lm_head", output), ("model.", ""),
            ("self_attn.", "attention."), ("q_proj", f"{linear}wq"), ("k_proj", f"{linear}wk"),
            ("v_proj", f"{linear}wv"), ("o_proj", "wo"), ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
            ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
        ):  # fmt: skip
            name = name.replace(old, new)
        for part, heads in (("wq", 6), ("wk", 3)):
            if part in name:
                halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, -1)
                tensor = halves.transpose(1, 2).reshape(tensor.shape).clone()
        found[name] = tensor
    return found


@pytest.mark.parametrize("names", [{}, {"linear": "qkv_linear.", "output": "lm_head"}])
def test_torchtitans_llama_computes_the_same_here(tmp_path, names):
    wanted, model = make_model(1), make_model(2)
    titan = in_titans_words(wanted, **names)
    dcp.save({**titan, "optimizer": {"norm.weight": torch.zeros(3)}}, checkpoint_id=tmp_path / "t")
    load_parameters(model, str(tmp_path / "t"))
    assert_same(model, wanted)
    # The scores of attention, as torchtitan's ComplexRoPE and as transformers computes them.
    x, size = torch.randn(5, 24, generator=torch.Generator().manual_seed(4)), 4
    angles = torch.arange(5.0)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    prefix = f"layers.0.attention.{names.get('linear', '')}"
    q, k = (
        torch.view_as_real(
            torch.view_as_complex((x @ titan[f"{prefix}{w}.weight"].T).view(5, -1, 2, 2)) * turn
        ).flatten(2)
        for w in ("wq", "wk")
    )
    attention = model.model.layers[0].self_attn
    rotary = LlamaRotaryEmbedding(model.config)
    ours = apply_rotary_pos_emb(
        attention.q_proj(x).view(1, 5, 6, size).transpose(1, 2),
        attention.k_proj(x).view(1, 5, 3, size).transpose(1, 2),
        *rotary(x, torch.arange(5)[None]),
    )
    theirs = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, dim=1))
    here = torch.einsum("bhid,bhjd->hij", ours[0], ours[1].repeat_interleave(2, dim=1))
    torch.testing.assert_close(here, theirs)


def test_a_custom_scripts_own_checkpoint(tmp_path):
    script._savers.clear()
    wanted, model = make_model(1), make_model(2)
    root = tmp_path / "checkpoints"
    trnslurm.save(7, {"net": wanted, "totals": {"seen": torch.ones(2)}}, directory=root, wait=True)
    script._savers.clear()
    for source in (root, root / "step-00000007"):
        load_parameters(model, str(source))
        assert_same(model, wanted)
        torch.nn.init.zeros_(model.model.norm.weight)
    file = root / "step-00000007/rank-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(
        TrainError, match=r"cannot be read: rank-00000-of-00001\.safetensors: its sha"
    ):
        load_parameters(model, str(root))


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_what_is_not_pytorchs_or_not_whole_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 3)
    dcp.save({"model": model.state_dict()}, checkpoint_id="saved")
    data, index = Path("saved/__0_0.distcp"), Path("saved/.metadata")
    content, whole = data.read_bytes(), index.read_bytes()

    def refused(words):
        with pytest.raises(TrainError, match=words):
            load_parameters(nn.Linear(2, 3), "saved")

    load_parameters(nn.Linear(2, 3), "saved")
    with pytest.raises(
        TrainError, match=r"does not match the model: weight has shape \[3, 2\] instead"
    ):
        load_parameters(nn.Linear(2, 4), "saved")
    with pytest.raises(TrainError, match="has none of the model's parameters: it has model"):
        load_parameters(nn.Sequential(nn.Linear(2, 3)), "saved")
    data.write_bytes(content[:200])
    refused(r"__0_0.distcp is damaged at (weight|model\.weight)")
    data.unlink()
    refused("No such file")
    index.write_bytes(pickle.dumps(Evil()))
    refused("contains a posix.system, which PyTorch never writes there")
    index.write_bytes(whole[:50])
    refused(".metadata is damaged")
    index.unlink()
    data.write_bytes(content)
    refused("has no .metadata, which is written last")
    assert not Path("evil").exists()
    assert open_foreign(tmp_path / "nothing", model) is None
