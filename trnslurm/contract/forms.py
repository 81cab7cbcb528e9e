"""Finds the checkpoints that libraries write into the directories of a run, without being told.

Only a whole checkpoint counts: each form has a file that its library writes last, or an end that
shows a cut. Whatever does not show that is left unknown, since a training that begins with a half
checkpoint is worse than one that begins again. Nothing is loaded, and no link is followed.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from trnslurm.contract import whole
from trnslurm.contract.files import open_file, read_file

_DEEPEST, _MOST_ENTRIES = 8, 20_000
_MOST_CHECKED = 200
"""Checkpoints that are looked into, the newest first, until one is whole."""
_NO_RESULTS = {"wandb", "mlruns", "node_modules", "__pycache__", "site-packages"}
_POINTER_BYTES = 256
_QUIET_S = 60.0
"""As long the run must have lived after the last byte of what does not show its end."""
_COMPARED_BYTES = 64 << 20

_STATE, _RANDOM, _INDEX = "trainer_state.json", "random_states_0.pkl", ".metadata"
_LATEST, _ITERATION = "latest", "latest_checkpointed_iteration.txt"
_OF_TRAINER = re.compile(r"checkpoint-(\d+)")
# What rank 0 of Trainer and accelerate writes before their last file.
_BEFORE = re.compile(
    r"(pytorch_)?model.*\.(safetensors|bin|json)|adapter_model\..*|optimizer(_\d+)?\.(pt|bin)|"
    r"scheduler(_\d+)?\.(pt|bin)|scaler\.pt|rng_state(_0)?\.pth"
)
_PART = re.compile(r"pytorch_model(_fsdp)?(_\d+)?|optimizer_\d+|weights")
"""Directories that are part of a checkpoint of accelerate, Trainer or NeMo."""
_SHARD = re.compile(r"(^|[-_.])(mp|pp|tp|dp|ep)?_?(rank|shard|part)[-_]?\d|[-_]of[-_]\d", re.I)
_OPTIMIZER_FILE = re.compile(r"(optim|opt|sched|scaler|rng|ema)[a-z]*([-_.\d]|$)", re.I)
_UNFINISHED = re.compile(r"(^|[-_.])(tmp|temp|partial|unfinished|incomplete)([-_.\d]|$)", re.I)
_OF_ACCELERATE = re.compile(r"(random_states|custom_checkpoint)_\d+\.pkl|.*\.bin")
_SAVED_BY_TORCH = (".pt", ".pth", ".pth.tar", ".pt.tar", ".ckpt")
_BEST = re.compile(r"(^|[-_.\d])best", re.I)
# In the pickle of a whole training: names of parameters, beside the optimizer's weight_decay; what
# Lightning 2.6 dumps (trainer/connectors/checkpoint_connector.py, dump_checkpoint).
_PARAMETER = re.compile(rb"weight(?!_decay|s_only)|bias\b|embed|kernel")
_LIGHTNING = re.compile(rb"pytorch-lightning_version")
_GLOBAL_STEP = re.compile(rb"global_step(?:q.|r.{4}|\x94)(?:K(.)|M(..)|J(.{4}))", re.DOTALL)
_STEP = re.compile(r"(?:global_?step|steps?|iter(?:ation)?s?)[-_=]?(\d+)", re.I)


class Place(NamedTuple):
    """A directory in which a script may save."""

    path: Path
    copy: Path | None = None
    """The project of which it is a copy: what is there in the same words is not the script's."""


class Life(NamedTuple):
    """When an attempt began, and when it last showed life, by the clock of its files."""

    start: float
    end: float


class Found(NamedTuple):
    """A checkpoint."""

    path: Path
    step: int | None
    """None: its name does not tell."""
    time: float
    """When it was complete."""
    form: str
    """Who writes such a checkpoint."""

    def __str__(self) -> str:
        return f"{self.path.name} of {self.form}"


class _Candidate(NamedTuple):
    """What may be a checkpoint, before anything is read."""

    found: Found
    whole: Callable[[], Found | None]
    """Return it, if it is complete."""
    mark: Path
    """The file that tells it from one of the project."""


