"""data fetch, prepare, verify: the data that training reads.

The options are declared in trnslurm.prepare.options. Options that only some recipes accept have
their own sections in the help, and are rejected for other recipes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click
from click.core import ParameterSource

from trnslurm.cli import completer
from trnslurm.cli.options import Command, config_options, recipe_argument, takes_console
from trnslurm.cli.output import Terminal
from trnslurm.cli.submit import confirm_and_submit
from trnslurm.cluster.cache import CompileCache
from trnslurm.cluster.programs import option_words, prepare_here
from trnslurm.config.load import resolve
from trnslurm.config.schema import Cluster, Config
from trnslurm.config.search import Workspace
from trnslurm.errors import ConfigError
from trnslurm.plan.data import (
    DataJob,
    Own,
    data_path,
    fetch_arguments,
    make_data_job,
    model_arguments,
    prepare_arguments,
    refuse_unfetched,
    s3_path,
)
from trnslurm.prepare.options import (
    CHUNK_BYTES,
    COLUMN,
    DATASET,
    FORCE,
    FORMATS,
    JSON,
    PROCESSES,
    REVISION,
    Option,
)
from trnslurm.submission.choice import choose_data_cluster, cluster_of
from trnslurm.submission.here import check_notify
from trnslurm.submission.job import make_prepare_job
from trnslurm.submission.submission import PlannedRun, Submission

_ELSEWHERE = "run this command on a host that has it, such as the login node"
_EXCLUSIVE = (
    ("document_per", "document_start"),
    ("text", "wikiextractor"),
    ("text", "from"),
    ("wikiextractor", "from"),
    ("eval", "holdout"),
)
# In the order of the job's script.
_PASSED_ON = ("wrapped", "end_of_text", "document_per", "document_start", "column", "force")
# Readers of an option -> the recipes that they are; in the order of the help.
_RECIPES = {
    "tokens": "recipes that read token files",
    "bert": "recipes that read BERT shards",
    "labelled": "recipes that read labeled rows",
    "tokens bert": "recipes that read unlabeled text",
    "bert labelled": "recipes that read samples (BERT shards or labeled rows)",
    "hub": "recipes with a dataset from the Hub",
    "hub text": "recipes with unlabeled text from the Hub",
    "published": "recipes without a dataset from the Hub",
}
_OF_PROGRAM = (DATASET, CHUNK_BYTES)
_PREPARE_OPTIONS = {
    option: " ".join(name for name, own in FORMATS.items() if option in own)
    for option in dict.fromkeys(option for own in FORMATS.values() for option in own)
    if option not in _OF_PROGRAM
}
"""Each option of `data prepare`, and the formats that accept it."""


class _KindOption(click.Option):
    """An option that only some recipes accept."""

    def __init__(self, *names: Any, kind: str = "", **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.kind = kind


class _KindCommand(click.Command):
    """A command whose help shows the options for particular recipes in their own sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, followed by the options for particular recipes."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        titles = {"": "Options"} | {kind: f"For {recipes}" for kind, recipes in _RECIPES.items()}
        for kind, title in titles.items():
            own = [option for option in options if getattr(option, "kind", "") == kind]
            records = [record for option in own if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _data_option(option: Option, kind: str = "") -> Callable[[Command], Command]:
    """Add a declared option for all recipes, or for some of them."""
    value: Any = option.type
    if option.choices:
        value = click.Choice(option.choices)
    elif option.type is int and option.least is not None and not option.key:
        # The range of a recipe's key is checked with the recipe.
        value = click.IntRange(int(option.least))
    elif option.type not in (int, float, bool):
        value = str
    return click.option(
        *option.names,
        cls=_KindOption,
        kind=kind,
        type=value,
        is_flag=option.type is bool,
        default=None,
        multiple=option.many,
        metavar=option.metavar or None,
        help=option.usage(of_recipe=True),
    )


def _prepare_options(command: Command) -> Command:
    """Add the options of `data prepare`."""
    for option, kind in reversed(_PREPARE_OPTIONS.items()):
        command = _data_option(option, "" if kind == " ".join(FORMATS) else kind)(command)
    return command


@click.group("data")
def data_command() -> None:
    """Fetch and prepare training data.

    \b
    Example:
      trnslurm data fetch gpt2_zero1
      trnslurm data prepare gpt2_zero1
      trnslurm data verify gpt2_zero1
    """


@data_command.command("fetch", cls=_KindCommand)
@click.argument("recipe", metavar="RECIPE|s3://BUCKET/PREFIX", shell_complete=completer("recipe"))
@config_options
@_data_option(FORCE)
@_data_option(JSON)
@click.option(
    "--output", metavar="DIR", help="With s3://: use this directory instead of data_root."
)
@_data_option(REVISION, "hub")
@_data_option(COLUMN, "hub text")
@click.option(
    "--checkpoint",
    cls=_KindOption,
    kind="published",
    is_flag=True,
    help="Fetch the published checkpoint instead of the data.",
)
def fetch_command(recipe: str, checkpoint: bool, output: str | None, **options: Any) -> None:
    """Download a recipe's data, tokenizer and model, its published shards, or files from S3.

    Files from the Hugging Face Hub go to hub/ below the cluster's data_root, shards to the recipe's
    data.path, a checkpoint to published/, and files from S3 to s3/. Interrupted downloads are
    resumed.

    \b
    Example:
      trnslurm data fetch gpt2_zero1
      trnslurm data fetch bert_pretrain --preset phase2
      trnslurm data fetch bert_pretrain --checkpoint
      trnslurm data fetch bert_mrpc --preset rte
      trnslurm data fetch s3://my-bucket/wikitext-103
    """
    if recipe.startswith("s3://"):
        of_recipes = {"checkpoint": checkpoint, "set": options.pop("settings")}
        for name, value in (options | of_recipes).items():
            if value and name not in ("workspace", "cluster", "force", "json"):
                raise click.UsageError(
                    f"{_spelled(name)} works only with recipes: omit it with s3://"
                )
        cluster = cluster_of(options["workspace"], options["cluster"], Terminal())
        to = str(Path(output).resolve()) if output else s3_path(cluster, recipe)
        sys.exit(_fetch_s3(cluster, recipe, to, _passed_on(options, "force", "json")))
    if output is not None:
        raise click.UsageError(
            "--output must be an s3:// URL, because a recipe's data has a fixed directory"
        )
    config = _config_of(recipe, options)
    passed = _passed_on(options, "revision", "column", "force", "json")
    data, wanted = config.recipe.data, []
    if data.dataset or not data.model or checkpoint:
        wanted.append([*fetch_arguments(config, checkpoint=checkpoint), *passed])
    if data.model and not checkpoint:
        wanted.append([*model_arguments(config), *_passed_on(options, "force", "json")])
    for arguments in wanted:
        if code := prepare_here(config.cluster, arguments, otherwise=_ELSEWHERE):
            sys.exit(code)


@data_command.command("prepare", cls=_KindCommand)
@recipe_argument()
@config_options
@_prepare_options
@click.option(
    "--from",
    "place",
    metavar="s3://BUCKET/PREFIX",
    help="Fetch this data first, instead of using --text.",
)
@click.option(
    "--submit", "as_job", is_flag=True, help="Run as a Slurm job instead of on this host."
)
@click.option("-f", "--follow", is_flag=True, help="With --submit: wait until the job ends.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, without doing it.")
@takes_console
def prepare_command(
    recipe: str, place: str | None, as_job: bool, console: Terminal, **options: Any
) -> None:
    """Turn a recipe's dataset or your files into the token files, shards or samples that it reads.

    The output goes to the recipe's data.path below the cluster's data_root. Data already prepared
    from the same input is kept, and an interrupted preparation is resumed.

    \b
    Example:
      trnslurm data prepare gpt2_zero1
      trnslurm data prepare gpt2_zero1 --submit --follow
      trnslurm data prepare gpt2_zero1 --preset small
      trnslurm data prepare gpt2_zero1 --text a.txt --text b.txt --tokenizer train:16384
      trnslurm data prepare bert_pretrain --input texts --output shards --shards 64
      trnslurm data prepare gpt2_zero1 --from s3://my-bucket/texts --tokenizer train:16384
      trnslurm data prepare bert_sentiment --input tweets.csv --label-column sentiment
    """
    if console.follow and not as_job:
        raise click.UsageError(
            "--follow requires --submit; preparing data on this host always shows progress"
        )
    if console.dry_run and options["json"]:
        raise click.UsageError("--dry-run does not print JSON: omit --dry-run or --json")
    _refuse_both(options | {"from": place})
    if options["output"]:
        options["output"] = str(Path(options["output"]).resolve())
    config = _config_of(recipe, options)
    text = tuple(_existing("--text or --input", file) for file in options["text"])
    if place:
        text = (s3_path(config.cluster, place),)
    own = Own(
        text=text,
        articles=tuple(_existing("--wikiextractor", name) for name in options["wikiextractor"]),
        eval=tuple(_existing("--eval", file) for file in options["eval"]),
        tokenizer=_tokenizer(options["tokenizer"]),
        options=tuple(_passed_on(options, *_PASSED_ON)),
    )
    arguments = prepare_arguments(config, own, recipe_dir=config.recipe_dir)
    refuse_unfetched(config, arguments)
    if place and not console.dry_run:
        with open(2, "wb", closefd=False) as stderr:  # stdout is for the result
            if code := _fetch_s3(config.cluster, place, text[0], (), streams=(stderr, stderr)):
                sys.exit(code)
    if as_job:
        job = make_data_job(config, own)
        click.echo(f"{_what(config)}, {_where(job)}", err=not console.dry_run)
        if not console.dry_run:
            _submit(job, options["workspace"], replace(console, as_json=bool(options["json"])))
    elif console.dry_run:
        click.echo(f"{_what(config)}, on this host")
    else:
        more = _passed_on(options, "processes", "json")
        otherwise = f"{_ELSEWHERE}, or pass --submit"
        sys.exit(prepare_here(config.cluster, [*arguments, *more], otherwise=otherwise))


@data_command.command("verify")
@click.argument("target", metavar="RECIPE|DIR")
@config_options
def verify_command(target: str, **options: Any) -> None:
    """Check all files of prepared data against their checksums.

    \b
    Example:
      trnslurm data verify gpt2_zero1
      trnslurm data verify /fsx/trnslurm-data/wikitext-103
    """
    if "/" not in target and not Path(target).is_dir():
        config = _config_of(target, options)
        cluster, directory = config.cluster, data_path(config)
        if not directory:
            raise ConfigError(f"{config.title} includes its own data (data.path is empty)")
    elif options["preset"] or options["settings"]:
        raise click.UsageError(f"{target} is a directory: omit --preset and --set")
    else:
        cluster = cluster_of(options["workspace"], options["cluster"], Terminal())
        directory = str(Path(target).absolute())
    sys.exit(prepare_here(cluster, ["verify", directory], otherwise=_ELSEWHERE))


def _fetch_s3(
    cluster: Cluster,
    place: str,
    output: str,
    options: Sequence[str],
    *,
    streams: tuple[IO[bytes], IO[bytes]] | None = None,
) -> int:
    """Fetch the files from S3 and return the exit code."""
    arguments = ["s3", place, f"--output={output}", *options]
    return prepare_here(cluster, arguments, otherwise=_ELSEWHERE, streams=streams)


def _submit(data_job: DataJob, workspace: Workspace, console: Terminal) -> None:
    job = make_prepare_job(data_job, workspace.template_dirs())
    for warning in check_notify(job):
        console.warn(warning)
    submission = Submission(runs=[PlannedRun(job=job)], cache=CompileCache(job.profile))
    confirm_and_submit(submission, console)


def _refuse_both(options: dict[str, Any]) -> None:
    """Reject pairs of options that exclude each other."""
    for one, other in _EXCLUSIVE:
        if all(options[name] not in (None, (), "") for name in (one, other)):
            raise click.UsageError(f"{_spelled(one)} and {_spelled(other)}: pass only one of them")


def _config_of(recipe: str, options: dict[str, Any]) -> Config:
    workspace = options["workspace"]
    cluster = choose_data_cluster(workspace, options["cluster"], Terminal())

    given = {name: options[name] for name in ("preset", "settings")}
    # First: another kind of recipe may not have these keys at all.
    _refuse_others(resolve(workspace, recipe, cluster=cluster, **given))
    layers = {}
    for option in _PREPARE_OPTIONS:
        # In Own: its path is not relative to the recipe, and --tokenizer train:V is no name.
        key = "slurm.data_cpus" if option is PROCESSES else option.key
        value = options.get(option.name)
        if key and key != "data.tokenizer" and value not in (None, ()):
            # A list replaces the recipe's; a tuple would be appended to it.
            layers[key] = (option.names[0], list(value) if isinstance(value, tuple) else value)
    return resolve(workspace, recipe, cluster=cluster, options=layers, **given)


def _passed_on(options: dict[str, Any], *names: str) -> list[str]:
    """Return those of the named options that were given, as arguments for trnslurm.prepare."""
    return option_words({name.replace("_", "-"): options[name] for name in names})


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _existing(option: str, name: str) -> str:
    path = Path(name).absolute()
    if not path.exists():
        raise ConfigError(f"{option} {name}: no such file")
    return str(path)


def _tokenizer(name: str | None) -> str | None:
    if name is None or name.startswith("train:"):
        return name
    return _existing("--tokenizer", name)


def _what(config: Config) -> str:
    return f"{config.title}: prepare {data_path(config)}"


def _where(job: DataJob) -> str:
    partition = f"partition {job.partition} of " if job.partition else ""
    cpus = job.config.cluster.slurm.data_cpus
    return (
        f"on 1 node of {partition}{job.config.cluster_name}: {cpus} CPUs, "
        f"at most {job.time_min} minutes"
    )


def _refuse_others(config: Config) -> None:
    """Reject options for other recipes."""
    data = config.recipe.data
    text = data.format != "labelled"
    kinds = {kind for kind in _PREPARE_OPTIONS.values() if data.format in kind.split()}
    kinds |= {"", "hub" if data.dataset else "published"}
    kinds |= {"hub text"} if data.dataset and text else set()
    ctx = click.get_current_context()
    for option in ctx.command.params:
        if not isinstance(option, _KindOption) or option.kind in kinds:
            continue
        if ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{option.opts[0]} works only with {_RECIPES[option.kind]}, which {config.title} "
                "is not: omit it"
            )
