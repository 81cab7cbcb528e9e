"""Write a checkpoint as a Hugging Face folder, which from_pretrained loads. In a run directory:

    PYTHONPATH=code/trnslurm.zip python code/jobs/bert_pretrain/export.py plan.json

`trnslurm export RUN` does this with the Python interpreter of the run's cluster. With --from, a
checkpoint of AWS's sample (ckpt_28125.pt) is exported instead of the run's own.
"""

from pathlib import Path

from transformers import BertForPreTraining

from trnslurm.train.checkpoint.manifest import CheckpointManifest
from trnslurm.train.data.shards.index import ShardSplit, read_shard_index
from trnslurm.train.encoders import make_config
from trnslurm.train.errors import TrainError
from trnslurm.train.export.bert import make_tokenizer
from trnslurm.train.export.folder import Tokens, export_job, require_unchanged
from trnslurm.train.loop.job import run_job
from trnslurm.train.plan import JobPlan


def make_model(plan: JobPlan, end_of_text: int | None) -> BertForPreTraining:
    """Build a plan's model, whose parameters are set later; it needs no end-of-text token."""
    return BertForPreTraining(make_config(plan.model))


def find_tokens(plan: JobPlan, manifest: CheckpointManifest, run_dir: Path) -> Tokens:
    """Find the tokenizer next to the prepared shards, if the shards have not changed."""
    directory = Path(plan.data).expanduser()
    path = directory / "tokenizer.json"
    require_unchanged(directory, fingerprint(directory, run_dir), manifest)
    if not path.is_file():
        raise TrainError(f"{directory} has none")
    return make_tokenizer(path, plan.model), None


def fingerprint(directory: Path, run_dir: Path) -> str | None:
    """Return the fingerprint of the shards, or None if they have changed or are gone."""
    try:
        return read_shard_index(ShardSplit(directory, "train", run_dir / "data")).fingerprint
    except TrainError:
        return None


if __name__ == "__main__":
    run_job(lambda: export_job(make_model, find_tokens))