def newest_whole(
    places: Iterable[Place], pattern: str = "", *, lives: Sequence[Life] = (), workers: int = 0
) -> Found | None:
    """Return the newest whole checkpoint in these places; None if there is none, as far as known.

    With a pattern, of paths relative to a place, only what it matches counts. `lives` are those of
    the attempts, the oldest first; `workers` is how many write.
    """
    found: list[tuple[bool, float, int, _Candidate]] = []
    for place in places:
        for each in _candidates(place, pattern, lives, workers):
            if place.copy is None or not same(each.mark, place.copy / _below(each.mark, place)):
                best = bool(_BEST.search(each.found.path.name))
                step = -1 if each.found.step is None else each.found.step
                found.append((not best, each.found.time, step, each))
    found.sort(key=lambda one: one[:3], reverse=True)
    complete = (one.whole() for *_, one in found[:_MOST_CHECKED])
    return next(filter(None, complete), None)


def is_torn(path: Path) -> bool:
    """Check whether a directory, or a file, shows that its writer has not come to its end."""
    if not path.is_dir():
        return whole.is_whole(path) is False
    named = _entries(path)
    distributed = any(name.endswith(".distcp") for name in named)
    return (distributed and _INDEX not in named) or any(
        whole.is_whole(path / name) is False
        for name, entry in named.items()
        if name.endswith((*_SAVED_BY_TORCH, ".safetensors")) and _is_file(entry)
    )


def walk(directory: Path) -> Iterator[tuple[Path, dict[str, os.DirEntry[str]], list[str]]]:
    """Yield the directories below one, the upper ones first, each with its entries by name.

    The third is the names of the directories to go on with: the caller may remove some.
    """
    todo, seen = [(directory, 0)], 0
    while todo and not directory.is_symlink():
        here, depth = todo.pop(0)
        try:
            with os.scandir(here) as entries:
                named = {entry.name: entry for entry in islice(entries, _MOST_ENTRIES - seen)}
        except OSError:
            continue
        seen += len(named)
        below = [
            name
            for name, entry in named.items()
            if not name.startswith(".") and name not in _NO_RESULTS and _is_directory(entry)
        ]
        yield here, named, below
        if depth < _DEEPEST:
            todo += [(here / name, depth + 1) for name in sorted(below)]


def same(path: Path, ours: Path) -> bool:
    """Check whether a file came with the project, byte for byte."""
    try:
        if path.stat().st_size != ours.stat().st_size:
            return False
        with open_file(path) as one, open_file(ours) as other:
            for _ in range(0, _COMPARED_BYTES, 1 << 20):
                some = one.read(1 << 20)
                if some != other.read(1 << 20):
                    return False
                if not some:
                    return True
    except OSError:
        pass
    return False


def _below(path: Path, place: Place) -> Path:
    return path.relative_to(place.path)


def _candidates(
    place: Place, pattern: str, lives: Sequence[Life], workers: int
) -> Iterator[_Candidate]:
    for here, named, below in walk(place.path):
        if pattern:
            yield from _matched(place.path, here, named, pattern, lives)
            continue
        # The directory that a script has for its checkpoints may be one itself.
        if here != place.path or place.copy is None:
            own = list(_directory(here, named, lives, workers))
            if own or _STATE in named or _RANDOM in named or _OF_TRAINER.fullmatch(here.name):
                below.clear()  # its parts are no checkpoints
                yield from own
                continue
        yield from _pointed(here, named, below, workers)
        for entry in named.values():
            yield from _file(here, entry)


