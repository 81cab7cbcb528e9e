"""Fills the placeholders in a custom script's arguments, from the plan or on the node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from trnslurm.config.schema import Recipe
from trnslurm.contract.rundir import CHECKPOINTS
from trnslurm.contract.variables import Variable
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.plan.spec import JobSpec, has_own_batch

RESUME = "resume"
# {{word}} is an escaped {word}; other braces, such as in JSON or ${word}, have no meaning.
_PLACE = r"(?<!\$)(?:\{(\{[A-Za-z_]\w*\})\}|\{([A-Za-z_]\w*)\})"
_ON_NODE = {
    "run": Variable.RUN_DIR,
    CHECKPOINTS: Variable.CHECKPOINTS,
    RESUME: Variable.RESUME,
    "attempt": Variable.ATTEMPT,
    "node": "SLURM_NODEID",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
"""Values known only when the script starts, and the variables that hold them."""
_OF_THE_BATCH = ("global_batch", "micro_batch", "accumulation")


def known_places(spec: JobSpec) -> dict[str, str]:
    """Return the placeholders that the plan fills."""
    batch, recipe = spec.batch, spec.config.recipe
    return {
        "global_batch": str(batch.global_batch),
        "micro_batch": str(batch.micro_batch),
        "accumulation": str(batch.accumulation),
        "workers": str(batch.workers),
        "workers_per_node": str(batch.workers_per_node),
        "nodes": str(batch.nodes),
        "steps": str(recipe.steps),
        "seed": str(recipe.seed),
        "seq_len": str(recipe.seq_len),
        "device": spec.device.name,
        "name": spec.name,
    }


def argument_words(spec: JobSpec) -> tuple[list[str], list[str]]:
    """Return two lists of shell words: arguments for every attempt, and arguments to resume.

    An argument with {resume}, and an option before it, is passed only if there is a checkpoint.
    """
    every: list[str] = []
    resuming: list[str] = []
    known = known_places(spec)
    _refuse_own(spec.config.recipe, known)
    known |= spec.config.recipe.places
    _refuse_unknown(spec, known)
    for argument in spec.config.recipe.arguments:
        word = _word(argument, known)
        if RESUME in _places(argument):
            if not argument.startswith("-") and every and every[-1].startswith("-"):
                resuming.append(every.pop())
            resuming.append(word)
        else:
            every.append(word)
    return every, resuming


def _places(argument: str) -> list[str]:
    return [match[2] for match in re.finditer(_PLACE, argument) if match[2]]


def _refuse_own(recipe: Recipe, known: Mapping[str, str]) -> None:
    """Refuse a recipe's placeholder that is never used, or that is built in."""
    used = {place for argument in recipe.arguments for place in _places(argument)}
    for place in recipe.places:
        if place in known or place in _ON_NODE:
            raise ConfigError(f"places.{place}: {{{place}}} is built in; choose another name")
        if place not in used:
            raise ConfigError(f"places.{place} is set, but no argument has {{{place}}}")


def _refuse_unknown(spec: JobSpec, known: Mapping[str, str]) -> None:
    names = [*known, *_ON_NODE]
    for argument in spec.config.recipe.arguments:
        for place in _places(argument):
            if place not in names:
                hint = did_you_mean(place, names) or f": there are {', '.join(sorted(names))}"
                raise ConfigError(
                    f"argument {argument!r}: no place {{{place}}}{hint}; --set "
                    f"places.{place}=VALUE makes one, {{{{{place}}}}} is for the braces themselves"
                )
    recipe = spec.config.recipe
    used = {place for one in recipe.arguments for place in _places(one)}
    if used & {*_OF_THE_BATCH} and has_own_batch(recipe):
        raise ConfigError(
            "the arguments use the batch, which is not known: set it with --set "
            "batch.global_batch=N and --set batch.micro_batch=N"
        )
    for key in ("steps", "seq_len"):
        if key in used and getattr(recipe, key) == getattr(Recipe, key):
            raise ConfigError(f"the arguments have {{{key}}}, which is not set: --set {key}=N")


def _word(argument: str, known: Mapping[str, str]) -> str:
    """Return an argument as a shell word, quoted where needed."""
    return "".join(_parts(argument, known)) or "''"


def _parts(argument: str, known: Mapping[str, str]) -> Iterator[str]:
    literal, at = "", 0
    for match in re.finditer(_PLACE, argument):
        literal += argument[at : match.start()]
        at = match.end()
        place = match[2]
        if place is None:
            literal += match[1]
        elif place in known:
            literal += known[place]
        else:
            yield shlex.quote(literal) if literal else ""
            yield f'"${_ON_NODE[place]}"'
            literal = ""
    literal += argument[at:]
    if literal:
        yield shlex.quote(literal)
