"""What must hold after any fault: the invariants I1 to I6, looked at from outside."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ..json_lines import read_lines
from ..waiting import eventually
from .results import Row
from .trainings import STEPS, WAITS_S, Recovery, Training

GLOBAL_BATCH = 8


def lineage(run: Training) -> dict[int, dict[str, Any]]:
    """The line of each step that counts: that of the newest attempt which did it."""
    newest: dict[int, dict[str, Any]] = {}
    for line in run.lines:
        if line["attempt"] >= newest.get(line["step"], line)["attempt"]:
            newest[line["step"]] = line
    return dict(sorted(newest.items()))


def every_sample_once(run: Training, steps: int) -> None:
    """I1: in the committed lineage every sample stands exactly once.

    The steps of the lineage are complete; what the workers say they trained on in each is, sample
    by sample, what it consists of; and each attempt began where a checkpoint was.
    """
    lines = complete_lineage(run, steps)
    consumed: dict[tuple[int, int], list[int]] = {}
    for file in run.path.glob("drill/samples-*.jsonl"):
        for line in read_lines(file):
            consumed.setdefault((line["attempt"], line["step"]), []).extend(line["samples"])
    for step, line in lines.items():
        first = (step - 1) * GLOBAL_BATCH
        samples = consumed[line["attempt"], step]
        assert sorted(samples) == list(range(first, first + GLOBAL_BATCH)), (step, samples)


def complete_lineage(run: Training, steps: int) -> dict[int, dict[str, Any]]:
    """Every step is there, counts its samples, and each attempt began where a checkpoint was."""
    lines = lineage(run)
    assert list(lines) == list(range(1, steps + 1)), run.story()
    assert [line["samples"] for line in lines.values()] == [s * GLOBAL_BATCH for s in lines]
    began_at_checkpoints(run)
    return lines


def began_at_checkpoints(run: Training) -> None:
    """Each attempt went on right behind a checkpoint that had been there when it began."""
    for attempt in sorted({line["attempt"] for line in run.lines}):
        begin = min(run.steps(attempt)) - 1
        loaded = re.search(r"resuming from step-(\d+), .* in attempt (\d+)", _log(run, attempt))
        assert begin == (int(loaded[1]) if loaded else 0), (attempt, begin)
        assert not loaded or int(loaded[2]) < attempt
        if "checkpoint" in (said := run.said(attempt)):
            assert begin <= said["checkpoint"], (attempt, begin)


def same_numbers(run: Training, control: Training, *, rel: float = 0, final: bool = True) -> None:
    """I2: each loss and each norm ever reported, of lost steps too, is that of the control.

    And so are the final weights, with the optimizer's state. Without a tolerance bit for bit.
    """
    expected = {line["step"]: line for line in control.lines}
    for line in run.lines:
        for key in ("loss", "grad_norm"):
            wanted = expected[line["step"]][key]
            assert line[key] == (pytest.approx(wanted, rel=rel) if rel else wanted), (key, line)
    step = max(expected)
    if final and not rel:
        assert files_of(run.path, step) == files_of(control.path, step)
    elif final:
        same_weights(run.path, control.path, step, rel)


def files_of(directory: Path, step: int) -> dict[str, Any]:
    """The size and checksum of each file of a checkpoint, which must be whole."""
    checkpoint = directory / f"checkpoints/step-{step:08d}"
    assert is_whole(checkpoint), checkpoint
    return dict(json.loads((checkpoint / "manifest.json").read_text())["files"])


def same_weights(directory: Path, other: Path, step: int, rel: float) -> None:
    """The parameters of a step are close to each other, whatever the number of workers."""
    mine, theirs = (parameters_of(path, step) for path in (directory, other))
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert np.allclose(mine[name], theirs[name], rtol=rel, atol=rel), name


def parameters_of(directory: Path, step: int) -> dict[str, np.ndarray]:
    """The parameters in a checkpoint: the rows of all files, one after another."""
    rows: dict[str, list[np.ndarray]] = {}
    for name in sorted(files_of(directory, step)):
        for key, value in load_file(directory / f"checkpoints/step-{step:08d}" / name).items():
            if key.startswith("parameter/"):
                rows.setdefault(key, []).append(value)
    return {key: np.concatenate(parts) for key, parts in rows.items()}


def workers_of(run: Training) -> list[int]:
    """By how many workers the checkpoints were written, in the order of steps, without repeats."""
    found = sorted(run.path.glob("checkpoints/step-????????/manifest.json"))
    counts = [json.loads(file.read_text())["workers"] for file in found]
    return [n for i, n in enumerate(counts) if i == 0 or n != counts[i - 1]]


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is what its manifest says: read here with the standard library alone."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        own = manifest.pop("sha256")
        text = json.dumps(manifest, sort_keys=True)
        files = manifest["files"].items()
        contents = {name: (checkpoint / name).read_bytes() for name, _ in files}
    except (OSError, ValueError, KeyError):
        return False
    return hashlib.sha256(text.encode()).hexdigest() == own and all(
        (len(contents[name]), hashlib.sha256(contents[name]).hexdigest())
        == (file["bytes"], file["sha256"])
        for name, file in files
    )


def whole_checkpoints(directory: Path) -> list[int]:
    """The steps of the checkpoints that are there and whole, newest first."""
    found = (directory / "checkpoints").glob("step-????????")
    return sorted((int(path.name[5:]) for path in found if is_whole(path)), reverse=True)


def a_checkpoint_is_there(run: Training) -> int:
    """I3: of a training that has made one, a whole checkpoint is there at any moment."""
    # One may be deleted while it is read; a newer one is then there.
    return eventually(lambda: max(whole_checkpoints(run.path), default=0), 2)


def fenced(run: Training, old: int, new: int) -> None:
    """An attempt has ended by itself, and has committed nothing that the newer one did not load."""
    begin = min(run.steps(new)) - 1
    for manifest in run.path.glob("checkpoints/step-????????/manifest.json"):
        facts = json.loads(manifest.read_text())
        late = facts["attempt"] == old and facts["step"] > begin
        assert not late, f"step {facts['step']} was committed by an attempt that is over"
    assert "a newer attempt" in _log(run, old)


def _log(run: Training, attempt: int) -> str:
    return (run.path / f"logs/train-{attempt}-node0.log").read_text(errors="replace")


def ended_well(run: Training, state: str = "COMPLETED", exit_code: tuple[str, ...] = ()) -> None:
    """I4: the right word at the end, from us and from Slurm; no job and no process is left."""
    assert run.state == state, run.story()
    eventually(lambda: not queued(run))
    if exit_code:
        job = run.sandbox.slurm("scontrol", "show", "job", "-o", run.jobs["train"]).out
        # Slurm forgets jobs; what it still knows must be right.
        assert not job.strip() or any(f" ExitCode={code} " in job for code in exit_code), job
    eventually(lambda: not run.sandbox.processes_of(run))


def queued(run: Training) -> list[str]:
    """The lines of the queue about a run's jobs."""
    jobs = set(run.jobs.values())
    return [line for line in run.sandbox.queue() if line.split()[0] in jobs]


