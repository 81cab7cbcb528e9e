"""What no type can say about values: names of variables, secrets, text that files can hold."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trnslurm.config.tree import flatten, lookup
from trnslurm.errors import ConfigError, did_you_mean

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)(_|$)", re.I)
# The scripts would break, or the ranks not find each other. PATH: `activate` can add to it.
_RESERVED = re.compile(
    r"PATH|PYTHONPATH|HOME|USER|BASH_ENV|ENV|IFS|(MASTER|SLURM|SBATCH|TRNSLURM|TORCHELASTIC)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|GLOO_SOCKET_IFNAME|NEURON_RT_ROOT_COMM_ID"
)
_LEAST = {
    "seq_len": 0, "steps": 1, "seed": 0, "ask_above_node_hours": 0, "workers_per_node": 1,
    "slurm.cpus_per_task": 1, "slurm.gpus_per_node": 0, "slurm.srun_wait_s": 0,
    "slurm.time_min": 1, "slurm.max_time_min": 1, "slurm.max_nodes": 1, "slurm.data_cpus": 1,
    "slurm.data_time_min": 1, "data.bert.dupe_factor": 1, "data.bert.seed": 0,
    "data.bert.shards": 1, "data.bert.test_shards": 0,
}  # fmt: skip
_NOT_EMPTY = (
    "python", "run_root", "data_root", "compile_cache", "slurm.partition", "slurm.account",
    "slurm.qos", "slurm.constraint", "slurm.reservation", "slurm.bin_dir", "slurm.data_partition",
    "data.dataset", "data.dataset_config", "data.text", "data.tokenizer",
)  # fmt: skip
_SWITCH_CHARS = 7  # DISABLE_NUMERIC_CC_TOKEN=1 is a switch, not a secret


def check_values(tree: Mapping[str, Any]) -> None:
    """Refuse a resolved tree with a value that must not reach a script."""
    for prefix, env in (("env", tree["env"]), ("neuron.env", tree["neuron"]["env"])):
        for name, value in env.items():
            _check_variable(f"{prefix}.{name}", name, value)
    for dotted, value in flatten(tree):
        if isinstance(value, str) and ("\0" in value or not _is_utf8(value)):
            raise ConfigError(f"{dotted} is not text in UTF-8, or holds a NUL character")
    for dotted, least in _LEAST.items():
        value = lookup(tree, dotted)
        if value is not None and value < least:
            raise ConfigError(f"{dotted} is {value}; it must be at least {least}")
    for dotted in _NOT_EMPTY:
        if lookup(tree, dotted) == "":
            raise ConfigError(f"{dotted} is empty: leave it out, or set it to null")
    _check_data(tree)
    _check_cache(tree["compile_cache"], tree["compile_layout"])
    if ".." in tree["data"]["path"].split("/"):
        raise ConfigError("data.path has '..': name a path below data_root, or an absolute one")
    for section in ("model", "train"):
        _check_job_values(section, tree[section])
    for key in (*tree["graphs"]["free"], *tree["graphs"]["on_off"]):
        if key not in tree["train"]:
            hint = did_you_mean(key, tree["train"])
            raise ConfigError(f"graphs: {key!r} is no key of train{hint}")
    for reference in tree["reference"]:
        if reference["nodes"] < 1 or not 0 < reference["samples_per_s"] < math.inf:
            raise ConfigError(f"reference: {reference!r} needs nodes and samples_per_s above zero")


def _check_data(tree: Mapping[str, Any]) -> None:
    data, root = tree["data"], tree["data_root"]
    holdout, masked = data["holdout"], data["bert"]["masked_lm_prob"]
    # It means the same in every directory, and nobody expands variables.
    if not root.startswith(("/", "~")):
        raise ConfigError(f"data_root is {root!r}: it must be absolute, or begin with ~")
    if holdout is not None and not 0 <= holdout < 1:
        raise ConfigError(f"data.holdout is {holdout}; it must be 0 or more, and less than 1")
    if not 0 < masked < 1:
        raise ConfigError(f"data.bert.masked_lm_prob is {masked}; it must be between 0 and 1")
    for key in ("published", "checkpoint"):
        url = data[key]
        if url is not None and not re.fullmatch(r"https?://[^/\s]+/[^\s]*[^/\s]", url):
            raise ConfigError(f"data.{key} is {url!r}: it must be the URL of a file")
    if data["published"] and data["format"] != "bert":
        raise ConfigError("data.published: only shards for BERT are: set data.format to bert")


def _check_cache(cache: str | None, layout: str) -> None:
    # Neuron takes it as it is, and expands nothing.
    if cache is not None and not re.match(r"/|\w+://", cache):
        raise ConfigError(f"compile_cache is {cache!r}: it must be absolute, or an s3:// URL")
    if cache is None and layout == "per-host":
        raise ConfigError("compile_layout is per-host, but compile_cache is not set")


def _check_job_values(dotted: str, value: Any) -> None:
    """Only what JSON can hold reaches the job."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_job_values(f"{dotted}.{key}", inner)
    elif isinstance(value, list):
        for inner in value:
            _check_job_values(dotted, inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{dotted} is {value}; it must be a finite number")
    elif not isinstance(value, str | int | float | None):
        raise ConfigError(f"{dotted} is a {type(value).__name__}: quote it")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that were no UTF-8
        return False
    return True


def _check_variable(dotted: str, name: str, value: str) -> None:
    if not _ENV_NAME.fullmatch(name):
        raise ConfigError(f"{dotted}: not a name of an environment variable")
    if _RESERVED.fullmatch(name):
        raise ConfigError(f"{dotted}: the scripts set {name} themselves, and rely on it")
    if _SECRET.search(name) and len(value) > _SWITCH_CHARS:
        raise ConfigError(
            f"{dotted} looks like a secret, and a run's files are no place for one: "
            "put it in a file of mode 0600 and set a variable to its path"
        )
