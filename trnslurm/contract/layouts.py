"""What each library writes as a checkpoint, which file it writes last, and how to tell a complete
one.

Anything that does not show this stays unknown, because training that starts from half a checkpoint
is worse than training that starts over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trnslurm.contract import whole
from trnslurm.contract.entries import (
    Named,
    beside,
    entries_in,
    is_directory,
    is_file,
    time_of,
    word_in,
)

_QUIET_S = 60.0
"""How long the run must have lived after the last byte of a file that does not show its end."""

STATE, RANDOM, INDEX = "trainer_state.json", "random_states_0.pkl", ".metadata"
_LATEST, _ITERATION = "latest", "latest_checkpointed_iteration.txt"
OF_TRAINER = re.compile(r"checkpoint-(\d+)")
# Files that rank 0 of Trainer and accelerate writes before the last one.
_BEFORE = re.compile(
    r"(pytorch_)?model.*\.(safetensors|bin|json)|adapter_model\..*|optimizer(_\d+)?\.(pt|bin)|"
    r"scheduler(_\d+)?\.(pt|bin)|scaler\.pt|rng_state(_0)?\.pth"
)
OF_STEPS = {
    "DeepSpeed": re.compile(r"global_step(\d+)"), "Megatron": re.compile(r"iter_(\d{7,})"),
}  # fmt: skip
"""The directories inside a directory that names the newest of them."""
_PART = re.compile(r"pytorch_model(_fsdp)?(_\d+)?|optimizer_\d+|weights")
"""Directories that are part of a checkpoint of accelerate, Trainer or NeMo."""
_SHARD = re.compile(r"(^|[-_.])(mp|pp|tp|dp|ep)?_?(rank|shard|part)[-_]?\d|[-_]of[-_]\d", re.I)
_OPTIMIZER_FILE = re.compile(r"(optim|opt|sched|scaler|rng|ema)[a-z]*([-_.\d]|$)", re.I)
UNFINISHED = re.compile(r"(^|[-_.])(tmp|temp|partial|unfinished|incomplete)([-_.\d]|$)", re.I)
_OF_ACCELERATE = re.compile(r"(random_states|custom_checkpoint)_\d+\.pkl|.*\.bin")
SAVED_BY_TORCH = (".pt", ".pth", ".pth.tar", ".pt.tar", ".ckpt")
# In the pickle of a full training state: names of parameters, besides the optimizer's
# weight_decay; what Lightning 2.6 dumps (trainer/connectors/checkpoint_connector.py,
# dump_checkpoint).
_PARAMETER = re.compile(rb"weight(?!_decay|s_only)|bias\b|embed|kernel")
_LIGHTNING = re.compile(rb"pytorch-lightning_version")
_GLOBAL_STEP = re.compile(rb"global_step(?:q.|r.{4}|\x94)(?:K(.)|M(..)|J(.{4}))", re.DOTALL)
_STEP = re.compile(r"(?:global_?step|steps?|iter(?:ation)?s?)[-_=]?(\d+)", re.I)


class Life(NamedTuple):
    """When an attempt began, and when it last showed life, by the clock of its files."""

    start: float
    end: float


class Found(NamedTuple):
    """A checkpoint."""

    path: Path
    step: int | None
    """The step, or None if the name does not contain it."""
    time: float
    """When it was complete."""
    form: str
    """What writes such checkpoints."""

    def __str__(self) -> str:
        return f"{self.path.name} of {self.form}"


class Candidate(NamedTuple):
    """A possible checkpoint, before anything is read."""

    found: Found
    whole: Callable[[], Found | None]
    """Returns the checkpoint if it is complete."""
    mark: Path
    """The file that distinguishes it from one of the project."""


def directory_at(
    here: Path, named: Named, lives: Sequence[Life], workers: int
) -> Iterator[Candidate]:
    """Yield a directory that is itself a checkpoint, complete or not."""
    if UNFINISHED.search(here.name):
        return
    of_trainer = OF_TRAINER.fullmatch(here.name)
    if STATE in named and of_trainer:
        # transformers 4.57, Trainer._save_checkpoint: the state, by rank 0, after all but the
        # random states of other ranks, without which it starts all the same.
        found = Found(here, int(of_trainer[1]), time_of(named[STATE]), "Trainer")
        check = if_all(
            found,
            lambda: whole.ends_as_json(here / STATE),
            lambda: _precede(named, STATE, _BEFORE),
            lambda: _parts_are_whole(here, named, workers),
        )
        yield Candidate(found, check, here / STATE)
    elif RANDOM in named:
        # accelerate 1.15, save_accelerator_state: the random states after model, optimizers and
        # schedulers; only what register_for_checkpointing has named follows (save_state).
        step = int(of_trainer[1]) if of_trainer else step_in(here.name)
        found = Found(here, step, time_of(named[RANDOM]), "accelerate")
        check = if_all(
            found,
            lambda: _precede(named, RANDOM, _BEFORE),
            lambda: _parts_are_whole(here, named, workers),
            lambda: _customs_are_there(here, named, lives),
        )
        yield Candidate(found, check, here / RANDOM)
    elif INDEX in named and not _PART.fullmatch(here.name):
        yield from _distributed(here, named)
    elif here.name.endswith(".ckpt") and _LATEST in named:
        # lightning 2.6, DeepSpeedStrategy.save_checkpoint: one tag in a separate directory.
        found = Found(here, step_in(here.name), time_of(named[_LATEST]), "Lightning")
        check = if_all(found, lambda: _deepspeed_is_whole(here, named, workers))
        yield Candidate(found, check, here / _LATEST)


def _distributed(here: Path, named: Named) -> Iterator[Candidate]:
    """Yield a checkpoint of torch.distributed.checkpoint, such as torchtitan's step-N."""
    # torch 2.9, FileSystemWriter.finish: .metadata comes by a rename, once all ranks have written.
    # In a directory that is reused, the old one remains until then.
    data = re.compile(r".*\.distcp")
    if not any(data.fullmatch(name) for name in named):
        return
    mark, form = INDEX, "torch.distributed.checkpoint"
    needs_rest = here.name.endswith(SAVED_BY_TORCH)
    if needs_rest or "meta.pt" in named:
        # lightning 2.6, FSDPStrategy.save_checkpoint of both: rank 0 writes meta.pt last.
        mark, form = "meta.pt", "Lightning"
    if mark not in named:
        return

    def check() -> bool:
        if not _precede(named, INDEX, data):
            return False
        return mark == INDEX or (
            _precede(named, mark, re.compile(re.escape(INDEX))) and whole.is_whole_zip(here / mark)
        )

    step = step_in(here.name, here.parent.name)
    found = Found(here, step, time_of(named[mark]), form)
    yield Candidate(found, if_all(found, check), here / INDEX)


