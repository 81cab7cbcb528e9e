"""Make the list of releases by which triage tells which of two packages is older.

    make releases

PyPI's JSON interface is asked for every package of the list (docs.pypi.org/api/json).
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "trnslurm/node/triage/releases.txt"
_PACKAGES = """\
accelerate aiohttp albucore albumentations bitsandbytes click datasets deepspeed diffusers dill
einops evaluate fairscale flash-attn flax fsspec gradio httpx huggingface-hub hydra-core jax jaxlib
jinja2 keras kornia lightning lightning-utilities lm-eval mlflow monai multiprocess networkx nltk
numpy omegaconf open-clip-torch optax optimum packaging pandas peft pillow protobuf
pyarrow pydantic pytorch-lightning ray requests s3fs safetensors scikit-learn scipy
sentence-transformers setuptools spacy sympy tensorboard tensorboardx tensordict tensorflow timm
tokenizers torch torchaudio torchdata torchmetrics torchtext torchvision transformers triton trl
typing-extensions urllib3 vllm wandb xformers
"""
_VERSION = re.compile(r"\d+(\.\d+)+")
_SINCE = "2019"
# A series with more releases than these gains and loses names in any of them.
_OF_REPAIRS = 10


def main() -> int:
    lines = [f"{package} {' '.join(_releases(package))}\n" for package in _PACKAGES.split()]
    FILE.write_text("".join(lines), encoding="utf-8")
    print(f"{FILE}: {sum(len(line.split()) - 1 for line in lines)} releases")
    return 0


def _releases(package: str) -> Iterator[str]:
    """Yield a package's feature releases, oldest first, each with its day."""
    with urllib.request.urlopen(f"https://pypi.org/pypi/{package}/json", timeout=60) as answer:
        known = json.load(answer)["releases"]
    days = {
        tuple(map(int, version.split("."))): min(file["upload_time"] for file in files)[:10]
        for version, files in known.items()
        if files and _VERSION.fullmatch(version)
    }
    for _, series in groupby(sorted(days), key=lambda version: version[:2]):
        all_of_it = [*series]
        for version in all_of_it if len(all_of_it) > _OF_REPAIRS else all_of_it[:1]:
            if days[version] >= _SINCE:
                yield f"{'.'.join(map(str, version))}={days[version]}"


if __name__ == "__main__":
    sys.exit(main())
