"""Layers of configuration: command line > published model > preset > recipe > profile > default.

The keys that the admin's site file locks override them all.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml

from trnslurm.config.entry import Entry
from trnslurm.config.models import published_layer
from trnslurm.config.recipes import (
    JOB_SECTIONS,
    as_declared,
    preset_layer,
    recipe_layers,
    strategy_layer,
)
from trnslurm.config.schema import Cluster, Config, Origin, Recipe
from trnslurm.config.search import (
    Workspace,
    parse_yaml,
    read_yaml,
    take_description,
    take_remote,
)
from trnslurm.config.tree import (
    Layer,
    build,
    check,
    convert,
    defaults_of,
    fields_of,
    flatten,
    is_list,
    lookup,
    merge,
    nest,
    with_numbers,
)
from trnslurm.config.values import check_cluster_values, check_values
from trnslurm.contract.variables import Variable
from trnslurm.devices import DEVICES
from trnslurm.errors import ConfigError

SITE_FILE = Path("/etc/trnslurm/site.yaml")
DEVICE_FILES = Path("/dev")

# How similar an unknown key and a known one must be, in the same section and in another. Then the
# bonus for a key of the same section, and for one without a section.
_LIKE_HERE, _LIKE_ELSEWHERE = 0.6, 0.75
_HERE, _TOP = 0.05, 0.01
_BEGINS, _SHORTEST_BEGIN = 0.85, 3
_MOST_NEAREST = 3

# Cluster keys that, on the command line, describe the training run, whatever the cluster.
_OF_A_TRAINING = (
    *("slurm.time_min", "slurm.min_nodes", "slurm.spares", "slurm.max_attempts"),
    *("slurm.max_node_hours", "slurm.max_cost", "mirror", "env.", "notify."),
)
_CLUSTER = fields_of(Cluster)
_RECIPE = fields_of(Recipe)
_ALL = {**_CLUSTER, **_RECIPE}


def resolve(
    workspace: Workspace,
    recipe: str,
    *,
    cluster: str,
    preset: str | None = None,
    settings: Sequence[str] = (),
    options: Mapping[str, tuple[str, Any]] | None = None,
) -> Config:
    """Return a recipe on a cluster, with every value resolved.

    `settings` are `key=value` strings; `options` maps a dotted key to (option name, value).
    """
    source, profile = workspace.source(recipe), workspace.cluster_file(cluster)
    layers = [Layer(name="default", source="", tree=defaults_of(Cluster) | defaults_of(Recipe))]
    layers.append(_profile_layer(profile))
    base, presets = recipe_layers(source)
    chosen = preset or base.tree.get("default_preset")
    if base.tree.get("project"):  # a custom script cannot give a micro-batch the weight zero
        refuse = nest("batch.padding", "refuse")
        layers.append(Layer(name="default", source="a custom script", tree=refuse))
    layers.append(base)
    if chosen is not None:
        layers.append(preset_layer(presets, str(chosen), recipe, base))
    layers += _machine_layer(_merged(layers))
    asked: list[Layer] = []
    for word in settings:
        asked.append(set_layer(word, _merged([*layers, *asked])))
    for dotted, (option, value) in (options or {}).items():
        asked.append(_option_layer(dotted, option, value, _merged([*layers, *asked])))
    # The command line can name the model and also change single values of it.
    layers += [*published_layer(_merged([*layers, *asked]))]
    unasked = _merged(layers)
    asked = [*strategy_layer(_merged([*layers, *asked]), source.path), *asked]
    layers += asked
    layers += _site_layers(layers)
    tree = _with_one_partition(_merged(layers), layers)
    check_values(tree)
    return Config(
        recipe_name=recipe if source.has_file else Entry(base.tree["entry"]).label,
        recipe_dir=str(source.path),
        preset=chosen,
        cluster_name=cluster,
        cluster=build(Cluster, tree),
        recipe=build(Recipe, tree),
        tree=tree,
        origins={
            dotted: Origin(
                layer=layer.name,
                source=layer.source,
                repeats=layer in asked and lookup(unasked, dotted) == value,
            )
            for layer in layers
            for dotted, value in flatten(layer.tree)
        },
    )


def resolve_cluster(workspace: Workspace, name: str) -> Cluster:
    """Return a cluster profile without a recipe."""
    tree = _merged(_cluster_layers(workspace, name))
    check_cluster_values(tree)
    return build(Cluster, tree)


def origins_of_cluster(workspace: Workspace, name: str) -> dict[str, Origin]:
    """Return where each value of a cluster profile, without a recipe, comes from."""
    return _origins(_cluster_layers(workspace, name))


def _cluster_layers(workspace: Workspace, name: str) -> list[Layer]:
    layers = [Layer(name="default", source="", tree=defaults_of(Cluster))]
    layers.append(_profile_layer(workspace.cluster_file(name)))
    layers += _machine_layer(_merged(layers))
    return [*layers, *_site_layers(layers, _CLUSTER)]


def resolve_again(
    workspace: Workspace,
    head: Mapping[str, Any],
    origins: Mapping[str, str],
    *,
    cluster: str,
    settings: Sequence[str],
    given: Mapping[str, Any],
    prefix: str,
    where: str,
) -> Config:
    """Return the configuration from a run's config.yaml, for the same cluster or another one.

    `origins` says where the run's values came from. Values from its old profile are dropped. On
    another cluster, command-line values that describe the old cluster, such as its run root, are
    dropped too. If no mirror is set, `prefix` becomes the mirror.
    """
    saved = check(head["config"], _ALL, where)
    layers = [Layer(name="default", source="", tree=defaults_of(Cluster) | defaults_of(Recipe))]
    layers.append(_profile_layer(workspace.cluster_file(cluster)))
    own = {key: value for key, value in saved.items() if key not in _CLUSTER}
    here = cluster == head["cluster_name"]
    for dotted, value in flatten({key: saved[key] for key in saved if key in _CLUSTER}):
        layer = origins.get(dotted, "").partition(":")[0]
        asked = layer == "command line" and (here or dotted.startswith(_OF_A_TRAINING))
        if asked or layer in ("recipe", "preset"):
            own = merge(own, nest(dotted, value))
    if "init_from" in own.get("train", {}):  # the run's checkpoint has all parameters
        own["train"] = own["train"] | {"init_from": ""}
    layers.append(Layer(name="run", source=where, tree=own))
    layers += _machine_layer(_merged(layers))
    for word in settings:
        layers.append(set_layer(word, _merged(layers)))
    for dotted, value in given.items():
        layers.append(Layer(name="command line", source="resume", tree=nest(dotted, value)))
    if _merged(layers)["mirror"] is None and not any(w.startswith("mirror=") for w in settings):
        layers.append(Layer(name="run", source=where, tree={"mirror": prefix}))
    layers += _site_layers(layers)
    tree = _with_one_partition(_merged(layers), layers)
    check_values(tree)
    return Config(
        recipe_name=str(head["recipe_name"]),
        recipe_dir=where,
        preset=head["preset"],
        cluster_name=cluster,
        cluster=build(Cluster, tree),
        recipe=build(Recipe, tree),
        tree=tree,
        origins=_origins(layers),
    )


def _with_one_partition(tree: dict[str, Any], layers: Sequence[Layer]) -> dict[str, Any]:
    """Drop a profile's other partitions if the user or the site names one."""
    last = {key: at for at, layer in enumerate(layers) for key, _ in flatten(layer.tree)}
    others = [at for key, at in last.items() if key.startswith("slurm.partitions.")]
    if not others or last["slurm.partition"] <= max(others):
        return tree
    return tree | {"slurm": tree["slurm"] | {"partitions": {}}}


