"""A recipe's data: its paths, and the arguments with which `trnslurm.prepare` creates it.

trnslurm.prepare may run on another host, and that host expands a leading ~ in a path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from trnslurm.config.models import is_on_hub
from trnslurm.config.schema import Cluster, Config, Recipe
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen
from trnslurm.plan.spec import check_job_name
from trnslurm.prepare.options import FORMATS, HOLDOUT, MAX_PRED, OUTPUT, TASK, TOKENIZER
from trnslurm.schedulers.choice import scheduler_of

INDEX = "index.json"  # marks a directory of prepared data
NOTES = "dataset.json"  # marks a directory of a fetched dataset
CONFIG = "config.json"  # marks a directory of a model
# GLUE's names on the Hub; a dataset_config is one of its tasks.
_GLUE = ("glue", "nyu-mll/glue")
_SET_APART = (OUTPUT, TOKENIZER, HOLDOUT)
"""Options whose values are paths, or depend on more than their key."""


class Own(Frozen):
    """The command-line options that change how a recipe's data is prepared."""

    text: tuple[str, ...] = ()
    """Files or directories that replace the recipe's dataset or text."""
    articles: tuple[str, ...] = ()
    """WikiExtractor's output, which also replaces them."""
    eval: tuple[str, ...] = ()
    """Evaluation rows that replace the rows of the recipe or dataset."""
    tokenizer: str | None = None
    options: tuple[str, ...] = ()
    """Options that are passed on unchanged."""


class DataJob(Frozen):
    """A Slurm job on one node that prepares a recipe's data."""

    config: Config
    name: str
    arguments: tuple[str, ...]
    """The arguments of `python -m trnslurm.prepare`, which starts in the run directory."""
    time_min: int

    @property
    def partition(self) -> str | None:
        slurm = self.config.cluster.slurm
        return slurm.data_partition or slurm.partition


def make_data_job(config: Config, own: Own) -> DataJob:
    """Make the job that prepares a recipe's data."""
    cluster = config.cluster
    if not scheduler_of(cluster).has_queue:
        raise ConfigError(
            f"--submit: {config.cluster_name} has no Slurm: omit --submit to run on this host"
        )
    # As in training runs, the run directory has a copy of the recipe's directory.
    arguments = prepare_arguments(config, own, recipe_dir=f"code/jobs/{config.recipe_name}")
    limit = cluster.slurm.max_time_min
    return DataJob(
        config=config,
        name=check_job_name(f"{config.recipe_name}-data"),
        arguments=(*arguments, f"--processes={cluster.slurm.data_cpus}"),
        time_min=min(cluster.slurm.data_time_min, limit or cluster.slurm.data_time_min),
    )


def data_path(config: Config) -> str:
    """Return the path of the job's data, or an empty string if the job includes its own."""
    path = config.recipe.data.path
    if "://" in path:
        return path
    return str(PurePosixPath(config.cluster.data_root) / path) if path else ""


def model_path(config: Config) -> str:
    """Return the directory of the model that `data fetch` fetches, or an empty string."""
    name = config.recipe.data.model
    if not name:
        return ""
    return str(PurePosixPath(config.cluster.data_root) / "hub" / name.replace("/", "--"))


def model_arguments(config: Config) -> list[str]:
    """Return the arguments of `python -m trnslurm.prepare` that fetch the recipe's model."""
    return ["model", f"--output={model_path(config)}", f"--model={config.recipe.data.model}"]


def first_parameters(config: Config) -> str:
    """Return the value of `train.init_from` if it is set, or else the recipe's model."""
    return str(config.recipe.train.get("init_from", "")) or model_path(config)


def fetched_path(config: Config) -> str:
    """Return the directory for the dataset and tokenizer that `data fetch` fetches."""
    data = config.recipe.data
    if not data.dataset:
        raise ConfigError(f"{config.title} has no data.dataset, so there is nothing to fetch")
    names = (data.dataset, data.dataset_config, _tokenizer_of_hub(config))
    name = "--".join(name.replace("/", "--") for name in names if name)
    return str(PurePosixPath(config.cluster.data_root) / "hub" / name)