def pointed_at(here: Path, named: Named, below: list[str], workers: int) -> Iterator[Candidate]:
    """Yield the directory in which a file names the newest checkpoint.

    DeepSpeed's load_checkpoint and Megatron's --load accept this directory.
    """
    if _LATEST in named and (tag := word_in(here / _LATEST)) in below and tag != "checkpoint":
        inside = entries_in(here / tag)
        if any(name.endswith("_model_states.pt") for name in inside):
            below.remove(tag)
            if not _PART.fullmatch(tag):
                found = Found(here, step_in(tag), time_of(named[_LATEST]), "DeepSpeed")
                check = if_all(found, lambda: _deepspeed_is_whole(here, named, workers))
                yield Candidate(found, check, here / _LATEST)
    # Other DeepSpeed tags are older or incomplete.
    for name in [name for name in below if OF_STEPS["DeepSpeed"].fullmatch(name)]:
        below.remove(name)
    iteration = word_in(here / _ITERATION) if _ITERATION in named else ""
    for name in [name for name in below if OF_STEPS["Megatron"].fullmatch(name)]:
        below.remove(name)
        if iteration.isdecimal() and name == f"iter_{int(iteration):07d}":
            # Megatron-LM, megatron/training/checkpointing.py, save_checkpoint: the number, by rank
            # 0, after a barrier, or at the end of an asynchronous save.
            found = Found(here, int(iteration), time_of(named[_ITERATION]), "Megatron")
            is_whole = partial(_megatron_is_whole, here / name, here / _ITERATION)
            yield Candidate(found, if_all(found, is_whole), here / _ITERATION)


def file_at(here: Path, entry: os.DirEntry[str]) -> Iterator[Candidate]:
    """Yield a file to which torch.save has written a model with its optimizer.

    Such a file is often replaced in place, so its end shows whether it is complete. Weights by
    themselves and the parts of a checkpoint in several files do not count.
    """
    name = entry.name
    if not name.endswith(SAVED_BY_TORCH) or name.startswith(".") or not is_file(entry):
        return
    if _SHARD.search(name) or _SHARD.search(here.name) or UNFINISHED.search(name):
        return
    if _OPTIMIZER_FILE.match(name):
        return
    path = here / name
    found = Found(path, step_in(name, here.name), time_of(entry), "torch.save")
    yield Candidate(found, lambda: if_all(found)() and _if_training_state(found), path)


def _if_training_state(found: Found) -> Found | None:
    """Return a complete torch.save file if it contains a model and its optimizer."""
    pickled = whole.pickle_in(found.path)
    # As Optimizer.state_dict names it (torch/optim/optimizer.py), alone or with a scheduler's.
    alone = whole.first_key(pickled) in ("state", "param_groups")
    if alone or b"param_groups" not in pickled or not _PARAMETER.search(pickled):
        return None
    if not _LIGHTNING.search(pickled):
        return found
    told = _GLOBAL_STEP.search(pickled)
    step = int.from_bytes(told[1] or told[2] or told[3], "little") if told else found.step
    return found._replace(form="Lightning", step=step)


