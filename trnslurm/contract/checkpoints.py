"""The checkpoints of a run: their names, and the newest."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from trnslurm.contract.files import read_file, read_json
from trnslurm.contract.rundir import RunFiles

CHECKPOINT_FORMAT = 1
_STEP = r"step-([0-9]{8,})"
_REMOVED = rf"{_STEP}(\.tmp-[0-9]+)?\.removed-[0-9]+"


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint; only a complete checkpoint has this name."""
    return f"step-{step:08d}"


def export_name(step: int) -> str:
    """Return the name of the folder to which a step's checkpoint is exported."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name; None for any other name."""
    match = re.fullmatch(_STEP, name)
    return int(match[1]) if match else None


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, newest first; empty if there is no directory."""
    try:
        found = [path for path in directory.iterdir() if step_of(path.name) is not None]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: step_of(path.name) or 0, reverse=True)


def newest_in(directory: Path) -> int:
    """Return the step of the newest checkpoint by name; 0 if there is none, or none is readable."""
    try:
        return max((step_of(path.name) or 0 for path in checkpoints_in(directory)), default=0)
    except OSError:
        return 0


def newest_step(run: RunFiles) -> int:
    """Return the step of the newest checkpoint; 0 if there is none, or none is readable."""
    return max(newest_in(run.checkpoints), _step_in(read_json(run.saved_file)))


def newest_checkpoint(run: RunFiles) -> Path | None:
    """Return the path of the newest checkpoint; None if there is none."""
    saved = read_json(run.saved_file)
    path, own = saved.get("path"), newest_in(run.checkpoints)
    if isinstance(path, str) and path and _step_in(saved) >= own and Path(path).exists():
        return Path(path)
    return run.checkpoints / checkpoint_name(own) if own else None


def saves_in(run: RunFiles) -> Path:
    """Return where a training saves: with the key `checkpoints`, a custom script does so in work/.

    The batch script says where. Without one, as without the key, it is checkpoints/.
    """
    try:
        script = read_file(run.script("train")).decode(errors="surrogateescape")
    except OSError:
        return run.checkpoints
    _, _, rest = script.partition("\nexport TRNSLURM_CHECKPOINTS=")
    words = shlex.shlex(rest, posix=True)
    words.whitespace_split, words.commenters = True, ""
    try:
        place = words.get_token() if rest else ""
    except ValueError:  # no closing quotation
        place = ""
    return run.path / place.removeprefix("$PWD/") if place else run.checkpoints


def _step_in(saved: dict[str, Any]) -> int:
    step = saved.get("step")
    return step if isinstance(step, int) and step > 0 else 0


def temporary_name(step: int, attempt: int) -> str:
    """Return the name of a checkpoint that an attempt is writing, or died writing."""
    return f"{checkpoint_name(step)}.tmp-{attempt}"


def writer_of(name: str) -> int | None:
    """Return the attempt number in a checkpoint's temporary name; None for any other name."""
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
