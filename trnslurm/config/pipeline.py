"""Reads a pipeline: named stages, each with the arguments of a `trnslurm submit` command."""

from __future__ import annotations

import graphlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trnslurm.config.search import read_yaml
from trnslurm.contract.inputs import NAME, condition_in
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.frozen import Frozen

_SUFFIXES = (".yaml", ".yml")
_KEYS = ("submit", "if", "after", "files")
_TAKES = rf"(?<![{{$])\{{({NAME})\.\w+\}}"


class StageText(Frozen):
    """A stage as written in the pipeline file."""

    name: str
    words: tuple[str, ...]
    """The arguments of `trnslurm submit`."""
    condition: str = ""
    files: tuple[str, ...] = ()
    """Patterns of project files that affect its result; if empty, its imports decide."""
    needs: tuple[str, ...] = ()
    """The stages that must come before it."""


class Pipeline(Frozen):
    """The stages in a file, each listed after the stages that it needs."""

    name: str
    file: Path
    stages: tuple[StageText, ...]


def is_pipeline(word: str) -> bool:
    """Check whether a word names a pipeline file."""
    return word.endswith(_SUFFIXES) and Path(word).is_file()


def read_pipeline(file: Path) -> Pipeline:
    """Read the stages in a file; reject invalid ones."""
    tree = read_yaml(file)
    told = tree.get("stages")
    if not isinstance(told, Mapping) or not told:
        raise ConfigError(f"{file}: the file has no stages; see docs/pipelines.md for an example")
    if more := [key for key in tree if key != "stages"]:
        raise ConfigError(
            f"{file}: unknown key {more[0]!r}: stages is the only top-level key of a pipeline"
        )
    found = {}
    for name, values in told.items():
        where = f"{file}: stages.{name}"
        tree = {"submit": values} if isinstance(values, str) else values
        found[str(name)] = (_words(where, tree), tree)
    return Pipeline(name=_name_of(file), file=file, stages=stages_in_order(str(file), found))


def _name_of(file: Path) -> str:
    """Return a pipeline's name: that of the file, or of the directory that has pipeline.yaml."""
    stem = file.absolute().parent.name if file.stem == "pipeline" else file.stem
    return re.sub(r"[^\w.-]+", "-", stem)[:30].strip("-.") or "pipeline"


def _words(where: str, values: Any) -> tuple[str, ...]:
    """Return the words that a stage submits; reject unknown keys."""
    if not isinstance(values, Mapping) or not isinstance(values.get("submit"), str):
        raise ConfigError(
            f"{where}: expected the arguments of `trnslurm submit`, such as ./eval.py --time 60"
        )
    for key in values:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS) or f"; known: {', '.join(_KEYS)}"
            raise ConfigError(f"{where}: unknown key {key}{hint}")
    try:
        words = tuple(shlex.split(values["submit"]))
    except ValueError as error:
        raise ConfigError(f"{where}: {error} in {values['submit']!r}") from None
    if words[:2] == ("trnslurm", "submit"):
        words = words[2:]
    if not words:
        raise ConfigError(f"{where}: there is nothing to submit")
    return words


def stages_in_order(
    place: str, told: Mapping[str, tuple[Sequence[str], Mapping[str, Any]]]
) -> tuple[StageText, ...]:
    """Return stages, each after those that it needs. `told` has the words and keys of each."""
    known = [*told]
    stages = {
        name: _stage(f"{place}: stages.{name}", name, words, values, known)
        for name, (words, values) in told.items()
    }
    return tuple(_in_order(place, stages))


def _stage(
    where: str, name: str, words: Sequence[str], values: Mapping[str, Any], known: Sequence[str]
) -> StageText:
    if not re.fullmatch(NAME, name):
        raise ConfigError(
            f"{where}: a stage name may contain only lowercase letters, digits and _, as in train_2"
        )
    condition = str(values.get("if") or "")
    needs = [n for word in words for n in re.findall(_TAKES, word) if n in known]
    if condition:
        if (found := condition_in(condition)) is None:
            raise ConfigError(
                f"{where}.if is {condition!r}: expected STAGE.METRIC, one of < <= > >=, and a "
                "number, such as evaluate.accuracy >= 0.6"
            )
        needs.append(_known(f"{where}.if", found.name, known))
    needs += [_known(f"{where}.after", n, known) for n in _texts(where, "after", values)]
    if name in needs:
        raise ConfigError(
            f"{where}: a stage cannot depend on itself; its own results go to {{out}}"
        )
    return StageText(
        name=name,
        words=tuple(words),
        condition=condition,
        files=_texts(where, "files", values),
        needs=tuple(dict.fromkeys(needs)),
    )


def _known(where: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise ConfigError(
            f"{where}: no stage {name}{did_you_mean(name, known) or f': known: {known}'}"
        )
    return name


def _texts(where: str, key: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    told = values.get(key) or ()
    told = [told] if isinstance(told, str) else told
    if not isinstance(told, Sequence) or not all(isinstance(each, str) for each in told):
        raise ConfigError(f"{where}.{key}: expected a list of names")
    return tuple(told)


def _in_order(place: str, stages: Mapping[str, StageText]) -> list[StageText]:
    """Return stages, each after those that it needs, otherwise in file order."""
    sorter = graphlib.TopologicalSorter({name: stage.needs for name, stage in stages.items()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(f"{place}: the stages wait for each other: {circle}") from None
    found: list[StageText] = []
    while len(found) < len(stages):
        there = {stage.name for stage in found}
        free = (s for n, s in stages.items() if n not in there and there.issuperset(s.needs))
        found.append(next(free))
    return found