def came_back_in_time(recovery: Recovery, bound_s: float = 120) -> None:
    """I5: the first new step comes within a bound, wide enough for a machine that is busy."""
    assert 0 < recovery.total < bound_s + WAITS_S, recovery


def logs_kept(run: Training) -> None:
    """I6: what had been logged at a fault is still there, and more was only added."""
    assert run.kept
    for name, content in run.kept.items():
        assert Path(name).read_bytes().startswith(content), name
    # An attempt that a fault ended before its workers had started has no log of a node.
    assert all(_log(run, attempt) for attempt in run.attempts if run.steps(attempt))


def check(
    run: Training,
    control: Training,
    row: Row,
    recovery: Recovery,
    *,
    lost_at_most: int,
    bound_s: float = 120,
) -> None:
    """All of them, for a training that came back by itself and is COMPLETED."""
    assert recovery.lost <= lost_at_most, recovery
    check_end(run, control, row, lost=recovery.lost, bound=lost_at_most)
    came_back_in_time(recovery, bound_s)
    row.holds("I1 I2 I3 I4 I5 I6", lost=recovery.lost, bound=lost_at_most)
    row.measured(recovery)


def check_end(
    run: Training,
    control: Training,
    row: Row,
    *,
    steps: int = STEPS,
    state: str = "COMPLETED",
    exit_code: tuple[str, ...] = ("0:0",),
    lost: int | None = None,
    bound: int | None = None,
) -> None:
    """All but I5, for a training that has come to an end, whoever helped it."""
    every_sample_once(run, steps)
    same_numbers(run, control, final=state == "COMPLETED")
    if state == "COMPLETED":
        assert a_checkpoint_is_there(run) == steps
    ended_well(run, state, exit_code)
    logs_kept(run)
    row.holds("I1 I2 I3 I4 I6", lost=lost, bound=bound)