def _directory(
    here: Path, named: Mapping[str, os.DirEntry[str]], lives: Sequence[Life], workers: int
) -> Iterator[_Candidate]:
    """Yield a directory that is a checkpoint as a whole, whether or not it is complete."""
    if _UNFINISHED.search(here.name):
        return
    of_trainer = _OF_TRAINER.fullmatch(here.name)
    if _STATE in named and of_trainer:
        # transformers 4.57, Trainer._save_checkpoint: the state, by rank 0, after all but the
        # random states of other ranks, without which it starts all the same.
        found = Found(here, int(of_trainer[1]), _time(named[_STATE]), "Trainer")
        check = _if(
            found,
            lambda: whole.ends_as_json(here / _STATE),
            lambda: _precede(named, _STATE, _BEFORE),
            lambda: _parts_are_whole(here, named, workers),
        )
        yield _Candidate(found, check, here / _STATE)
    elif _RANDOM in named:
        # accelerate 1.15, save_accelerator_state: the random states after model, optimizers and
        # schedulers; only what register_for_checkpointing has named follows (save_state).
        step = int(of_trainer[1]) if of_trainer else _step_in(here.name)
        found = Found(here, step, _time(named[_RANDOM]), "accelerate")
        check = _if(
            found,
            lambda: _precede(named, _RANDOM, _BEFORE),
            lambda: _parts_are_whole(here, named, workers),
            lambda: _customs_are_there(here, named, lives),
        )
        yield _Candidate(found, check, here / _RANDOM)
    elif _INDEX in named and not _PART.fullmatch(here.name):
        yield from _distributed(here, named)
    elif here.name.endswith(".ckpt") and _LATEST in named:
        # lightning 2.6, DeepSpeedStrategy.save_checkpoint: one tag in a directory of its own.
        found = Found(here, _step_in(here.name), _time(named[_LATEST]), "Lightning")
        check = _if(found, lambda: _deepspeed_is_whole(here, named, workers))
        yield _Candidate(found, check, here / _LATEST)


def _distributed(here: Path, named: Mapping[str, os.DirEntry[str]]) -> Iterator[_Candidate]:
    """Yield a checkpoint of torch.distributed.checkpoint, such as torchtitan's step-N."""
    # torch 2.9, FileSystemWriter.finish: .metadata comes by a rename, once all ranks have written.
    # In a directory that is used again the old one lies there meanwhile.
    data = re.compile(r".*\.distcp")
    if not any(data.fullmatch(name) for name in named):
        return
    mark, form = _INDEX, "torch.distributed.checkpoint"
    needs_rest = here.name.endswith(_SAVED_BY_TORCH)
    if needs_rest or "meta.pt" in named:
        # lightning 2.6, FSDPStrategy.save_checkpoint of both: meta.pt, by rank 0, comes last.
        mark, form = "meta.pt", "Lightning"
    if mark not in named:
        return

    def check() -> bool:
        if not _precede(named, _INDEX, data):
            return False
        return mark == _INDEX or (
            _precede(named, mark, re.compile(re.escape(_INDEX))) and whole.is_whole_zip(here / mark)
        )

    step = _step_in(here.name, here.parent.name)
    found = Found(here, step, _time(named[mark]), form)
    yield _Candidate(found, _if(found, check), here / _INDEX)


def _pointed(
    here: Path, named: Mapping[str, os.DirEntry[str]], below: list[str], workers: int
) -> Iterator[_Candidate]:
    """Yield the directory in which a file names the newest checkpoint.

    DeepSpeed's load_checkpoint and Megatron's --load take this directory.
    """
    if _LATEST in named and (tag := _word(here / _LATEST)) in below and tag != "checkpoint":
        inside = _entries(here / tag)
        if any(name.endswith("_model_states.pt") for name in inside):
            below.remove(tag)
            if not _PART.fullmatch(tag):
                found = Found(here, _step_in(tag), _time(named[_LATEST]), "DeepSpeed")
                check = _if(found, lambda: _deepspeed_is_whole(here, named, workers))
                yield _Candidate(found, check, here / _LATEST)
    # Other tags of DeepSpeed are older, or not complete.
    for name in [name for name in below if re.fullmatch(r"global_step\d+", name)]:
        below.remove(name)
    iteration = _word(here / _ITERATION) if _ITERATION in named else ""
    for name in [name for name in below if re.fullmatch(r"iter_\d{7,}", name)]:
        below.remove(name)
        if iteration.isdecimal() and name == f"iter_{int(iteration):07d}":
            # Megatron-LM, megatron/training/checkpointing.py, save_checkpoint: the number, by rank
            # 0, after a barrier, or at the end of an asynchronous save.
            found = Found(here, int(iteration), _time(named[_ITERATION]), "Megatron")
            is_whole = partial(_megatron_is_whole, here / name, here / _ITERATION)
            yield _Candidate(found, _if(found, is_whole), here / _ITERATION)


