"""A model's weights from the Hugging Face Hub, as a folder that training begins with."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.fetch.hub import ask_hub, library
from trnslurm.prepare.files import partial, publish, read_json, replacing

NOTES = "model.json"
# Weights without pickle, whole or in parts, and the files that describe them.
_FILES = ("config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer.json",
          "tokenizer_config.json", "vocab.txt")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of the Hub."""

    model: str
    revision: str | None


def fetch_model(wanted: HubModel, output: Path, *, force: bool) -> str:
    """Fetch the model if it is not there; return in one line what was done."""
    if output.exists() and any(output.iterdir()):
        before = read_json(output / NOTES)
        if before is None:
            raise PrepareError(f"{output}: exists, and was not fetched: choose another name")
        if not force and before == asdict(wanted):
            return f"{output} was fetched before, nothing to do"
        if not force:
            raise PrepareError(
                f"{output}: was fetched from another model or revision: replace it with --force"
            )
    download = library("huggingface_hub").snapshot_download
    with partial(output, "fetch") as directory:
        folder = ask_hub(
            f"model {wanted.model}",
            lambda: download(
                wanted.model,
                revision=wanted.revision,
                allow_patterns=list(_FILES),
                cache_dir=str(directory / "cache"),
            ),
        )
        finished = directory / "finished"
        shutil.rmtree(finished, ignore_errors=True)
        finished.mkdir()
        for file in sorted(path for path in Path(folder).iterdir() if path.is_file()):
            with replacing(finished / file.name) as stream, file.open("rb") as source:
                shutil.copyfileobj(source, stream)
        if not any(finished.glob("*.safetensors")):
            raise PrepareError(
                f"model {wanted.model}: has no weights in safetensors, and others are not read: "
                "choose another revision (--revision), or convert it and name the folder in "
                "train.init_from"
            )
        size = sum(file.stat().st_size for file in finished.iterdir())
        with replacing(finished / NOTES) as stream:
            stream.write(f"{json.dumps(asdict(wanted), indent=2)}\n".encode())
        publish(finished, output)
    return f"Fetched {output}: {size / 1e6:,.0f} MB"
