"""A stand-in for huggingface_hub: a tokenizer.json and two models, from no network."""

import os
from fnmatch import fnmatch
from pathlib import Path

MODELS = {
    "some/bert": ("config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"),
    "old/bert": ("config.json", "pytorch_model.bin"),
}


def hf_hub_download(name: str, file: str, *, cache_dir: str) -> str:
    """Answer for gpt2."""
    if (name, file) != ("gpt2", "tokenizer.json"):
        raise FileNotFoundError(f"404 Client Error: {name}")
    return os.environ["STAND_IN_TOKENIZER"]


def snapshot_download(
    name: str, *, revision: str | None, allow_patterns: list[str], cache_dir: str
) -> str:
    """Answer for MODELS: files that say whose they are."""
    if name not in MODELS:
        raise FileNotFoundError(f"404 Client Error: {name}")
    folder = Path(cache_dir) / "snapshot"
    folder.mkdir(parents=True, exist_ok=True)
    for file in MODELS[name]:
        if any(fnmatch(file, pattern) for pattern in allow_patterns):
            (folder / file).write_text(f"{name} {revision} {file}")
    return str(folder)
