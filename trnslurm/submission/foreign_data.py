"""Asks on this host what data is that another library wrote, and whether it fits the job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trnslurm.cluster.programs import look_into
from trnslurm.config.search import parse_yaml
from trnslurm.contract.files import read_json
from trnslurm.contract.rundir import CONFIG
from trnslurm.errors import SubmitError, TrnslurmError
from trnslurm.plan.data import INDEX
from trnslurm.submission.job import Job

# What only others' data has: files of these suffixes, or a file of these names.
_SUFFIXES = (".idx", ".bin", ".ds", ".parquet", ".arrow", ".tar")
_WITHOUT = " (--set train.eval_every=0 trains without)"


def may_be_foreign(job: Job, plan: Mapping[str, Any]) -> bool:
    """Check cheaply whether a job of tokens may have data that `data prepare` did not make."""
    if not plan or not _reads_tokens(job):
        return False
    if "://" in job.data:
        return True
    try:
        path = Path(job.scheduler.expand(job.data))
        if path.is_dir():
            if (path / INDEX).exists():  # as trnslurm.datasets.open.OTHERS says
                return bool({"shards", "shardlist"} & read_json(path / INDEX).keys())
            return any(path.iterdir())
        return path.suffix in _SUFFIXES or path.with_name(f"{path.name}.idx").is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def check_foreign(job: Job, plan: Mapping[str, Any]) -> str:
    """Return what a job's data is; empty: nothing that is known. Refuse what does not fit it.

    What this host cannot look into, the job will check.
    """
    splits = ["train", *(["eval"] if plan["train"].get("eval_every") else [])]
    path = job.data if "://" in job.data else job.scheduler.expand(job.data)
    try:
        found = look_into(job.profile, path, splits)
    except TrnslurmError as error:
        return f"Data: {job.data}, which is not looked into here ({error})"
    if wrong := found.get("error"):
        raise SubmitError(f"{wrong}{_WITHOUT if 'no split eval' in wrong else ''}")
    for split, told in found.items():
        _check_fits(job, plan, split, told)
    return f"Data: {found['train']['found']}" if found else ""


def _check_fits(job: Job, plan: Mapping[str, Any], split: str, told: Mapping[str, Any]) -> None:
    vocabulary, seq_len = plan["model"].get("vocab_size"), plan["seq_len"]
    if vocabulary is not None and told["vocab_size"] > vocabulary:
        raise SubmitError(
            f"model.vocab_size is {vocabulary}, but the data at {job.data} has the token "
            f"{told['vocab_size'] - 1}: --set model.vocab_size to that of its tokenizer"
        )
    if told["tokens"] < seq_len:
        raise SubmitError(
            f"seq_len is {seq_len}, but the split {split} of the data at {job.data} has "
            f"{told['tokens']} tokens"
        )


def _reads_tokens(job: Job) -> bool:
    try:
        config = parse_yaml(job.bundle.files[CONFIG])
        return bool(config["config"]["data"]["format"] == "tokens")
    except (KeyError, TypeError, ValueError, yaml.YAMLError):
        return False
