"""The checkpoints that libraries write: found when they are whole, and never before."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from trnslurm.contract.forms import Place, older, whole_ones
from trnslurm.contract.layouts import Found, Life

from .layouts import LAYOUTS, dated, safetensors, save, state

WORKERS = 2


def find(root: Path, pattern: str = "", lives: Sequence[Life] = ()) -> Found | None:
    found = whole_ones([Place(root, root / "none")], pattern, workers=WORKERS, lives=lives)
    return next(found, None)


@pytest.fixture(scope="module", params=LAYOUTS)
def written(request, tmp_path_factory) -> tuple[Path, list[Path], Found]:
    """A layout, its files in the order of writing, and what is to be found."""
    root = tmp_path_factory.mktemp("work")
    make, form, step = LAYOUTS[request.param]
    path = make(root)
    return root, dated(root), Found(path, step, 0.0, form)


def test_it_is_found(written) -> None:
    root, _, wanted = written
    found = find(root)
    assert found and found._replace(time=0.0) == wanted and found.time >= 1e9
    assert not [*whole_ones([Place(root, root)], workers=WORKERS)], "it came with the project"


@pytest.mark.parametrize("keep", [1, 2])
def test_those_that_newer_ones_make_unnecessary(written, tmp_path, keep: int) -> None:
    """Only older ones of the same kind, and none of libraries that delete their own."""
    root, _, wanted = written
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    path = tmp_path / wanted.path.relative_to(root)
    inside = {"DeepSpeed": "global_step10", "Megatron": "iter_0000010"}.get(wanted.form)
    last = path / inside if inside else path
    last = last.parent if last.name == "lit_model.pth" else last
    first = [last.with_name(last.name.replace(str(wanted.step), f"0{n}", 1)) for n in (1, 2, 3)]
    if str(wanted.step) in last.name:
        for n, one in enumerate(first):
            (shutil.copytree if last.is_dir() else shutil.copy2)(last, one)
            for file in (one, *one.rglob("*")):
                age_ns = (3 - n) * 10**12
                os.utime(file, ns=(0, file.stat().st_mtime_ns - age_ns))
    series = re.sub(r"\d+", "", str(path if path.name == "lit_model.pth" else last))
    alike = {path for path in tmp_path.rglob("*") if re.sub(r"\d+", "", str(path)) == series}
    half = last.with_name(f"{last.name}.tmp")
    (shutil.copytree if last.is_dir() else shutil.copy2)(last, half)
    found = older([*whole_ones([Place(tmp_path)], workers=WORKERS)], keep)
    own = wanted.form in ("Trainer", "Lightning") or wanted.step is None
    if path.name == "lit_model.pth":  # litgpt has a directory for each
        first, last = [one / path.name for one in first], path
    assert {*first[: 0 if own else 4 - keep]} <= {*found} <= alike - {last}


def test_a_kill_at_any_byte_leaves_none(written, tmp_path) -> None:
    """Nor an older one, unless that is whole: what is found has all that its writer has written."""
    root, files, wanted = written
    kept = [f for f in files if wanted.path in (f, *f.parents) or f.name.startswith("latest")]
    chance = random.Random(5)
    for number, cut in enumerate(kept):
        copy = tmp_path / str(number)
        for file in files[: files.index(cut)]:
            target = copy / file.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        data = cut.read_bytes()
        target = copy / cut.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        end = len(data.rstrip(b"\n")) - 1
        lengths = {0, 1, end, *(chance.randrange(end) for _ in range(40))}
        if cut.name == ".metadata":  # it is renamed when it is complete
            lengths, _ = set(), target.unlink(missing_ok=True)
            assert find(copy) is None
        for length in sorted(lengths):
            if cut.name in ("latest", "latest_checkpointed_iteration.txt") and length > 1:
                continue  # 1 of 10: no such directory
            target.write_bytes(data[:length])
            os.utime(target, 2 * (cut.stat().st_mtime,))
            found = find(copy)
            older = found and found.path != copy / wanted.path.relative_to(root)
            older = older or (found and found.step == 5)  # the tag before, of DeepSpeed
            assert not found or older, (cut, length, found)


@pytest.mark.parametrize("what", ["Trainer", "accelerate", "torchtitan", "Lightning with FSDP"])
def test_a_directory_that_is_written_again_is_not_whole(what, tmp_path) -> None:
    make, _, _ = LAYOUTS[what]
    path = make(tmp_path)
    dated(tmp_path)
    found = find(tmp_path)
    assert found and found.path == path
    first = min((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_mtime)
    os.utime(first)
    found = find(tmp_path)
    assert not found or found.path != path


def test_a_part_is_no_checkpoint(tmp_path) -> None:
    _, whole = state()
    for name, value in {
        "model.pt": whole["model"], "optim.pt": whole["optimizer"], "best.pt": whole["model"],
        "training_state.pt": {"optimizer": whole["optimizer"], "scheduler": {}},
        "ep1-rank0.pt": whole, "mp_rank_00/last.ckpt": whole, "tmp.pth.tar": whole,
        "global_step5/mp_rank_00_model_states.pt": whole, ".cache/last.pt": whole,
        "wandb/last.pt": whole,
    }.items():  # fmt: skip
        save(value, tmp_path / "out" / name)
    safetensors(tmp_path / "out/model.safetensors")
    (tmp_path / "link.pt").symlink_to(tmp_path / "out/ep1-rank0.pt")
    (tmp_path / "linked").symlink_to(tmp_path / "out", target_is_directory=True)
    assert find(tmp_path) is None


def test_the_newest_counts_and_the_best_only_without_another(tmp_path) -> None:
    _, whole = state()
    for number, name in enumerate(["epoch_1.pt", "epoch_2.pt", "model_best.pt"]):
        save(whole, tmp_path / "out" / name)
        os.utime(tmp_path / "out" / name, 2 * (1e9 + number,))
    found = find(tmp_path)
    assert found == Found(tmp_path / "out/epoch_2.pt", None, 1e9 + 1, "torch.save")
    for name in ("epoch_1.pt", "epoch_2.pt"):
        (tmp_path / "out" / name).write_bytes(b"PK\x03\x04")
    found = find(tmp_path)
    assert found and found.path.name == "model_best.pt"


def test_what_is_marked_as_unfinished_does_not_count(tmp_path) -> None:
    path = LAYOUTS["Lightning"][0](tmp_path)
    (path.parent / "last-unfinished").touch()  # as NeMo has it
    assert find(tmp_path) is None


def test_what_other_ranks_have_yet_to_write(tmp_path) -> None:
    """DeepSpeed's rank 0 does not wait for them before it writes `latest`."""
    LAYOUTS["DeepSpeed"][0](tmp_path)
    (tmp_path / "out/global_step10/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    dated(tmp_path)
    assert find(tmp_path) is None


def test_the_first_of_accelerate_needs_a_run_that_went_on(tmp_path) -> None:
    """Its last file does not tell whether the script's own objects follow."""
    path = LAYOUTS["accelerate"][0](tmp_path)
    shutil.rmtree(tmp_path / "out/step_10")
    last = dated(tmp_path)[-1].stat().st_mtime
    assert find(tmp_path, lives=[Life(0, last + 59)]) is None
    assert find(tmp_path, lives=[Life(0, last), Life(last + 1, 9e9)]) is None, "the next attempt's"
    found = find(tmp_path, lives=[Life(0, last + 60), Life(last + 61, last + 62)])
    assert found and found.path == path


def test_a_pattern_of_the_user(tmp_path) -> None:
    """What does not show its end must be followed by another, or by a minute of the run's life."""
    for number in (1, 2):
        file = tmp_path / f"out/ckpt-{number}.npz.bin"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"abc")
        os.utime(file, 2 * (1e9 + number,))
    assert find(tmp_path) is None
    found = find(tmp_path, "out/ckpt-*.bin")
    assert found and found.path.name == "ckpt-1.npz.bin"
    found = find(tmp_path, "./out/ckpt-*.bin", lives=[Life(0, 1e9 + 62)])
    assert found and found.path.name == "ckpt-2.npz.bin"
    assert find(tmp_path, "ckpt-*.bin") is None and find(tmp_path, "*/*.pt") is None
    save({"any": 1}, tmp_path / "out/ckpt-3.bin")
    found = find(tmp_path, "*/ckpt-?.bin")
    assert found and found.path.name == "ckpt-3.bin"
    (tmp_path / "out/ckpt-3.bin").write_bytes((tmp_path / "out/ckpt-3.bin").read_bytes()[:-1])
    assert find(tmp_path, "*/ckpt-?.bin", lives=[Life(0, 9e9)]) is None


def test_a_hostile_directory_is_only_looked_at(tmp_path) -> None:
    for name, data in {
        "out/latest": b"../..", "b/latest": bytes(1000),
        "c/latest_checkpointed_iteration.txt": b"9" * 99, "x.ckpt/latest": b"/etc",
        "checkpoint-1/trainer_state.json": b"[" * 100_000,
        "a.pt": b"PK\x03\x04" + b"PK\x05\x06" + bytes(18), "d/step-1/.metadata": b"",
        "m.safetensors": b"\xff" * 8,
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "pipe.pt")
    assert find(tmp_path) is None
    assert [*whole_ones([Place(tmp_path / "gone"), Place(tmp_path / "a.pt")])] == []
