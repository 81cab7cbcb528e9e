"""compile: the key of a job's graphs, and the contents of a cluster's compile cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from trnslurm.cli.costs import age_since, ingredients_of
from trnslurm.cli.options import (
    cluster_option,
    json_option,
    recipe_argument,
    spec_options,
    takes_console,
    workspace_option,
)
from trnslurm.cli.output import Terminal, echo_json, echo_table
from trnslurm.cluster.cache import CompileCache, recipe_of
from trnslurm.cluster.cache_use import (
    CachedKey,
    entries_of,
    find_ingredients,
    prune,
    remove_all,
    total_bytes,
    users_of,
)
from trnslurm.config.search import Workspace
from trnslurm.errors import ConfigError, TrnslurmError
from trnslurm.node.graphs.key import differences, leaves
from trnslurm.plan.spec import make_spec
from trnslurm.runs.search import run_roots
from trnslurm.runs.tables import count, parse_age, parse_size, size_of
from trnslurm.submission.choice import choose, cluster_of, config_of
from trnslurm.submission.options import JobOptions


@click.group("compile")
def compile_command() -> None:
    """Show, check and prune compiled graphs.

    \b
    Example:
      trnslurm compile key gpt2_zero1 --nodes 2 --explain
      trnslurm compile status
    """


@compile_command.command("key")
@recipe_argument(required=False)
@click.option("-n", "--nodes", type=int, default=1, help="Number of nodes.")
@spec_options
@click.option("--explain", is_flag=True, help="Show everything that the key depends on.")
@click.option("--diff", nargs=2, metavar="A B", help="Show how two runs, bundles or keys differ.")
@json_option
def key_command(
    recipe: str | None,
    explain: bool,
    diff: tuple[str, str] | None,
    console: Terminal,
    **options: Any,
) -> None:
    """Show the key of a job's graphs. Jobs with the same key share graphs.

    The key includes the package versions of the cluster's Python. On a host without that Python,
    the key is unknown. --diff exits with code 1 if there are differences, like diff.

    \b
    Example:
      trnslurm compile key gpt2_zero1 --nodes 2
      trnslurm compile key gpt2_zero1 --nodes 2 --cluster trn1 --explain
      trnslurm compile key --diff 20261121-191118-gpt2_zero1 last
    """
    if (recipe is None) == (diff is None):
        raise click.UsageError("pass either a RECIPE or --diff A B")
    job = JobOptions(recipe=recipe or "", **options)
    if diff is not None:
        sys.exit(_show_differences(job, diff, console))
    config = config_of(choose(job, console), console)
    spec = make_spec(config, job.nodes, name=job.name, need_time=False)
    cache, ingredients = CompileCache(config.cluster), ingredients_of(spec, job.workspace)
    found = cache.look_up(ingredients)
    if console.as_json:
        echo_json(
            {
                "key": found.key or None,
                "warm": found.warm,
                "unknown": cache.unknown,
                "ingredients": ingredients,
                "versions": cache.versions,
            }
        )
        return
    if cache.unknown and not explain:
        raise TrnslurmError(
            f"the key is known only on the cluster: {cache.unknown}. Pass --explain to show the "
            "rest"
        )
    click.echo(found.key or f"The key is known only on the cluster: {cache.unknown}")
    if explain:
        click.echo()
        everything = {**ingredients, "versions": cache.versions}
        rows = [(name, _short(name, value)) for name, value in leaves(everything)]
        echo_table(("ingredient", "value"), rows)


def _show_differences(job: JobOptions, words: tuple[str, str], console: Terminal) -> int:
    cluster = cluster_of(job.workspace, job.cluster, console)
    cache, roots = CompileCache(cluster), run_roots(job.workspace)
    sides = [find_ingredients(word, cache, roots) for word in words]
    notes = [f"{w}: {why}" for w, (_, why) in zip(words, sides, strict=True) if why]
    a, b = ({k: v for k, v in side.items() if k != "versions" or not notes} for side, _ in sides)
    found = [*differences(a, b)]
    if console.as_json:
        echo_json([{"ingredient": name, "a": old, "b": new} for name, old, new in found])
    else:
        for name, old, new in found:
            click.echo(f"{name}: {_word(name, old)} -> {_word(name, new)}")
    for note in notes:
        click.echo(f"note: versions not compared: {note}", err=True)
    return 1 if found else 0


def _short(name: str, value: Any) -> str:
    return str(value)[:12] if name.startswith("source.") else str(value)


def _word(name: str, value: Any) -> str:
    return "-" if value is None else _short(name, value)


@compile_command.command("status")
@workspace_option
@cluster_option
@json_option
def status_command(workspace: Workspace, cluster: str | None, console: Terminal) -> None:
    """List the contents of a cluster's cache, longest unused first.

    \b
    Example:
      trnslurm compile status --cluster trn1
    """
    cache = CompileCache(cluster_of(workspace, cluster, console))
    entries, used = entries_of(cache), users_of(cache, run_roots(workspace))
    if console.as_json:
        echo_json({"cache": str(cache.root), "keys": [_facts(e, used) for e in entries]})
        return
    if not entries:
        click.echo(f"Nothing is compiled in {cache.root}")
        return
    _print_keys(entries, used)
    total = size_of(total_bytes(entries))
    click.echo(f"\n{count(len(entries), 'key')}, {total} in {cache.root}")


@compile_command.command("verify")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@workspace_option
@cluster_option
@takes_console
def verify_command(
    keys: tuple[str, ...], workspace: Workspace, cluster: str | None, console: Terminal
) -> None:
    """Check the files of a cluster's cache, or of some keys, against their checksums.

    The exit code is 1 if a file is missing or has changed.

    \b
    Example:
      trnslurm compile verify --cluster trn1
    """
    cache = CompileCache(cluster_of(workspace, cluster, console))
    entries = {entry.key: entry for entry in entries_of(cache)}
    if unknown := [key for key in keys if key not in entries]:
        raise ConfigError(
            f"{unknown[0]}: no such key in {cache.root}; run trnslurm compile status to list them"
        )
    damaged = False
    for entry in [entries[key] for key in keys or entries]:
        if entry.manifest:
            files = count(len(entry.manifest.files), "file")
            problem, good = cache.first_damage(entry.manifest, hashes=True), f"whole, {files}"
        else:
            problem, good = entry.problem, entry.words
        click.echo(f"{entry.key}: {problem or good}")
        damaged |= bool(problem)
    sys.exit(1 if damaged else 0)


@compile_command.command("gc")
@click.option(
    "--older-than",
    metavar="AGE",
    help="Remove graphs that have been unused for this long, such as 30d or 12h.",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    help="Remove the longest-unused graphs until the cache is at most this large, such as 50G.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, without removing it.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@workspace_option
@cluster_option
@takes_console
def gc_command(
    older_than: str | None,
    max_size: str | None,
    workspace: Workspace,
    cluster: str | None,
    console: Terminal,
) -> None:
    """Remove unused compiled graphs from a cluster's cache.

    Graphs that an unfinished run is compiling or needs are kept.

    \b
    Example:
      trnslurm compile gc --older-than 30d --dry-run
      trnslurm compile gc --older-than 30d --max-size 50G
    """
    if older_than is None and max_size is None:
        raise click.UsageError("choose what to remove: --older-than AGE, --max-size SIZE, or both")
    since = None if older_than is None else time.time() - parse_age(older_than)
    limit = None if max_size is None else parse_size(max_size)
    cache = CompileCache(cluster_of(workspace, cluster, console))
    used = users_of(cache, run_roots(workspace))
    chosen = prune(cache, used, unused_since=since, max_bytes=limit)
    if not chosen:
        click.echo("Nothing to remove")
        return
    console.refuse_unattended()
    _print_keys(chosen, used)
    if console.dry_run:
        return
    console.confirm(f"Remove {count(len(chosen), 'key')}?")
    freed = remove_all(cache, chosen)
    click.echo(f"Removed {count(len(chosen), 'key')}, {size_of(freed)}")


def _print_keys(entries: Sequence[CachedKey], used: Mapping[str, str]) -> None:
    rows = []
    for entry in entries:
        facts = _facts(entry, used)
        user = f", in use by {Path(facts['in_use_by']).name}" if facts["in_use_by"] else ""
        recipe, nodes = facts["recipe"] or "-", str(facts["nodes"] or "-")
        ages = (age_since(entry.made), age_since(entry.used))
        rows.append((entry.key, recipe, nodes, size_of(entry.bytes), *ages, entry.words + user))
    header = ("key", "recipe", "nodes", "size", "made", "last used", "state")
    echo_table(header, rows, right="nodes,size,made,last used")


def _facts(entry: CachedKey, used: Mapping[str, str]) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "key": entry.key,
        "compiled": manifest is not None,
        "problem": entry.problem,
        "recipe": recipe_of(manifest.ingredients) if manifest else None,
        "nodes": len(manifest.nodes) if manifest else None,
        "bytes": entry.bytes,
        "made": entry.made,
        "used": entry.used,
        "in_use_by": used.get(entry.key),
    }