def _origins(layers: Sequence[Layer]) -> dict[str, Origin]:
    return {
        dotted: Origin(layer=layer.name, source=layer.source)
        for layer in layers
        for dotted, _ in flatten(layer.tree)
    }


def read_cluster(tree: Mapping[str, Any], where: str) -> Cluster:
    """Return the cluster part of a saved tree, after checking it again."""
    checked = check({k: v for k, v in tree.items() if k in _CLUSTER}, _CLUSTER, where)
    check_cluster_values(merge(defaults_of(Cluster), checked))
    return build(Cluster, checked)


def read_config(head: Mapping[str, Any], *, recipe_dir: str, where: str) -> Config:
    """Return the configuration from a bundle's config.yaml, after checking it again."""
    tree = check(head["config"], _ALL, where)
    check_values(merge(defaults_of(Cluster) | defaults_of(Recipe), tree))
    set_by = head.get("set_by")  # as text; missing in older bundles
    if not isinstance(set_by, Mapping):
        set_by = {}
    return Config(
        recipe_name=str(head["recipe_name"]),
        recipe_dir=recipe_dir,
        preset=head["preset"],
        cluster_name=str(head["cluster_name"]),
        cluster=build(Cluster, tree),
        recipe=build(Recipe, tree),
        tree=tree,
        origins={
            **{key: Origin(layer="run", source=where) for key, _ in flatten(tree)},
            **{key: Origin(layer="bundle", source=str(words)) for key, words in set_by.items()},
        },
    )


def describe(file: Path) -> str:
    """Return the one-line description in a recipe or profile."""
    return take_description(read_yaml(file), str(file))