def if_all(found: Found, *checks: Callable[[], bool]) -> Callable[[], Found | None]:
    """Return a function that returns a checkpoint if it passes all checks."""

    def complete() -> Found | None:
        path = found.path
        # NeMo 2 has such a file next to a checkpoint until it is complete (nemo/lightning/pytorch/
        # callbacks/model_checkpoint.py).
        begun = f"{path.stem if path.suffix == '.ckpt' else path.name}-unfinished"
        if (path.parent / begun).exists():
            return None
        return found if all(check() for check in checks) else None

    return complete


def outlived(changed: float, lives: Sequence[Life]) -> bool:
    """Check whether the attempt that wrote a file continued for a while afterward."""
    writer = next((life for life in reversed(lives) if life.start <= changed), None)
    return writer is not None and writer.end >= changed + _QUIET_S


def step_in(*names: str) -> int | None:
    """Return the step in the first of these names that contains one."""
    for name in names:
        if told := _STEP.findall(name):
            return int(told[-1])
    return None


def _precede(named: Named, last: str, pattern: re.Pattern[str]) -> bool:
    """Check that no file that matches a pattern is newer than the last one.

    Otherwise the directory is being rewritten, and the last file is left over from before.
    """
    end = time_of(named[last])
    return all(time_of(e) <= end for name, e in named.items() if pattern.fullmatch(name))


def _parts_are_whole(here: Path, named: Named, workers: int, depth: int = 0) -> bool:
    """Check all files in a directory and its subdirectories that show their end."""
    for name, entry in named.items():
        if is_file(entry):
            torch = name.endswith(SAVED_BY_TORCH) or _OF_ACCELERATE.fullmatch(name)
            known = torch or name.endswith(".safetensors")
            if known and not whole.is_whole(here / name):
                return False
        elif is_directory(entry) and depth < 2:
            inside = entries_in(here / name)
            if any(each.endswith(".distcp") for each in inside) and INDEX not in inside:
                return False
            if not _parts_are_whole(here / name, inside, workers, depth + 1):
                return False
    if any(name.startswith("global_step") and is_directory(e) for name, e in named.items()):
        return _LATEST in named and _deepspeed_is_whole(here, named, workers)
    return True


def _customs_are_there(here: Path, named: Named, lives: Sequence[Life]) -> bool:
    """Check for the script's objects that accelerate writes last.

    Their number is known from the checkpoints next to this one. Without any, the run must have
    continued for a while.
    """
    count = _customs(named)
    others = [entries_in(here.parent / name) for name in beside(here) if name != here.name]
    known = [_customs(other) for other in others if RANDOM in other]
    newest = max([time_of(e) for e in named.values() if is_file(e)], default=0.0)
    return count >= max(known) if known else outlived(newest, lives)


def _customs(named: Iterable[str]) -> int:
    return sum(bool(re.fullmatch(r"custom_checkpoint_\d+\.pkl", name)) for name in named)


def _deepspeed_is_whole(here: Path, named: Named, workers: int) -> bool:
    """Check a checkpoint of DeepSpeed 0.19: engine.py, save_checkpoint.

    Rank 0 writes the file `latest` last, but waits for the other ranks only afterward. So all files
    must be complete, and there must be as many as ranks, or as in another checkpoint.
    """
    tag = word_in(here / _LATEST)
    inside = entries_in(here / tag) if tag and "/" not in tag else {}
    models = [name for name in inside if name.endswith("_model_states.pt")]
    if not models:
        return False
    end = time_of(named[_LATEST])
    if any(time_of(inside[name]) > end for name in models if "rank_00_model" in name):
        return False
    shards = _shards(inside)
    others = {_shards(entries_in(here / name)) for name in named if name != tag}
    if shards and shards not in {workers, *others}:
        return False
    files = [here / tag / name for name in inside if name.endswith(".pt")]
    return all(whole.is_whole_zip(file) for file in files)


def _shards(named: Iterable[str]) -> int:
    return sum(name.endswith("_optim_states.pt") for name in named)


def _megatron_is_whole(place: Path, tracker: Path) -> bool:
    inside = entries_in(place)
    if any(name.endswith(".distcp") for name in inside):
        if INDEX not in inside:
            return False
        if not _precede(inside, INDEX, re.compile(r".*\.distcp")):
            return False
    try:
        end = tracker.lstat().st_mtime
    except OSError:
        return False
    return (
        bool(inside)
        and _parts_are_whole(place, inside, 0)
        and all(time_of(entry) <= end for entry in inside.values() if is_file(entry))
    )
