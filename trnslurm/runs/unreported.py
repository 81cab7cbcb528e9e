"""Finds the checkpoints that a custom script left in its run without reporting them.

Such a script may begin again at step 0 and write over them. Files are recognized by their names
and by what each library writes last; nothing in them is loaded, and no link is followed.
"""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from trnslurm.contract.checkpoints import newest_checkpoint, saves_in
from trnslurm.contract.files import open_file, read_file
from trnslurm.contract.rundir import NODE_SCRIPT
from trnslurm.contract.times import changed_at
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import printable
from trnslurm.records.run import RunDir

# What each library writes last into the directory of a checkpoint:
# - transformers 4.57's Trainer: trainer_state.json, also of the whole run next to checkpoint-N.
# - torch.distributed.checkpoint (torchtitan, Lightning, NeMo): .metadata, by a rename, torch 2.9.
# - accelerate 1.12's save_state: the random states of each process.
_MARKS = {".metadata", "random_states_0.pkl"}
_OF_TRAINER, _STATE_OF_TRAINER = re.compile(r"checkpoint-\d+"), "trainer_state.json"
# DeepSpeed and Megatron write the name of the newest complete checkpoint to a file next to it.
_POINTERS = {"latest": "{}", "latest_checkpointed_iteration.txt": "iter_{:0>7}"}
_POINTER_BYTES = 256
_FILE = re.compile(
    r".*\.ckpt|.*(ckpt|checkpoint|chkpt|snapshot|last|latest|best|epoch|step|iter|state|model).*"
    r"\.(pt|pth|pth\.tar|pth\.gz|tar)|(\d+)\.(pt|pth)",
    re.IGNORECASE | re.DOTALL,
)
_ZIP_BEGINS, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_ZIP_END_BYTES = 22 + (64 << 10)  # with the longest comment
_DEEPEST, _MOST_ENTRIES = 8, 20_000
_NO_RESULTS = {"wandb", "mlruns", "node_modules", "__pycache__", "site-packages"}


class Unreported(Frozen):
    """The checkpoints that a script has not reported: paths in the run, the newest first."""

    paths: tuple[str, ...]

    @property
    def newest(self) -> str:
        return printable(self.paths[0])

    def __str__(self) -> str:
        return self.newest + (f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else "")


def unreported(run: RunDir) -> Unreported | None:
    """Return the checkpoints that a run's next attempt would not begin with, but may replace.

    None: there are none, or the run knows how its script continues. Of a script with {resume} the
    directory {checkpoints} counts, too, whatever is in it.
    """
    if not run.project_file.exists() or newest_checkpoint(run) is not None:
        return None
    work, place = run.path / "work", saves_in(run)
    wrote = bool(changed_at(place))
    if wrote and _says(run.script("train"), b"TRNSLURM_RESUMES=looks"):
        return None
    found: dict[str, float] = {}
    inside = place.is_relative_to(run.path) and ".." not in place.parts
    for each in {work, place} if inside else {work}:
        for path in _whole(each):
            name = path.relative_to(run.path)
            with suppress(OSError):  # the script has deleted it
                if not _same(path, run.code / "project" / Path(*name.parts[1:])):
                    found[str(name)] = path.lstat().st_mtime
    newest = sorted(found, key=lambda name: found[name], reverse=True)
    if not newest and wrote and _says(run.path / NODE_SCRIPT, b'"$TRNSLURM_RESUME"'):
        newest = [str(place.relative_to(run.path))]
    return Unreported(paths=tuple(newest)) if newest else None


def _says(script: Path, words: bytes) -> bool:
    try:
        return words in read_file(script)
    except OSError:
        return False


def _whole(directory: Path) -> Iterator[Path]:
    """Yield the whole checkpoints below a directory."""
    todo, seen = [(directory, 0)], 0
    while todo and not directory.is_symlink():
        place, depth = todo.pop()
        try:
            with os.scandir(place) as entries:
                names = {entry.name: entry for entry in islice(entries, _MOST_ENTRIES - seen)}
        except OSError:
            continue
        seen += len(names)
        of_trainer = _STATE_OF_TRAINER in names and _OF_TRAINER.fullmatch(place.name)
        if place != directory and (of_trainer or _MARKS & names.keys()):
            yield place
            continue
        for pointer, name in _POINTERS.items():
            target = name.format(_word(place / pointer)) if pointer in names else ""
            if target in names and names[target].is_dir(follow_symlinks=False):
                yield place / target
        for entry in names.values():
            if entry.is_dir(follow_symlinks=False):
                hidden = entry.name.startswith(".") or entry.name in _NO_RESULTS
                if depth < _DEEPEST and not hidden:
                    todo.append((place / entry.name, depth + 1))
            elif _FILE.fullmatch(entry.name) and _is_whole(place / entry.name):
                yield place / entry.name


def _word(pointer: Path) -> str:
    try:
        return read_file(pointer, _POINTER_BYTES).decode().strip()
    except (OSError, ValueError):
        return ""


def _is_whole(file: Path) -> bool:
    """Check whether a file has its end, as far as known: zip files, torch's since 1.6, mark it."""
    try:
        if file.is_symlink():
            return False
        with open_file(file) as stream:
            begins = stream.read(len(_ZIP_BEGINS))
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _ZIP_END_BYTES))
            return _ZIP_END in stream.read() if begins == _ZIP_BEGINS else bool(begins)
    except OSError:
        return False


def _same(path: Path, ours: Path) -> bool:
    """Check whether a file came with the project."""
    try:
        return path.is_file() and filecmp.cmp(path, ours, shallow=False)
    except OSError:
        return False
