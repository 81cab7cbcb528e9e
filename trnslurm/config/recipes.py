"""A recipe's file: its values, its presets, and the order of presets in a chain."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trnslurm.config.schema import Cluster, Recipe
from trnslurm.config.script import Source
from trnslurm.config.search import mapping_in, read_text, take_description
from trnslurm.config.tree import Layer, check, convert, fields_of, flatten, with_numbers
from trnslurm.contract.files import load_json, naming
from trnslurm.errors import ConfigError, did_you_mean

STRATEGY_FILE = "strategy file"
JOB_SECTIONS = ("model", "train")

_CLUSTER = fields_of(Cluster)
# A recipe can set the shape of its job on the cluster, but never facts about the site.
RECIPE_KEYS = {
    **fields_of(Recipe),
    **{key: _CLUSTER[key] for key in ("env", "notify", "slurm", "workers_per_node")},
}


def write_recipe(file: Path, text: str, *, force: bool) -> None:
    """Write a new recipe.yaml, or replace an existing one with `force`."""
    if file.exists() and not force:
        raise ConfigError(f"{file} already exists: choose another NAME, or pass --force")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with naming(file):
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None


def presets_of(recipe: Source) -> list[str]:
    """Return the names of a recipe's presets."""
    _, presets = recipe_layers(recipe)
    return list(presets)


def chain_of(recipe: Source, preset: str | None) -> dict[str, dict[str, Any]]:
    """Return a preset and its successors, in order, with the values that each one sets.

    None selects the recipe's default preset. If there is no default either, the chain is empty.
    """
    base, presets = recipe_layers(recipe)
    chosen = preset or base.tree.get("default_preset")
    names = [] if chosen is None else _followed(presets, str(chosen))
    layers = [preset_layer(presets, name, recipe.path.name, base) for name in names]
    return {name: dict(flatten(layer.tree)) for name, layer in zip(names, layers, strict=True)}


def preset_before(recipe: Source, preset: str | None) -> str | None:
    """Return the preset whose result another preset continues from, or None."""
    if preset is None:
        return None
    _, presets = recipe_layers(recipe)
    return next((name for name in presets if _then(presets, name) == preset), None)


def recipe_layers(recipe: Source) -> tuple[Layer, dict[str, Any]]:
    """Return the values for all presets, and the presets as written in the file, if any."""
    if not recipe.has_file:
        return Layer(name="script", source=str(recipe.path), tree=recipe.tree()), {}
    file = recipe.path / "recipe.yaml"
    return _layers_of(file, read_text(file))


@functools.lru_cache(maxsize=8)  # a command reads the same recipe several times
def _layers_of(file: Path, text: bytes) -> tuple[Layer, dict[str, Any]]:
    tree = mapping_in(text, file)
    take_description(tree, str(file))
    presets = tree.pop("presets", None) or {}
    if not isinstance(presets, dict):
        raise ConfigError(f"{file}: presets must be a mapping of names, found {presets!r}")
    for name, preset in presets.items():
        if not isinstance(name, str) or not isinstance(preset, Mapping | None):
            raise ConfigError(f"{file}: preset {name!r} must be a quoted name with a mapping")
    for name in presets:
        _check_then(presets, name, f"{file}: presets.{name}.then")
    base = Layer(name="recipe", source=str(file), tree=_checked(tree, str(file)))
    for name in presets:  # check the unused ones too
        preset_layer(presets, name, file.parent.name, base)
    return base, presets


def _checked(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the checked values of a recipe or preset; a job's own keys have no known types."""
    checked = check(tree, RECIPE_KEYS, source)
    return {k: with_numbers(v) if k in JOB_SECTIONS else v for k, v in checked.items()}


def _check_then(presets: Mapping[str, Any], name: str, where: str) -> None:
    """Reject a `then` that names an unknown preset or forms a cycle."""
    then = _then(presets, name)
    if then is None:
        return
    if not isinstance(then, str) or then not in presets:
        hint = did_you_mean(str(then), presets)
        raise ConfigError(f"{where} is {then!r}, which is not a preset of the recipe{hint}")
    passed = _followed(presets, name)
    if _then(presets, passed[-1]) is not None:
        raise ConfigError(f"{where} forms a cycle: {' -> '.join(passed)} -> …")


def _followed(presets: Mapping[str, Any], name: str) -> list[str]:
    """Return a preset and its successors, each once."""
    passed: list[str] = []
    following: Any = name
    while following in presets and following not in passed:
        passed.append(following)
        following = _then(presets, following)
    return passed or [name]


def strategy_layer(tree: Mapping[str, Any], recipe_dir: Path) -> list[Layer]:
    """Return the content of the strategy's own file, if a key names one, over recipe and preset."""
    strategy, found = tree["strategy"], []
    for name in ("fsdp", "deepspeed", "xla_fsdp"):
        key = f"strategy.{name}_file"
        if not (path := strategy[f"{name}_file"]):
            continue
        if strategy["name"] != name:
            raise ConfigError(
                f"{key} is set, but strategy.name is {strategy['name']!r}: "
                f"set strategy.name={name}, or choose another preset"
            )
        file = recipe_dir / Path(path).expanduser()
        try:
            content = load_json(file)
        except OSError as error:
            raise ConfigError(f"{key}: {file}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{key}: {file}: not valid JSON ({error})") from None
        own = {"strategy": {name: content}}
        found.append(Layer(name=STRATEGY_FILE, source=str(file), tree=own))
    return found


def _then(presets: Mapping[str, Any], name: str) -> Any:
    return (presets[name] or {}).get("then")


def preset_layer(presets: Mapping[str, Any], name: str, recipe: str, base: Layer) -> Layer:
    """Return the values that a preset changes."""
    if name not in presets:
        hint = did_you_mean(name, presets) or f"; its presets: {', '.join(presets) or 'none'}"
        raise ConfigError(f"recipe {recipe} has no preset {name!r}{hint}")
    source = f"{base.source}: presets.{name}"
    tree = dict(presets[name] or {})
    take_description(tree, source)
    tree.pop("then", None)  # it describes the preset, not the training run
    checked = _checked(tree, source)
    for section in JOB_SECTIONS:
        if section in checked:
            declared = base.tree.get(section, {})
            checked[section] = as_declared(checked[section], declared, source, section)
    return Layer(name="preset", source=source, tree=checked)


def as_declared(tree: Mapping[str, Any], base: Any, where: str, prefix: str) -> dict[str, Any]:
    """Return a job section checked against the recipe's declaration: same keys, same types."""
    checked = {}
    for key, value in tree.items():
        dotted = f"{prefix}.{key}"
        if key not in base:
            raise ConfigError(f"{where}: unknown key {dotted}{did_you_mean(str(key), base)}")
        if isinstance(base[key], Mapping) and isinstance(value, Mapping):
            checked[key] = as_declared(value, base[key], where, dotted)
        elif base[key] is None or isinstance(base[key], list | Mapping):
            checked[key] = value
        else:
            checked[key] = convert(value, type(base[key]), where, dotted)
    return checked
