"""Exported folders, and the same model made without our code."""

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

# Odd, so that it divides over no two workers.
VOCAB_SIZE = 301
FOLDER = ["config.json", "generation_config.json", "model.safetensors"]
TOKENIZER = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def load(folder, **options):
    """Load a folder as its users do; nothing may be missing, left over or worth a warning."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model.eval()


def parameters_of(run_dir, step):
    """Join the workers' files by the format's description alone."""
    checkpoint = run_dir / "checkpoints" / f"step-{step:08d}"
    files = [load_file(path) for path in sorted(checkpoint.glob("rank-*-of-00002.safetensors"))]
    keys = [key for key in files[0] if key.startswith("parameter/")]
    joined = {key: torch.cat([file[key] for file in files if key in file]) for key in keys}
    return {key.removeprefix("parameter/"): tensor for key, tensor in joined.items()}


def model_of(run_dir, step):
    """Make the model with the parameters of a checkpoint, without our code."""
    plan = json.loads((run_dir / "plan.json").read_text())
    model = GPT2LMHeadModel(GPT2Config(**plan["model"], attn_implementation="eager"))
    found = model.load_state_dict(parameters_of(run_dir, step), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"], [])
    return model.eval()


@torch.no_grad()
def logits(model):
    tokens = torch.arange(64 * 2).view(2, 64) * 7 % VOCAB_SIZE
    return model(tokens).logits.float()


def change_plan(run_dir, **changes):
    plan = json.loads((run_dir / "plan.json").read_text())
    (run_dir / "plan.json").write_text(json.dumps(plan | changes))
