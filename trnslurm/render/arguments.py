"""Fills in the placeholders of a custom script's arguments, from the plan or on the node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trnslurm.config.schema import Recipe
from trnslurm.config.script import OWN_LAUNCHER
from trnslurm.contract.inputs import variable_of as variable_of_input
from trnslurm.contract.roles import PLACES, variable_of
from trnslurm.contract.rundir import CHECKPOINTS, OUT
from trnslurm.contract.variables import Variable
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.frozen import Frozen
from trnslurm.plan.inputs import inputs_of, static_places
from trnslurm.plan.roles import places_in
from trnslurm.plan.spec import JobSpec, has_own_batch

RESUME = "resume"
CHECKPOINT, STEP, EXPORT = "checkpoint", "step", "export"
"""Placeholders of a run that was made for another run's checkpoint."""
LOCAL_RANK = "local_rank"
"""trnslurm's launcher fills this in for each worker."""
# {{word}} is an escaped {word}. Other braces, as in JSON or ${word}, have no meaning.
_PLACE = (
    r"(?<!\$)(?:\{(\{[A-Za-z_]\w*(?:\.\w+)?\}|\{(?:first|later):[^{}]*\})\}"
    r"|\{(?P<place>[A-Za-z_]\w*(?:\.\w+)?)\}|\{(?P<start>first|later):(?P<text>[^{}]*)\})"
)
_ON_NODE = {
    "run": Variable.RUN_DIR,
    "run_id": "WANDB_RUN_ID",
    CHECKPOINTS: Variable.CHECKPOINTS,
    OUT: Variable.OUT,
    RESUME: Variable.RESUME,
    "attempt": Variable.ATTEMPT,
    CHECKPOINT: Variable.FOLLOWED,
    STEP: Variable.FOLLOWED_STEP,
    EXPORT: Variable.EXPORT,
    "node": "SLURM_NODEID",
    "local_rank": "SLURM_LOCALID",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
"""Values known only when the script starts, and the variables that hold them."""
# What has a script find its newest checkpoint: --resume_from_checkpoint latest (diffusers'
# examples), --resume latest (open_clip_train/main.py), ckpt_path=last (Lightning's Trainer.fit),
# --restart_latest (mace's run_train.py).
_RESUMES = re.compile(r"(?i)[-+]*([\w.-]*[._-])?(resume(_from(_checkpoint)?)?|ckpt[_-]path)")
_NEWEST = re.compile(r"(?i)latest|last|auto")
_BY_ITSELF = re.compile(r"(?i)--(auto[_-]resume|restart[_-]latest)(=(true|1))?")
_OF_THE_BATCH = ("global_batch", "micro_batch", "accumulation")


def every_argument(recipe: Recipe) -> tuple[str, ...]:
    """Return a script's arguments, including those that a resume has added."""
    return (*recipe.arguments, *recipe.resume_arguments)


def uses_local_rank(recipe: Recipe) -> bool:
    """Check whether an argument differs for each worker."""
    return any(LOCAL_RANK in _places(argument) for argument in every_argument(recipe))


def uses_export(recipe: Recipe) -> bool:
    """Check whether an argument, or a word of a role's command, names the exported checkpoint."""
    return bool(recipe.follows) and _uses(recipe, EXPORT)


def uses_out(recipe: Recipe) -> bool:
    """Check whether an argument, or a word of a role's command, names the output directory."""
    return _uses(recipe, OUT)


def _uses(recipe: Recipe, place: str) -> bool:
    of_roles = [word for role in recipe.roles.values() for word in role.command]
    return any(place in _places(word) for word in (*every_argument(recipe), *of_roles))


def known_places(spec: JobSpec) -> dict[str, str]:
    """Return the placeholders that the plan fills in."""
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
        **static_places(recipe.inputs),
    } | ({LOCAL_RANK: f"{{{LOCAL_RANK}}}"} if recipe.launcher == OWN_LAUNCHER else {})


class Known(Frozen, kw_only=False):
    """The placeholders available to a script."""

    texts: Mapping[str, str]
    """Placeholders that the plan fills in."""
    variables: Mapping[str, str]
    """Placeholders known only when the script starts, with the variables that hold them."""

    def __contains__(self, place: object) -> bool:
        return place in self.texts or place in self.variables


class Words(NamedTuple):
    """A script's arguments as shell words."""

    every: list[str]
    """Arguments for every attempt: those before the first one that depends on a checkpoint."""
    later: list[str]
    """The remaining arguments, for an attempt that continues from a checkpoint."""
    first: list[str]
    """The remaining arguments, for an attempt without a checkpoint."""
    takes_checkpoint: bool


def states_checkpoint(recipe: Recipe) -> bool:
    """Check whether the user's own arguments say how a script takes a checkpoint."""
    own = recipe.arguments
    return _takes_newest(own) or any(_starts(a) or RESUME in _places(a) for a in own)


def argument_words(spec: JobSpec) -> Words:
    """Return the arguments of a script.

    An argument with {resume}, and an option before it, is passed only if there is a checkpoint. An
    argument is also dropped if {first:TEXT} or {later:TEXT} leaves it empty.
    """
    known = Known(known_places(spec), _variables(spec))
    _refuse_own(spec.config.recipe, known)
    known = Known({**known.texts, **spec.config.recipe.places}, known.variables)
    _refuse_unknown(spec, known)
    arguments = every_argument(spec.config.recipe)
    depends = [bool(_starts(each) or RESUME in _places(each)) for each in arguments]
    if not any(depends):
        words = [_word(each, known) for each in arguments]
        return Words(words, [], [], takes_checkpoint=_takes_newest(arguments))
    if not any(map(_starts, arguments)):
        return _with_resume_last(arguments, known)
    at = depends.index(True)
    at -= at > 0 and arguments[at - 1].startswith("-") and not arguments[at].startswith("-")
    return Words(
        [_word(each, known) for each in arguments[:at]],
        _of_start("later", arguments[at:], known),
        _of_start("first", arguments[at:], known),
        takes_checkpoint=True,
    )


