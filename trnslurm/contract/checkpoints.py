"""The checkpoints of a run: their names, and the newest one.

A custom script reports its own checkpoints with `trnslurm.saved`, in saved.json or by a name. If a
script does not report any, they are found on demand by what its library writes (forms.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trnslurm.contract.files import read_file, read_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable

if TYPE_CHECKING:
    from trnslurm.contract.layouts import Found, Life

CHECKPOINT_FORMAT = 1
_MOST_ATTEMPTS = 100
_OF_DIRECTORIES = ("DeepSpeed", "Megatron")
"""Formats whose checkpoints are used together with a directory that names the newest one."""
_STEP = r"step-([0-9]{8,})"
_REMOVED = rf"{_STEP}(\.tmp-[0-9]+)?\.removed-[0-9]+"


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint; only a complete checkpoint has this name."""
    return f"step-{step:08d}"


def export_name(step: int) -> str:
    """Return the name of the folder to which a step's checkpoint is exported."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name, or None for any other name."""
    match = re.fullmatch(_STEP, name)
    return int(match[1]) if match else None


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, newest first; empty if the directory is missing."""
    try:
        found = [path for path in directory.iterdir() if step_of(path.name) is not None]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: step_of(path.name) or 0, reverse=True)


def newest_in(directory: Path) -> int:
    """Return the step of the newest checkpoint by name, or 0 if there is no readable one."""
    try:
        return max((step_of(path.name) or 0 for path in checkpoints_in(directory)), default=0)
    except OSError:
        return 0


class Newest(NamedTuple):
    """The newest checkpoint of a run."""

    path: Path
    step: int
    """The step, or 0 if unknown."""
    form: str = ""
    """The library that wrote it; empty if the script reported it."""
    time: float = 0.0
    """When it was complete; 0 if the script reported it."""

    @property
    def is_alone(self) -> bool:
        """Check whether its path contains only this checkpoint, and its name contains the step."""
        return not self.form or (self.step > 0 and self.form not in _OF_DIRECTORIES)

    @property
    def name(self) -> str:
        """Return a description of the checkpoint."""
        return f"{self.path.name} of {self.form}" if self.form else f"step {self.step}"


def newest(run: RunFiles, *, takes: bool | None = None) -> Newest | None:
    """Return the newest checkpoint, from which the next attempt starts, or None.

    A checkpoint that the script has reported takes precedence. Otherwise checkpoints found on disk
    count, but only if the run (or `takes`) says that the script accepts a checkpoint: another
    script could start at step 0 and overwrite it.
    """
    told = _reported(run)
    if not run.project_file.exists():
        return told
    saved = read_json(run.saved_file)
    calls = saved and saved.get("attempt") != 0  # the mirror fetches as attempt 0
    if (calls and told) or not (takes_checkpoint(run) if takes is None else takes):
        return told
    since = _changed(run.saved_file) if saved else 0.0
    seen = found(run)
    if seen is None or (told and seen.time <= since):
        return told
    if told and not saved and told.path not in (seen.path, *seen.path.parents):
        return told  # by its name, which the script gives to complete ones
    return Newest(seen.path, seen.step or 0, seen.form, seen.time)


def newest_step(run: RunFiles) -> int:
    """Return the step of the newest checkpoint, or 0 if there is no readable one."""
    step = reported_step(run)
    if step or not run.project_file.exists():
        return step
    one = newest(run)
    return one.step if one else 0


def reported_step(run: RunFiles) -> int:
    """Return the newest step that training itself has reported as saved, or 0."""
    return max(_newest_named(run), _step_in(read_json(run.saved_file)))


def has_saved(run: RunFiles) -> bool:
    """Check whether a run has a checkpoint, even if only its step was reported."""
    return newest_step(run) > 0 or newest(run) is not None


def newest_checkpoint(run: RunFiles) -> Path | None:
    """Return the path of the newest checkpoint, or None if there is none."""
    one = newest(run)
    return one.path if one else None


def found(run: RunFiles) -> Found | None:
    """Return the newest complete checkpoint that a custom script has left, reported or not."""
    return next(_left_in(run), None)


def whole_steps(run: RunFiles) -> list[tuple[int, Path]]:
    """Return the steps and paths of a run's checkpoints whose steps are known, oldest first.

    A directory that only points to its newest checkpoint is not a checkpoint itself: DeepSpeed's
    and Megatron's.
    """
    if not run.project_file.exists():
        return [(step_of(path.name) or 0, path) for path in checkpoints_in(run.checkpoints)][::-1]
    found = {
        one.step: one.path
        for one in _left_in(run)
        if one.step is not None and one.form not in _OF_DIRECTORIES
    }
    from trnslurm.contract.forms import is_torn

    with suppress(OSError):
        named = [path for path in checkpoints_in(run.checkpoints) if not is_torn(path)]
        found |= {step_of(path.name) or 0: path for path in named}
    if (told := _reported(run)) and told.step:
        found |= _named_alike(told.path, told.step) | {told.step: told.path}
    return sorted(found.items())


def _named_alike(path: Path, step: int) -> dict[int, Path]:
    """Return the older checkpoints next to a reported one, if their names contain the steps."""
    from trnslurm.contract.forms import is_torn

    parts = re.split(rf"(?<!\d)0*{step}(?!\d)", path.name, maxsplit=1)
    if len(parts) == 1:
        return {}
    alike = re.compile("([0-9]+)".join(map(re.escape, parts)))
    with suppress(OSError):
        return {
            int(match[1]): other
            for other in path.parent.iterdir()
            if (match := alike.fullmatch(other.name))
            and int(match[1]) < step
            and not is_torn(other)
        }
    return {}


def superseded(run: RunFiles, keep: int) -> list[Path]:
    """Return the older checkpoints that a custom script has left in its run, beyond `keep`."""
    from trnslurm.contract import forms

    return forms.older([*_left_in(run)], keep)


def _left_in(run: RunFiles) -> Iterator[Found]:
    """Yield the complete checkpoints that a custom script has left, newest first."""
    from trnslurm.contract import forms  # a script that reports does not have to wait for it

    work, place = run.path / "work", saves_in(run)
    places = [forms.Place(work, run.code / "project")]
    inside = place.is_relative_to(run.path) and ".." not in place.parts
    if inside and not place.is_relative_to(work):
        places.append(forms.Place(place))
    return forms.whole_ones(
        places,
        exported(run, Variable.CHECKPOINT_GLOB),
        lives=_lives(run),
        workers=_workers(run),
    )


def takes_checkpoint(run: RunFiles) -> bool:
    """Check whether a custom script accepts a checkpoint argument, or looks for its own."""
    return exported(run, Variable.RESUMES) != ""


def saves_in(run: RunFiles) -> Path:
    """Return where training saves. With the key `checkpoints`, a custom script saves in work/.

    The batch script sets the directory. Without the script or the key, it is checkpoints/.
    """
    place = exported(run, Variable.CHECKPOINTS)
    return run.path / place.removeprefix("$PWD/") if place else run.checkpoints


def exported(run: RunFiles, name: str) -> str:
    """Return the value that a training batch script assigns to a variable, or ""."""
    try:
        script = read_file(run.script("train")).decode(errors="surrogateescape")
    except OSError:
        return ""
    return exported_in(script, name)


def exported_in(script: str, name: str) -> str:
    """Return the value that a batch script gives to a variable; empty without one."""
    _, _, rest = script.partition(f"\nexport {name}=")
    words = shlex.shlex(rest, posix=True)
    words.whitespace_split, words.commenters = True, ""
    try:
        return (words.get_token() if rest[:1].strip() else "") or ""
    except ValueError:  # no closing quotation
        return ""


def _reported(run: RunFiles) -> Newest | None:
    saved = read_json(run.saved_file)
    path, step, own = saved.get("path"), _step_in(saved), _newest_named(run)
    if isinstance(path, str) and path and step >= own and Path(path).exists():
        return Newest(Path(path), step)
    return Newest(run.checkpoints / checkpoint_name(own), own) if own else None


def _newest_named(run: RunFiles) -> int:
    """Return the step of the newest checkpoint by name, or 0 if there is none.

    A custom script may use the name for a checkpoint that is still being written.
    """
    if not run.project_file.exists():
        return newest_in(run.checkpoints)
    try:
        paths = checkpoints_in(run.checkpoints)
    except OSError:
        return 0
    if not paths:
        return 0
    from trnslurm.contract.forms import is_torn

    return next((step_of(path.name) or 0 for path in paths if not is_torn(path)), 0)


def _lives(run: RunFiles) -> list[Life]:
    """Return when each attempt began, and when it last wrote its state or showed life."""
    from trnslurm.contract.layouts import Life
    from trnslurm.contract.times import seconds_of

    found: list[Life] = []
    numbers = sorted(run.attempt_numbers("train"))[-_MOST_ATTEMPTS:]
    for number in numbers:
        file = run.state_file("train", number)
        start = seconds_of(str(read_json(file).get("started")))
        if start is not None:
            beat = _changed(run.heartbeat_file) if number == numbers[-1] else 0.0
            found.append(Life(start, max(_changed(file), beat)))
    return found


def _workers(run: RunFiles) -> int:
    plan = read_json(run.plan_file)
    batch = plan.get("batch")
    workers = plan.get("workers", batch.get("workers") if isinstance(batch, dict) else 0)
    return workers if isinstance(workers, int) else 0


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _step_in(saved: dict[str, Any]) -> int:
    step = saved.get("step")
    return step if isinstance(step, int) and step > 0 else 0


def temporary_name(step: int, attempt: int) -> str:
    """Return the name of a checkpoint that an attempt is writing or died writing."""
    return f"{checkpoint_name(step)}.tmp-{attempt}"


def writer_of(name: str) -> int | None:
    """Return the attempt number in a checkpoint's temporary name, or None for any other name."""
    match = re.fullmatch(rf"{_STEP}\.tmp-([0-9]+)", name)
    return int(match[2]) if match else None


def removed_name(name: str, attempt: int) -> str:
    """Return the name of a checkpoint that an attempt is deleting."""
    return f"{name}.removed-{attempt}"


def is_removed(name: str) -> bool:
    """Check whether a checkpoint with this name is being deleted."""
    return re.fullmatch(_REMOVED, name) is not None


def damaged_name(name: str, attempt: int) -> str:
    """Return the name under which an attempt keeps a damaged checkpoint for inspection."""
    return f"{name}.damaged-{attempt}"
