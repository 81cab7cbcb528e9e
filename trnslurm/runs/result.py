"""The result of a run: its newest valid checkpoint, from which another run can start."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trnslurm.config.recipes import preset_before
from trnslurm.config.schema import Config
from trnslurm.config.script import Source
from trnslurm.contract.checkpoints import (
    CHECKPOINT_FORMAT,
    checkpoints_in,
    newest_checkpoint,
    step_of,
)
from trnslurm.contract.files import load_json, newer_format, read_json
from trnslurm.errors import ConfigError, RunError
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir
from trnslurm.runs.find import find_run
from trnslurm.runs.status import run_status
from trnslurm.runs.unreported import unreported

INIT_FROM = "train.init_from"
"""The configuration key for a run's initial parameters."""

# Written by trnslurm.train.checkpoint, which verifies every byte when it loads a checkpoint.
_MANIFEST = "manifest.json"


class Checkpoint(Frozen):
    """A checkpoint whose files are all present and complete."""

    path: Path
    facts: Mapping[str, Any]
    """The settings that determined its training samples and its model."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that are incomplete, with the reasons."""


def find_checkpoint(word: str, roots: list[Path]) -> Checkpoint:
    """Return the checkpoint at the path `word`, or the newest valid one of the run `word`."""
    path = Path(word).absolute()
    if word.startswith("s3://"):
        raise ConfigError(f"--from {word}: to continue a run in S3, use trnslurm resume {word}")
    if path.is_file():
        raise ConfigError(f"--from {word} is a file: pass it with --set {INIT_FROM}={path}")
    if step_of(path.name) is not None:
        found, run = _read(path), RunDir(path.parents[1])
    else:
        run = find_run(word, roots)
        found = _newest_good(run)
    _refuse_vanishing(found.path, run)
    return found


def refuse_other_model(config: Config, checkpoint: Checkpoint) -> None:
    """Reject a checkpoint from another recipe, or of a model with other sizes."""
    recipe = checkpoint.facts.get("recipe")
    taken = (config.recipe_name, *config.recipe.begins_with)
    if recipe not in taken:
        raise ConfigError(
            f"{checkpoint.path} is from the recipe {recipe}, not {' or '.join(taken)}"
        )
    begin = "model."
    model = {k.removeprefix(begin): v for k, v in checkpoint.facts.items() if k.startswith(begin)}
    now = config.recipe.model
    if recipe != config.recipe_name:  # each recipe may have keys for its own head
        model, now = _shared(model, now), _shared(now, model)
    if wrong := other_sizes(model, now):
        raise ConfigError(f"{checkpoint.path} does not match the model of the recipe: {wrong[0]}")


def no_result(config: Config) -> str | None:
    """Return the problem if a preset that continues another one would start without its result.

    The command line can ask for that with an empty train.init_from.
    """
    before = preset_before(Source(path=Path(config.recipe_dir)), config.preset)
    given = config.recipe.train.get(INIT_FROM.partition(".")[2])
    if not before or given or config.origins[INIT_FROM].layer == "command line":
        return None
    return (
        f"{config.title} continues {before}: pass --from RUN, or --set '{INIT_FROM}=\"\"' to start "
        "from new parameters"
    )


def other_sizes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the integer settings of a model that changed. Others, such as dropout, may change."""
    return [
        f"model.{key} was {before.get(key)}, but is {now.get(key)} now"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
        if isinstance(before.get(key), int) or isinstance(now.get(key), int)
    ]


def _shared(values: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in other}


def _newest_good(run: RunDir) -> Checkpoint:
    if run.project_file.exists():
        left = unreported(run)
        path = newest_checkpoint(run) or (run.path / left.newest if left else None)
        raise RunError(
            f"{run.name} runs a custom script, and only the script can read its checkpoints: pass "
            f"{path or 'the path of one'} to the script with its own option, after --"
        )
    checkpoints: list[Path] = []
    with contextlib.suppress(OSError):
        checkpoints = checkpoints_in(run.checkpoints)
    passed_over: list[str] = []
    for path in checkpoints:
        try:
            return replace(_read(path), passed_over=tuple(passed_over))
        except RunError as error:
            passed_over.append(str(error))
    if passed_over:
        raise RunError(f"{run.name} has no valid checkpoint: {passed_over[0]}")
    raise RunError(f"{run.name} has no checkpoints: none were saved, or they were deleted")


def _read(path: Path) -> Checkpoint:
    if not path.is_dir():
        raise RunError(f"{path}: no such checkpoint")
    try:
        manifest = load_json(path / _MANIFEST)
        if words := newer_format(manifest, CHECKPOINT_FORMAT):
            raise ConfigError(f"{path} was {words}")
        sizes = {str(name): int(file["bytes"]) for name, file in manifest["files"].items()}
        facts = dict(manifest["facts"])
        if outside := [name for name in sizes if Path(name).name != name]:
            raise RunError(
                f"{path}: {_MANIFEST} refers to {outside[0]!r}, which is outside the checkpoint"
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{path} is incomplete: {_MANIFEST} is missing or damaged") from None
    for name, size in sizes.items():
        try:
            there = (path / name).stat().st_size
        except OSError as error:
            raise RunError(f"{path} is incomplete: {name}: {error.strerror}") from None
        if there != size:
            raise RunError(f"{path} is incomplete: {name} has only {there:,} of {size:,} bytes")
    return Checkpoint(path=path, facts=facts)


def _refuse_vanishing(path: Path, run: RunDir) -> None:
    """Reject a checkpoint that a running job will delete once it has newer ones."""
    if not run.record_file.is_file():  # a copy, or a bundle that was started by hand
        return
    status = run_status(run)
    train, step = read_json(run.plan_file).get("train"), step_of(path.name)
    every = train.get("keep_every") if isinstance(train, dict) else None
    kept = isinstance(every, int) and every > 0 and step is not None and step % every == 0
    if status.final or kept:
        return
    raise RunError(
        f"{run.name} is {status.state} and will delete {path.name} when it has newer checkpoints: "
        "wait until it ends, or name a checkpoint that train.keep_every keeps"
    )
