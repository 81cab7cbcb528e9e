"""Finds checkpoints in the run of a custom script that, as far as the run knows, loads none.

Such a script may start over at step 0 and overwrite them. A checkpoint that is known to be complete
can be passed to the script. Anything that only looks like a checkpoint counts here too, because it
would be lost.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from trnslurm.config.continuing import (
    OF_ANY,
    OF_FIT,
    OF_HYDRA,
    PASSES,
    parsing,
    python_files,
    sources_of,
    text_of,
)
from trnslurm.config.entry import Entry
from trnslurm.contract.checkpoints import exported, found, newest, saves_in
from trnslurm.contract.entries import same, walk, word_in
from trnslurm.contract.files import read_json
from trnslurm.contract.layouts import Found
from trnslurm.contract.rundir import NODE_SCRIPT
from trnslurm.contract.times import changed_at
from trnslurm.contract.variables import Variable
from trnslurm.contract.whole import is_whole
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import printable
from trnslurm.records.run import RunDir

# What each library writes last into the directory of a checkpoint, as forms.py knows them.
_MARKS = {".metadata", "random_states_0.pkl"}
_OF_TRAINER, _STATE_OF_TRAINER = re.compile(r"checkpoint-\d+"), "trainer_state.json"
# DeepSpeed and Megatron write the name of the newest complete checkpoint to a file next to it.
_POINTERS = {"latest": "{}", "latest_checkpointed_iteration.txt": "iter_{:0>7}"}
_MOST_COMPARED = 16
_FILE = re.compile(
    r".*\.ckpt|.*(ckpt|checkpoint|chkpt|snapshot|last|latest|best|epoch|step|iter|state|model).*"
    r"\.(pt|pth|pth\.tar|pth\.gz|tar)|(\d+)\.(pt|pth)",
    re.IGNORECASE | re.DOTALL,
)
# The option by which the scripts of a library mostly take a checkpoint, unless they have another.
_OPTIONS = {
    "Trainer": "--resume_from_checkpoint", "accelerate": "--resume_from_checkpoint",
    "Lightning": "--ckpt_path", "DeepSpeed": "--load_dir", "Megatron": "--load",
}  # fmt: skip
_OPTION = re.compile(
    rb"""["'](--(?:[\w-]*resume[\w-]*|restart|ckpt[_-]path|load[_-]dir|load))["']"""
)
# --wandb-resume-from-id continues the tracker's run.
_OF_A_TRACKER = re.compile(r"wandb|mlflow|[-_]id\b")
_FLAG = re.compile(rb"""["'](--[\w-]*resume[\w-]*)["'][^()]*\baction=["']store_true["']""")
# By these a script may also begin with other weights: they count if it has none of those.
_LOADS = re.compile(
    rb"""["'](--(?:load|restore)(?:[_-](?:from|path|model|checkpoint|ckpt))+)["']"""
)
_FIT = re.compile(rb"^[^#\n]* fit(?: |$)", re.MULTILINE)
_KEY_OF_HYDRA = re.compile(
    rb"\b(?:cfg|config|conf)\.((?:\w+\.)*(?:resume_(?:from|path|ckpt|checkpoint)\w*|ckpt_path))\b"
)
_FOR_HYDRA = re.compile(rb"(?<=[ '])(?:(?:-c[np]|--config-(?:name|path|dir))[ =]|\+{1,2}[\w.]+=)")


class Unreported(Frozen):
    """The checkpoints that a script has not reported, as paths in the run, newest first."""

    paths: tuple[str, ...]
    whole: Found | None = None
    """The newest complete checkpoint."""
    option: str = ""
    """The option with which the script loads it, or empty if the project has none."""
    finds: bool = False
    """Whether the option has no value: the script then finds its own checkpoints."""

    @property
    def newest(self) -> str:
        return printable(self.paths[0])

    def __str__(self) -> str:
        return self.newest + (f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else "")

    @property
    def words(self) -> str:
        """Return the arguments for `trnslurm resume`, which are added to the script's arguments."""
        if self.finds:  # its run does not know that it continues
            return f"--force -- {self.option}"
        option = self.option or "OPTION"
        return f"-- {option}{'' if option.endswith('=') else ' '}{{resume}}"