def _file(here: Path, entry: os.DirEntry[str]) -> Iterator[_Candidate]:
    """Yield a file in which torch.save has written a model with its optimizer.

    Such a file is often replaced in place: its end shows whether it is complete. Weights alone and
    the parts of a checkpoint in several files are none.
    """
    name = entry.name
    if not name.endswith(_SAVED_BY_TORCH) or name.startswith(".") or not _is_file(entry):
        return
    if _SHARD.search(name) or _SHARD.search(here.name) or _UNFINISHED.search(name):
        return
    if _OPTIMIZER_FILE.match(name):
        return
    path = here / name
    found = Found(path, _step_in(name, here.name), _time(entry), "torch.save")
    yield _Candidate(found, partial(_if_training_state, found), path)


def _if_training_state(found: Found) -> Found | None:
    """Return a whole file of torch.save if it has a model and its optimizer."""
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


def _matched(
    root: Path,
    here: Path,
    named: Mapping[str, os.DirEntry[str]],
    pattern: str,
    lives: Sequence[Life],
) -> Iterator[_Candidate]:
    """Yield what a user's pattern matches."""
    wanted = pattern.removeprefix("./").rstrip("/").split("/")
    parts = here.relative_to(root).parts
    if len(parts) != len(wanted) - 1 or not _fit(parts, wanted):
        return
    fits = {n: e for n, e in named.items() if fnmatch.fnmatchcase(n, wanted[-1])}
    newest = max((_changed(here / n, e) for n, e in fits.items()), default=0.0)
    for name, entry in fits.items():
        if entry.is_symlink() or _UNFINISHED.search(name):
            continue
        path, changed = here / name, _changed(here / name, entry)
        last = changed >= newest and not _outlived(changed, lives)

        found = Found(path, _step_in(name, here.name), changed, f"the pattern {pattern}")
        yield _Candidate(found, _if(found, partial(_tells, path, otherwise=not last)), path)