def _merged(layers: Sequence[Layer]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for layer in layers:
        tree = merge(tree, layer.tree)
    return tree


def _profile_layer(file: Path) -> Layer:
    tree = read_yaml(file)
    take_description(tree, str(file))
    take_remote(tree, str(file))
    return Layer(name="cluster profile", source=str(file), tree=check(tree, _CLUSTER, str(file)))


def _machine_layer(tree: Mapping[str, Any]) -> list[Layer]:
    """Return the layer that resolves `instance_type: auto`, which only the local cluster allows."""
    if tree["instance_type"] != "auto":
        return []
    if tree["scheduler"] != "local":
        raise ConfigError(
            "instance_type: auto works only on the local cluster. Set the nodes' instance type"
        )
    files = [file.name for file in DEVICE_FILES.iterdir()]
    for device in DEVICES.values():
        if found := device.machine_of(files):
            # Otherwise the profile's one emulated worker would leave the other cores idle.
            own = {"instance_type": found[0], "workers_per_node": None}
            return [Layer(name="this machine", source=found[1], tree=own)]
    tree = {"instance_type": "local"}
    return [Layer(name="this machine", source="no Neuron device", tree=tree)]


def set_layer(word: str, tree: Mapping[str, Any]) -> Layer:
    """Return the layer of a --set. `tree` contains the existing keys."""
    dotted, equals, raw = word.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"--set {word}: expected key=value, such as --set batch.micro_batch=2")
    source = f"--set {word}"
    value = _typed(dotted, raw, source, tree)
    return Layer(name="command line", source=source, tree=nest(dotted, value))


def _option_layer(dotted: str, option: str, value: Any, tree: Mapping[str, Any]) -> Layer:
    if isinstance(value, tuple):  # a repeatable option extends the list of the layers below
        value = [*lookup(tree, dotted), *value]
    checked = convert(value, _hint(dotted, option, tree), option, dotted)
    return Layer(name="command line", source=option, tree=nest(dotted, checked))