def fetch_arguments(config: Config, *, checkpoint: bool = False) -> list[str]:
    """Return the arguments of `python -m trnslurm.prepare` that fetch a recipe's data.

    With `checkpoint`, return the arguments that fetch the published checkpoint instead.
    """
    data = config.recipe.data
    if checkpoint or (data.format == "bert" and not data.dataset):
        return _download_arguments(config, checkpoint=checkpoint)
    arguments = ["fetch", f"--output={fetched_path(config)}", f"--dataset={data.dataset}"]
    arguments += [f"--config={data.dataset_config}"] if data.dataset_config else []
    arguments += ["--all-columns"] if data.format == "labelled" else []
    tokenizer = _tokenizer_of_hub(config)
    return arguments + ([f"--tokenizer={tokenizer}"] if tokenizer else [])


def s3_path(cluster: Cluster, place: str) -> str:
    """Return the directory for files that `data fetch` gets from S3. Reject other names."""
    from trnslurm.mirror.store import PLACE  # only this needs S3

    if not re.fullmatch(PLACE, place):
        raise ConfigError(
            f"{place}: expected s3://BUCKET/PREFIX, with a lowercase bucket and a prefix of "
            "letters, digits and _!.*'()=-"
        )
    return str(PurePosixPath(cluster.data_root, "s3", place.removeprefix("s3://")))


def prepare_arguments(config: Config, own: Own, *, recipe_dir: str) -> list[str]:
    """Return the arguments of `python -m trnslurm.prepare`. The recipe is at `recipe_dir`."""
    data = config.recipe.data
    if not data.path:
        raise ConfigError(
            f"{config.title} includes its own data (data.path is empty), so there is nothing to "
            "prepare: choose another preset, or name the data with --set data.path=NAME"
        )
    kind = [] if data.format == "tokens" else [data.format]
    arguments = [*kind, f"--output={data_path(config)}", *_source(config, own, recipe_dir)]
    tokenizer = own.tokenizer or _tokenizer(config, recipe_dir)
    arguments += [f"--tokenizer={tokenizer}"] if tokenizer else []
    rows = _eval_rows(config, own, recipe_dir)
    if data.holdout is not None and not rows:
        arguments += [f"--holdout={data.holdout}"]
    arguments += rows if data.format == "labelled" else []
    return [*arguments, *_option_arguments(config), *own.options]


def refuse_unfetched(config: Config, arguments: Sequence[str]) -> None:
    """Refuse to prepare from a dataset or model that is missing, as far as this host can see."""
    cluster, data = config.cluster, config.recipe.data
    fetched = {"dataset": (fetched_path(config), NOTES)} if data.dataset else {}
    fetched |= {"model": (model_path(config), CONFIG)} if data.model else {}
    for what, (directory, file) in fetched.items():
        needed = any(word.endswith(f"={directory}") for word in arguments)
        if needed and none_there(cluster, [f"{directory}/{file}"]):
            raise ConfigError(f"no {what} at {directory}: run {_fetch(config)}")


def none_there(cluster: Cluster, files: Sequence[str]) -> bool:
    """Check that none of these files exists. Without the data root on this host, it is unknown.

    A file name may contain a star.
    """
    scheduler = scheduler_of(cluster)
    try:
        sees = scheduler.sees(Path(scheduler.expand(cluster.data_root)))
        return sees and not any(_is_there(Path(scheduler.expand(file))) for file in files)
    except (OSError, RuntimeError):  # unreadable, or a ~user unknown on this host
        return False


def _is_there(file: Path) -> bool:
    if "*" in file.name:
        return any(found.is_file() for found in file.parent.glob(file.name))
    return file.is_file()


def command(
    verb: str, recipe: str, preset: str | None, cluster: str, model: Mapping[str, Any]
) -> str:
    """Return the `trnslurm data` command that creates missing data for a recipe's model."""
    chosen = f" --preset {preset}" if preset else ""
    named = f" --set model.name={model['name']}" if model.get("name") else ""
    return f"trnslurm data {verb} {recipe}{chosen} --cluster {cluster}{named}"