def _fit(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    return all(map(fnmatch.fnmatchcase, parts, wanted))


def _tells(path: Path, *, otherwise: bool) -> bool:
    """Check whether a file or directory is complete; `otherwise`, if it does not tell."""
    if not path.is_dir():
        told = whole.is_whole(path)
        return otherwise if told is None else told
    named = _entries(path)
    if own := list(_directory(path, named, (), 0)):
        return all(each.whole() for each in own)
    if any(name.endswith(".distcp") for name in named) and _INDEX not in named:
        return False
    parts = (whole.is_whole(path / name) for name, entry in named.items() if _is_file(entry))
    return otherwise and False not in parts


def _precede(named: Mapping[str, os.DirEntry[str]], last: str, pattern: re.Pattern[str]) -> bool:
    """Check that no file of a pattern is newer than the last one.

    Otherwise the directory is being written again, and the last one is of the time before.
    """
    end = _time(named[last])
    return all(_time(e) <= end for name, e in named.items() if pattern.fullmatch(name))


def _parts_are_whole(
    here: Path, named: Mapping[str, os.DirEntry[str]], workers: int, depth: int = 0
) -> bool:
    """Check all files of a directory that show their end, and of the directories in it."""
    for name, entry in named.items():
        if _is_file(entry):
            torch = name.endswith(_SAVED_BY_TORCH) or _OF_ACCELERATE.fullmatch(name)
            known = torch or name.endswith(".safetensors")
            if known and not whole.is_whole(here / name):
                return False
        elif _is_directory(entry) and depth < 2:
            inside = _entries(here / name)
            if any(each.endswith(".distcp") for each in inside) and _INDEX not in inside:
                return False
            if not _parts_are_whole(here / name, inside, workers, depth + 1):
                return False
    if any(name.startswith("global_step") and _is_directory(e) for name, e in named.items()):
        return _LATEST in named and _deepspeed_is_whole(here, named, workers)
    return True


def _customs_are_there(
    here: Path, named: Mapping[str, os.DirEntry[str]], lives: Sequence[Life]
) -> bool:
    """Check for the objects of the script that accelerate writes last of all.

    Their number is known from the checkpoints beside this one; without one the run must have gone
    on for a while.
    """
    count = _customs(named)
    others = [_entries(here.parent / name) for name in _siblings(here) if name != here.name]
    known = [_customs(other) for other in others if _RANDOM in other]
    newest = max([_time(e) for e in named.values() if _is_file(e)], default=0.0)
    return count >= max(known) if known else _outlived(newest, lives)


def _customs(named: Iterable[str]) -> int:
    return sum(bool(re.fullmatch(r"custom_checkpoint_\d+\.pkl", name)) for name in named)


def _deepspeed_is_whole(here: Path, named: Mapping[str, os.DirEntry[str]], workers: int) -> bool:
    """Check a checkpoint of DeepSpeed 0.19: engine.py, save_checkpoint.

    Rank 0 writes the file `latest` last, but waits for the other ranks only then: all files must be
    whole, and as many as there are ranks, or as in another checkpoint.
    """
    tag = _word(here / _LATEST)
    inside = _entries(here / tag) if tag and "/" not in tag else {}
    models = [name for name in inside if name.endswith("_model_states.pt")]
    if not models:
        return False
    end = _time(named[_LATEST])
    if any(_time(inside[name]) > end for name in models if "rank_00_model" in name):
        return False
    shards = _shards(inside)
    others = {_shards(_entries(here / name)) for name in named if name != tag}
    if shards and shards not in {workers, *others}:
        return False
    files = [here / tag / name for name in inside if name.endswith(".pt")]
    return all(whole.is_whole_zip(file) for file in files)


def _shards(named: Iterable[str]) -> int:
    return sum(name.endswith("_optim_states.pt") for name in named)


def _megatron_is_whole(place: Path, tracker: Path) -> bool:
    inside = _entries(place)
    if any(name.endswith(".distcp") for name in inside):
        if _INDEX not in inside:
            return False
        if not _precede(inside, _INDEX, re.compile(r".*\.distcp")):
            return False
    try:
        end = tracker.lstat().st_mtime
    except OSError:
        return False
    return (
        bool(inside)
        and _parts_are_whole(place, inside, 0)
        and all(_time(entry) <= end for entry in inside.values() if _is_file(entry))
    )


def _if(found: Found, *checks: Callable[[], bool]) -> Callable[[], Found | None]:
    def complete() -> Found | None:
        path = found.path
        # NeMo 2 has such a file beside a checkpoint until it is complete (nemo/lightning/pytorch/
        # callbacks/model_checkpoint.py).
        begun = f"{path.stem if path.suffix == '.ckpt' else path.name}-unfinished"
        if (path.parent / begun).exists():
            return None
        return found if all(check() for check in checks) else None

    return complete


def _siblings(here: Path) -> list[str]:
    try:
        with os.scandir(here.parent) as entries:
            return [entry.name for entry in islice(entries, _MOST_CHECKED)]
    except OSError:
        return []


def _outlived(changed: float, lives: Sequence[Life]) -> bool:
    """Check whether the attempt that wrote something went on for a while after it."""
    writer = next((life for life in reversed(lives) if life.start <= changed), None)
    return writer is not None and writer.end >= changed + _QUIET_S


def _entries(directory: Path) -> dict[str, os.DirEntry[str]]:
    try:
        if directory.is_symlink():
            return {}
        with os.scandir(directory) as entries:
            return {entry.name: entry for entry in islice(entries, _MOST_ENTRIES)}
    except OSError:
        return {}


def _changed(path: Path, entry: os.DirEntry[str]) -> float:
    """Return when a file, or anything in a directory, last changed."""
    times = [_time(entry)]
    if _is_directory(entry):
        for name, each in _entries(path).items():
            times.append(_time(each))
            if _is_directory(each):
                times += map(_time, _entries(path / name).values())
    return max(times)


def _time(entry: os.DirEntry[str]) -> float:
    with suppress(OSError):
        return entry.stat(follow_symlinks=False).st_mtime
    return 0.0


def _is_directory(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_dir(follow_symlinks=False)
    return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_file(follow_symlinks=False)
    return False


def _word(pointer: Path) -> str:
    """Return the one word of a file; empty if it has no such word."""
    try:
        if pointer.is_symlink():
            return ""
        return read_file(pointer, _POINTER_BYTES).decode().strip()
    except (OSError, ValueError):
        return ""


def _step_in(*names: str) -> int | None:
    """Return the step that the first of these names tells, if one does."""
    for name in names:
        if told := _STEP.findall(name):
            return int(told[-1])
    return None
