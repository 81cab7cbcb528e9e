"""Checks the values of a recipe's train and model sections against its job's declarations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trnslurm.config.catalog import catalog
from trnslurm.config.schema import Config, Strategy
from trnslurm.config.script import refuse_batch_script
from trnslurm.contract.files import read_file
from trnslurm.declared import (
    Declaration,
    Problem,
    Read,
    check_python,
    find_problem,
    read_declaration,
)
from trnslurm.devices import DeviceType
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.plan.sharding import usable_devices

SECTIONS = {"model": "Model", "train": "Settings"}
"""The sections that belong to a job, and the classes that declare them."""

_PACKAGE = Path(__file__).resolve().parents[1]
# From the weakest to the strongest: an error about two values names the stronger layer.
_LAYERS = (
    "default",
    "cluster profile",
    "recipe",
    "preset",
    "this machine",
    "published model",
    "DeepSpeed file",
    "command line",
)


def check_declared(config: Config) -> None:
    """Reject values that the job would reject, a script that is not Python, and a batch script.

    A job without these classes declares nothing and is not checked.
    """
    entry = config.code_dir / config.recipe.entry
    if not entry.is_file():  # rendering refuses the missing file
        return
    if config.recipe.project:
        if config.recipe.launcher != "job":
            refuse_batch_script(entry)
        if entry.suffix != ".py":
            return
    try:
        check_python(read_file(entry), str(entry))
    except OSError as error:
        raise ConfigError(f"cannot read {entry} ({error.strerror})") from None
    recipe = config.recipe
    if recipe.project:  # a custom script has arguments, not declared values
        return
    around: dict[str, Any] = {
        "seq_len": recipe.seq_len,
        "precision": recipe.precision,
        "data.path": recipe.data.path,
    }
    if device := _device(config):
        around["device"] = device.name
    for section, declared in declarations(config).items():
        values = dict(config.tree[section])
        if "strategy" in declared.fields and recipe.strategy != Strategy():
            values["strategy"] = recipe.strategy.name
        if section == "train":
            _check_keys(config, declared, values)
        if problem := find_problem(declared, section, values, around):
            raise ConfigError(_located(config, problem))


def check_plan(plan: Mapping[str, Any], entry: str, read: Read, where: str) -> None:
    """Reject a plan.json that the job in the same bundle would reject. `where` is its location."""
    check_python(read(entry) or b"", entry)
    around = {key: plan.get(key) for key in ("seq_len", "precision", "device")}
    around["data.path"] = plan.get("data")
    for section, name in SECTIONS.items():
        declared = read_declaration(read, entry, name)
        if declared and (problem := find_problem(declared, section, plan[section], around)):
            raise ConfigError(f"{where}: {problem.text}")


def declarations(config: Config) -> dict[str, Declaration]:
    """Return the job's declaration of each section."""
    read = reader(config.recipe_name, Path(config.recipe_dir))
    path = f"jobs/{config.recipe_name}/{config.recipe.entry}"
    found = {section: read_declaration(read, path, name) for section, name in SECTIONS.items()}
    return {section: declared for section, declared in found.items() if declared}


def reader(recipe: str, recipe_dir: Path) -> Read:
    """Return a function that reads files of the job and of trnslurm by their snapshot paths."""
    job = f"jobs/{recipe}/"

    def read(path: str) -> bytes | None:
        inside = path.removeprefix(job)
        file = recipe_dir / inside if inside != path else _PACKAGE.parent / path
        if inside == path and not path.startswith(f"{_PACKAGE.name}/"):
            return None
        try:
            return read_file(file)
        except OSError:
            return None

    return read


def _check_keys(config: Config, declared: Declaration, values: dict[str, Any]) -> None:
    """Reject missing keys, and keys that the job does not know, as the job would."""
    where = f"{config.recipe_dir}/recipe.yaml"
    needed = (key for key, field in declared.fields.items() if not field.optional)
    if missing := [key for key in needed if key not in values]:
        more = f" and {len(missing) - 3} more keys" if len(missing) > 3 else ""
        keys = f"{', '.join(missing[:3])}{more}"
        raise ConfigError(f"{where}: train is missing {keys}, which {config.recipe.entry} needs")
    for key in values if declared.whole else ():
        if key in declared.fields:
            continue
        hint = did_you_mean(key, declared.fields)
        raise ConfigError(f"{where}: {config.recipe.entry} has no setting train.{key}{hint}")


def _device(config: Config) -> DeviceType | None:
    instance = catalog(config.cluster.instance_types).get(config.cluster.instance_type)
    usable = usable_devices(config.recipe)
    return instance.choose_device(config.cluster.device, usable) if instance else None


def _located(config: Config, problem: Problem) -> str:
    """Return the problem with the source of the value, the strongest one if there are several."""
    keys = [key.replace("train.strategy", "strategy.name") for key in problem.keys]
    origins = [config.origins[key] for key in keys if key in config.origins]
    origin = max(
        origins,
        key=lambda o: _LAYERS.index(o.layer) if o.layer in _LAYERS else len(_LAYERS),
        default=None,
    )
    text = problem.text.replace("train.strategy", "strategy.name")
    return f"{origin.source}: {text}" if origin and origin.source else text
