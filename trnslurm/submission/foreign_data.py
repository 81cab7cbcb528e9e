"""Checks, on this host, what data from another library contains and whether it fits the job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trnslurm.config.schema import Cluster, Config
from trnslurm.config.search import parse_yaml
from trnslurm.contract.files import read_json
from trnslurm.contract.rundir import CONFIG
from trnslurm.errors import SubmitError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.plan.data import INDEX, data_path
from trnslurm.schedulers.choice import scheduler_of

if TYPE_CHECKING:
    from trnslurm.submission.job import Job

# What only others' data has: files of these suffixes, or a file of these names.
_SUFFIXES = (".idx", ".bin", ".ds", ".parquet", ".arrow", ".tar")
_WITHOUT = " (pass --set train.eval_every=0 to train without it)"


class Wanted(Frozen):
    """The data of a job that trains on tokens, and the requirements it must meet."""

    cluster: Cluster
    data: str
    seq_len: int
    vocab_size: int | None
    evaluates: bool

    @property
    def path(self) -> str:
        """The path or URL. A ~ is expanded unless it belongs to the cluster."""
        return self.data if "://" in self.data else scheduler_of(self.cluster).expand(self.data)

    def may_be_foreign(self) -> bool:
        """Check cheaply whether the data may come from something other than `data prepare`."""
        if not self.data or "://" in self.data:
            return bool(self.data)
        try:
            path = Path(self.path)
            if not path.is_dir():
                return path.suffix in _SUFFIXES or path.with_name(f"{path.name}.idx").is_file()
            if (path / INDEX).exists():  # as trnslurm.datasets.open.OTHERS says
                return bool({"shards", "shardlist"} & read_json(path / INDEX).keys())
            return any(path.iterdir())
        except (OSError, RuntimeError, ValueError):
            return False

    def check(self) -> str:
        """Return a description of the data, or empty if its kind is unknown.

        Raise a SubmitError if the data does not fit. The job checks whatever this host cannot read.
        """
        if not self.may_be_foreign():
            return ""
        try:
            from trnslurm.cluster.programs import look_into  # slow

            found = look_into(self.cluster, self.path, ["train", *(["eval"] * self.evaluates)])
        except (TrnslurmError, RuntimeError) as error:
            return f"Data: {self.data}, which could not be checked on this host ({error})"
        if wrong := found.get("error"):
            raise SubmitError(f"{wrong}{_WITHOUT if 'no split eval' in wrong else ''}")
        for split, told in found.items():
            self._check_split(split, told)
        return f"Data: {found['train']['found']}" if found else ""

    def _check_split(self, split: str, told: Mapping[str, Any]) -> None:
        if self.vocab_size is not None and told["vocab_size"] > self.vocab_size:
            raise SubmitError(
                f"model.vocab_size is {self.vocab_size}, but the data at {self.data} contains "
                f"token {told['vocab_size'] - 1}: set model.vocab_size to the vocabulary size of "
                "the data's tokenizer"
            )
        if told["tokens"] < self.seq_len:
            raise SubmitError(
                f"seq_len is {self.seq_len}, but the {split} split of the data at {self.data} has "
                f"only {told['tokens']} tokens"
            )


def check_foreign(job: Job, plan: Mapping[str, Any]) -> str:
    """Describe a job's data if another library wrote it. Reject data that does not fit."""
    if not plan or not (wanted := _wanted(job.profile, job.data, plan)).may_be_foreign():
        return ""
    try:
        of_tokens = parse_yaml(job.bundle.files[CONFIG])["config"]["data"]["format"] == "tokens"
    except (KeyError, TypeError, ValueError, yaml.YAMLError):
        of_tokens = False
    return wanted.check() if of_tokens else ""


def describe_foreign(config: Config) -> str:
    """Describe a recipe's data if another library wrote it, or say why it cannot be used."""
    recipe = config.recipe
    if recipe.data.format != "tokens" or recipe.project:
        return ""
    plan = {"seq_len": recipe.seq_len, "model": recipe.model, "train": recipe.train}
    try:
        return _wanted(config.cluster, data_path(config), plan).check()
    except SubmitError as error:
        return f"This data cannot be used: {error}"


def _wanted(cluster: Cluster, data: str, plan: Mapping[str, Any]) -> Wanted:
    return Wanted(
        cluster=cluster,
        data=data,
        seq_len=plan["seq_len"],
        vocab_size=plan["model"].get("vocab_size"),
        evaluates=bool(plan["train"].get("eval_every")),
    )