def _variables(spec: JobSpec) -> dict[str, str]:
    """Return the placeholders known only when the script starts, with their variables."""
    roles = spec.config.recipe.roles
    found = dict(_ON_NODE)
    if spec.role:
        found |= {"host": Variable.HOST, "port": Variable.PORT, "server": Variable.SERVER}
    if not spec.config.recipe.follows:
        del found[CHECKPOINT], found[STEP], found[EXPORT]
    for one in inputs_of(spec.config.recipe):
        found |= {f"{one.name}.{place}": variable_of_input(one.name, place) for place in one.wants}
    return found | {f"{r}.{place}": variable_of(r, place) for r in roles for place in PLACES}


def _takes_newest(arguments: Sequence[str]) -> bool:
    """Check whether arguments make a script continue from the newest checkpoint that it finds."""
    before = ""
    for word in arguments:
        option, equals, value = word.partition("=")
        option, value = (option, value) if equals else (before, word)
        if _BY_ITSELF.fullmatch(word) or (_RESUMES.fullmatch(option) and _NEWEST.fullmatch(value)):
            return True
        before = word
    return False


def _with_resume_last(arguments: Sequence[str], known: Known) -> Words:
    every: list[str] = []
    resuming: list[str] = []
    for argument in arguments:
        word = _word(argument, known)
        if RESUME in _places(argument):
            if not argument.startswith("-") and every and every[-1].startswith("-"):
                resuming.append(every.pop())
            resuming.append(word)
        else:
            every.append(word)
    return Words(every, resuming, [], takes_checkpoint=True)


def _of_start(start: str, arguments: Sequence[str], known: Known) -> list[str]:
    """Return the words for a first or a later attempt, in their original order."""
    words: list[str] = []
    option = False
    """Whether the previous word is an option that still needs a value."""
    for argument in arguments:
        own = "first" in _starts(argument)
        gone = start == "first" and RESUME in _places(argument) and not own
        word = "" if gone else "".join(_parts(argument, known, start))
        empty = gone or (bool(_starts(argument)) and re.fullmatch(r"(--?[\w.-]+=)?", word))
        if not empty:
            words.append(word or "''")
        elif option and not argument.startswith("-"):
            words.pop()
        option = not empty and argument.startswith("-") and "=" not in argument
    return words


def _places(argument: str) -> list[str]:
    return [match["place"] for match in re.finditer(_PLACE, argument) if match["place"]]


def _starts(argument: str) -> list[str]:
    return [match["start"] for match in re.finditer(_PLACE, argument) if match["start"]]


def _refuse_own(recipe: Recipe, known: Known) -> None:
    """Reject a placeholder of the recipe that is never used or that is built in."""
    used = {place for argument in every_argument(recipe) for place in _places(argument)}
    for place in recipe.places:
        if place in known:
            raise ConfigError(f"places.{place}: {{{place}}} is built in: choose another name")
        if place not in used:
            raise ConfigError(f"places.{place} is set, but no argument has {{{place}}}")


def _refuse_unknown(spec: JobSpec, known: Known) -> None:
    names, roles = {*known.texts, *known.variables}, spec.config.recipe.roles
    for argument in every_argument(spec.config.recipe):
        [*places_in(argument, roles, f"argument {argument!r}")]
        for place in _places(argument):
            if place not in known and "." not in place:
                hint = did_you_mean(place, names) or f"; known: {', '.join(sorted(names))}"
                raise ConfigError(
                    f"argument {argument!r}: unknown placeholder {{{place}}}{hint}; use --set "
                    f"places.{place}=VALUE to define it, or {{{{{place}}}}} for literal braces"
                )
    recipe = spec.config.recipe
    if uses_local_rank(recipe) and recipe.launcher not in (OWN_LAUNCHER, "srun"):
        raise ConfigError(
            f"{{{LOCAL_RANK}}} differs for each worker, but {recipe.launcher} starts the workers "
            "itself: "
            f"remove {{{LOCAL_RANK}}}, or use --launcher {OWN_LAUNCHER}"
        )
    used = {place for one in every_argument(recipe) for place in _places(one)}
    if used & {*_OF_THE_BATCH} and has_own_batch(recipe):
        raise ConfigError(
            "the arguments use the batch size, which is unknown: set it with --set "
            "batch.global_batch=N and --set batch.micro_batch=N"
        )
    for key in ("steps", "seq_len"):
        if key in used and getattr(recipe, key) == getattr(Recipe, key):
            raise ConfigError(
                f"the arguments contain {{{key}}}, which is not set: use --set {key}=N"
            )


def _word(argument: str, known: Known) -> str:
    """Return an argument as a shell word, quoted if necessary."""
    return "".join(_parts(argument, known)) or "''"


def _parts(argument: str, known: Known, start: str = "") -> Iterator[str]:
    literal, at = "", 0
    for match in re.finditer(_PLACE, argument):
        literal += argument[at : match.start()]
        at = match.end()
        place = match["place"]
        if match["start"]:
            literal += match["text"] if match["start"] == start else ""
        elif place is None:
            literal += match[1]
        elif place in known.texts:
            literal += known.texts[place]
        elif place not in known:  # {other.word}: braces without a special meaning
            literal += match[0]
        elif place != RESUME or start != "first":
            yield shlex.quote(literal) if literal else ""
            yield f'"${known.variables[place]}"'
            literal = ""
    literal += argument[at:]
    if literal:
        yield shlex.quote(literal)