def _fetch(config: Config) -> str:
    names = (config.recipe_name, config.preset, config.cluster_name)
    return command("fetch", *names, config.recipe.model)


def _source(config: Config, own: Own, recipe_dir: str) -> list[str]:
    """Return the arguments that specify the text."""
    data = config.recipe.data
    if own.text:
        return ["--text", *own.text]
    if own.articles:
        return ["--wikiextractor", *own.articles]
    if data.dataset:
        return [f"--dataset={fetched_path(config)}"]
    if data.text:
        wrapped = data.format == "bert" and data.bert.wrapped
        text = ["--text", str(PurePosixPath(recipe_dir) / data.text)]
        return [*text, "--wrapped"] if wrapped else text
    if data.published:
        raise ConfigError(
            f"{config.title} has no data.text: pass --input TEXT, or fetch the published data "
            f"with {_fetch(config)}"
        )
    raise ConfigError(f"{config.title} has neither data.dataset nor data.text: pass --text")


def _option_arguments(config: Config) -> list[str]:
    """Return the arguments for the options that the recipe's keys set."""
    data = config.recipe.data
    arguments: list[str] = []
    for option in FORMATS[data.format]:
        if not option.key or option in _SET_APART:
            continue
        value = _max_pred(config) if option is MAX_PRED else _at(config.recipe, option.key)
        if option is TASK and not value and data.dataset in _GLUE:
            value = data.dataset_config
        if option.type is bool:
            arguments += [option.names[0]] if value else []
        elif option.many:
            arguments += [f"{option.names[0]}={one}" for one in value]
        elif value is not None and value != "":
            arguments.append(f"{option.names[0]}={value}")
    return arguments


def _at(recipe: Recipe, key: str) -> Any:
    """Return the value of a recipe's dotted key."""
    return functools.reduce(getattr, key.split("."), recipe)


def _eval_rows(config: Config, own: Own, recipe_dir: str) -> list[str]:
    """Return the arguments for evaluation rows. The recipe's own rows require its own text."""
    rows = config.recipe.data.labelled.eval
    if own.eval:
        return ["--eval", *own.eval]
    if rows and not own.text and not config.recipe.data.dataset:
        return ["--eval", str(PurePosixPath(recipe_dir) / rows)]
    return []


def _max_pred(config: Config) -> Any:
    if "max_pred" not in config.recipe.train:
        raise ConfigError(f"{config.title} has no train.max_pred, which BERT shards require")
    return config.recipe.train["max_pred"]


def _download_arguments(config: Config, *, checkpoint: bool) -> list[str]:
    """Return the arguments that fetch a published file, and unpack it if it contains shards."""
    data = config.recipe.data
    url = data.checkpoint if checkpoint else data.published
    if url is None:
        key = "checkpoint" if checkpoint else "published"
        raise ConfigError(f"{config.title} has no data.{key}, so there is nothing to fetch")
    if checkpoint:
        name = PurePosixPath(url).stem
        output = str(PurePosixPath(config.cluster.data_root) / "published" / name)
        return ["download", f"--url={url}", f"--output={output}"]
    if not data.path:
        raise ConfigError(
            f"{config.title}: data.path is empty: set it to a directory for the shards"
        )
    shape = [f"--seq-len={config.recipe.seq_len}", f"--max-pred={_max_pred(config)}"]
    return ["download", f"--url={url}", f"--output={data_path(config)}", "--shards", *shape]


def _tokenizer(config: Config, recipe_dir: str) -> str | None:
    """Return the value of --tokenizer, or None for the dataset's own tokenizer."""
    name = config.recipe.data.tokenizer
    if name is None or name.startswith("train:"):
        return name
    if _tokenizer_of_hub(config):
        if config.recipe.data.dataset:
            return fetched_path(config)
        if name == config.recipe.data.model:
            return model_path(config)
    return name if name.startswith("~") else str(PurePosixPath(recipe_dir) / name)


def _tokenizer_of_hub(config: Config) -> str | None:
    name = config.recipe.data.tokenizer
    return name if is_on_hub(name) else None