def unreported(run: RunDir, *, takes: bool | None = None) -> Unreported | None:
    """Return the checkpoints that a run's next attempt would not load, but may overwrite.

    Return None if there are none, if the run knows how its script continues, or if `takes` says
    that the script loads one. If the script uses {resume}, the directory {checkpoints} counts too,
    whatever it contains.
    """
    if not run.project_file.exists() or newest(run, takes=takes) is not None:
        return None
    work, place = run.path / "work", saves_in(run)
    wrote = bool(changed_at(place))
    if wrote and exported(run, Variable.RESUMES) == "looks":
        return None
    left: dict[str, float] = {}
    inside = place.is_relative_to(run.path) and ".." not in place.parts
    for each in {work, place} if inside else {work}:
        for path in _traces(each):
            name = path.relative_to(run.path)
            with suppress(OSError):  # the script has deleted it
                if not _is_copy(path, run.code / "project" / Path(*name.parts[1:])):
                    left[str(name)] = path.lstat().st_mtime
    ordered = sorted(left, key=lambda name: left[name], reverse=True)
    if not ordered and wrote and b'"$TRNSLURM_RESUME"' in text_of(run.path / NODE_SCRIPT):
        ordered = [str(place.relative_to(run.path))]
    if whole := found(run):
        first = str(whole.path.relative_to(run.path))
        below = f"{first}/"
        ordered = [first, *(name for name in ordered if not f"{name}/".startswith(below))]
    if not ordered:
        return None
    option = _option_of(run, _OPTIONS.get(whole.form, "--resume")) if whole else ""
    flag = "" if option else next(iter(_flags_of(_sources(run))), "")
    return Unreported(paths=tuple(ordered), whole=whole, option=option or flag, finds=bool(flag))


def _flags_of(texts: list[bytes]) -> list[str]:
    """Return the options without a value that make a script continue."""
    return [name.decode() for text in texts for name in _FLAG.findall(text)]


def _sources(run: RunDir) -> list[bytes]:
    """Return the source files that may parse the arguments of a run's script."""
    entry, project = Entry(str(read_json(run.project_file).get("entry", ""))), run.code / "project"
    own, others = sources_of(entry, project)
    return parsing(own, others) if own or entry.is_file else []


def _option_of(run: RunDir, usual: str) -> str:
    """Return the option with which a run's script loads a checkpoint, or empty if there is none.

    A program that this machine does not have has its library's usual option. Lightning has one only
    for its own command line.
    """
    texts, command = _sources(run), text_of(run.path / NODE_SCRIPT)
    if any(map(OF_HYDRA.search, texts)) or (not texts and _FOR_HYDRA.search(command)):
        if keys := Counter(key.decode() for text in texts for key in _KEY_OF_HYDRA.findall(text)):
            return f"++{keys.most_common(1)[0][0]}="
        return f"++{usual.lstrip('-')}=" if usual == _OPTIONS["Lightning"] else ""
    if not texts:
        return usual if _FIT.search(command) or usual != _OPTIONS["Lightning"] else ""
    options = [name.decode() for text in texts for name in _OPTION.findall(text)]
    flags = _flags_of(texts)
    options = [name for name in options if name not in flags and not _OF_A_TRACKER.search(name)]
    options = options or [name.decode() for text in texts for name in _LOADS.findall(text)]
    if not options and any(map(OF_ANY.search, texts)):
        # The parser knows the option of any Trainer, and trainer.train() without it begins anew.
        passes = any(map(PASSES.search, (*texts, *python_files(run.code / "project"))))
        return _OPTIONS["Trainer"] if passes else ""
    if not options and any(map(OF_FIT.search, texts)):
        return _OPTIONS["Lightning"] if _FIT.search(command) else ""
    return usual if usual in options else next(iter(options), "")


def _traces(directory: Path) -> Iterator[Path]:
    """Yield paths below a directory that look like checkpoints and are not visibly cut off."""
    for here, named, below in walk(directory):
        of_trainer = _STATE_OF_TRAINER in named and _OF_TRAINER.fullmatch(here.name)
        if here != directory and (of_trainer or _MARKS & named.keys()):
            below.clear()
            yield here
            continue
        for pointer, name in _POINTERS.items():
            target = name.format(word_in(here / pointer)) if pointer in named else ""
            if target in below:
                yield here / target
        for entry in named.values():
            if _FILE.fullmatch(entry.name) and _is_trace(entry):
                yield here / entry.name


def _is_copy(path: Path, ours: Path) -> bool:
    """Check whether a file, or each file of a directory, is identical to the project's."""
    if not path.is_dir():
        return same(path, ours)
    files = (here / name for here, named, _ in walk(path) for name in named)
    some = [*islice((file for file in files if file.is_file()), _MOST_COMPARED)]
    return bool(some) and all(same(file, ours / file.relative_to(path)) for file in some)


def _is_trace(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file(follow_symlinks=False) and is_whole(Path(entry.path)) is not False
    except OSError:
        return False