def _typed(dotted: str, raw: str, source: str, tree: Mapping[str, Any]) -> Any:
    hint = _hint(dotted, source, tree)
    if hint is str or (str(hint) == "str | None" and raw not in ("null", "")):
        return _unquoted(raw)
    try:
        value = parse_yaml(raw)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{source}: not a valid value ({error.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{source}: {raw!r} is not a valid value") from None
    if dotted.partition(".")[0] in JOB_SECTIONS and hint is not str:
        value = with_numbers(value)
    checked = convert(value, hint, source, dotted)
    return as_declared(checked, tree[dotted], source, dotted) if dotted in JOB_SECTIONS else checked


def _unquoted(raw: str) -> str:
    """Return a string without the quotes that it has in a YAML file."""
    if raw[:1] not in ("'", '"') or raw[-1:] != raw[0]:
        return raw
    try:
        value = parse_yaml(raw)
    except (yaml.YAMLError, ValueError):
        return raw
    return value if isinstance(value, str) else raw


def _hint(dotted: str, source: str, tree: Mapping[str, Any]) -> Any:
    """Return the type required for the value of a dotted key."""
    hint: Any = Cluster
    known: Mapping[str, Any] = _ALL
    passed: list[str] = []
    for key in dotted.split("."):
        if passed and passed[0] in JOB_SECTIONS:
            return _declared_hint(dotted, source, tree)
        if hint == Mapping[str, str]:
            return str
        if hint == Mapping[str, Any]:
            return Any
        if get_origin(hint) is Mapping:  # maps names that the user chose to sections
            passed.append(key)
            hint = get_args(hint)[1]
            continue
        known = known if not passed else fields_of(hint) if is_dataclass(hint) else {}
        if key not in known:
            names = [".".join([*passed, k]) for k in known] or [k for k, _ in flatten(tree)]
            raise ConfigError(f"{source}: {_unknown(dotted, names, tree)}")
        passed.append(key)
        hint = known[key]
    return hint


def _unknown(dotted: str, names: Iterable[str], tree: Mapping[str, Any]) -> str:
    """Return the message for an unknown key. `names` are the keys allowed at that level."""
    names = list(names)
    keys = dict.fromkeys([*names, *(key for key, _ in flatten(tree))])
    if nearest := _nearest(dotted, keys) or _nearest(dotted.partition(".")[0], names):
        meant = '" or "'.join(nearest)
        return f'unknown key {dotted} (did you mean "{meant}"?)'
    if tree.get("project") and dotted.isidentifier():
        return (
            f"unknown key {dotted}; to fill in {{{dotted}}} in the script's arguments, set "
            f"places.{dotted}"
        )
    if not names:
        return f"unknown key {dotted}: pass a custom script's settings as arguments, after --"
    return f"unknown key {dotted}; known: {', '.join(names)}"


def _nearest(dotted: str, keys: Iterable[str]) -> list[str]:
    """Return the known keys that an unknown key most resembles. Often only the section is wrong."""
    import difflib  # needed for errors only

    section, _, wrong = dotted.rpartition(".")
    scores: dict[str, float] = {}
    for key in keys:
        there, _, name = key.rpartition(".")
        begins = min(len(wrong), len(name)) >= _SHORTEST_BEGIN
        begins = begins and (name.startswith(wrong) or wrong.startswith(name))
        likeness = difflib.SequenceMatcher(None, wrong, name).ratio()
        if name != wrong and begins:
            likeness = max(likeness, _BEGINS)
        if likeness >= (_LIKE_HERE if there == section else _LIKE_ELSEWHERE):
            scores[key] = likeness + (_HERE if there == section else 0 if there else _TOP)
    best = max(scores.values(), default=0)
    return [key for key, score in scores.items() if score == best][:_MOST_NEAREST]


def _declared_hint(dotted: str, source: str, tree: Mapping[str, Any]) -> Any:
    first = dotted.split(".", 1)[0]
    section = tree.get(first)
    declared = flatten(section) if isinstance(section, Mapping) else ()
    leaves = {f"{first}.{k}": v for k, v in declared}
    if dotted not in leaves:
        raise ConfigError(f"{source}: {_unknown(dotted, leaves, tree)}")
    value = leaves[dotted]
    return Any if value is None or isinstance(value, list | Mapping) else type(value)


class _Lock(NamedTuple):
    """A key locked by a site file, with the one or more values that the file allows."""

    dotted: str
    values: tuple[Any, ...]
    file: str

    def allows(self, value: Any) -> bool:
        """Check whether the lock allows a value; max_… keys also allow any smaller value."""
        if self.dotted.rpartition(".")[2].startswith("max_") and isinstance(value, int | float):
            return any(isinstance(each, int | float) and value <= each for each in self.values)
        return value in self.values

    @property
    def words(self) -> str:
        return " or ".join(map(repr, self.values))


def _site_locks(tree: Mapping[str, Any]) -> Iterator[_Lock]:
    """Yield the locks from the site's file, after those from a file that an admin is trying out.

    The site's file comes last so that it rejects any other value that a user's own file locks.
    """
    tried = os.environ.get(Variable.SITE)
    files = [Path(tried)] if tried else []
    for file in [*files, *([SITE_FILE] if SITE_FILE.is_file() else [])]:
        site = read_yaml(file)
        for key in site:
            if key != "lock":
                raise ConfigError(f"{file}: unknown key {key} (the only key is lock)")
        locks = site.get("lock") or {}
        if not isinstance(locks, Mapping):
            raise ConfigError(f"{file}: lock must be a mapping, found {locks!r}")
        for dotted, locked in flatten(locks):
            hint = _hint(dotted, str(file), tree)
            is_choice = isinstance(locked, list) and not (hint is Any or is_list(hint))
            values = locked if is_choice else [locked]
            if not values:
                raise ConfigError(f"{file}: lock: {dotted} does not allow any value")
            yield _Lock(
                dotted, tuple(convert(v, hint, str(file), dotted) for v in values), str(file)
            )


def refuse_locked(tree: Mapping[str, Any], where: str) -> None:
    """Reject values in a reviewed bundle that violate the site's locks."""
    asked = dict(flatten(tree))
    for lock in _site_locks(tree):
        if lock.dotted in asked and not lock.allows(asked[lock.dotted]):
            raise ConfigError(
                f"{where}: {lock.dotted} is {asked[lock.dotted]!r}, but {lock.file} locks it to "
                f"{lock.words}: render the bundle again"
            )


def _site_layers(layers: Sequence[Layer], keys: Container[str] = _ALL) -> list[Layer]:
    """Return a layer for each lock on the given top-level keys that the layers below violate."""
    found: list[Layer] = []
    for lock in _site_locks(_merged(layers)):
        below = [*layers, *found]
        if lock.dotted.partition(".")[0] not in keys or lock.allows(
            lookup(_merged(below), lock.dotted)
        ):
            continue
        for layer in below:
            asked = lookup(layer.tree, lock.dotted)
            chosen = layer.name in ("command line", "preset", "recipe", "site lock")
            if chosen and asked is not None and not lock.allows(asked):
                raise ConfigError(
                    f"{lock.dotted} is locked to {lock.words} by {lock.file}; "
                    f"{layer.source} asks for {asked!r}: remove the setting, or ask the admin"
                )
        tree = nest(lock.dotted, lock.values[0])
        found.append(Layer(name="site lock", source=lock.file, tree=tree))
    return found
