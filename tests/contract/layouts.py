"""Checkpoints of real libraries, and the order in which their files are written."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ..processes import run_process


@cache
def state() -> tuple[Any, dict[str, Any]]:
    """A model, and a whole training of it as scripts give it to torch.save."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def save(value: Any, file: Path) -> None:
    import torch

    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, file)


def safetensors(file: Path) -> None:
    """A file in the format of safetensors, with one tensor."""
    head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(8))


def trainer(root: Path) -> Path:
    """As transformers' Trainer has it for two ranks."""
    place, (_, whole) = root / "out/checkpoint-10", state()
    safetensors(place / "model.safetensors")
    save(whole["optimizer"], place / "optimizer.pt")
    save({"last_epoch": 1}, place / "scheduler.pt")
    save({"cpu": 1}, place / "rng_state_0.pth")
    text = json.dumps({"global_step": 10, "log_history": [{"loss": 1.0}]}, indent=2)
    (place / "trainer_state.json").write_text(f"{text}\n")
    return place


def trainer_with_deepspeed(root: Path) -> Path:
    place, (_, whole) = root / "out/checkpoint-10", state()
    for name in ("mp_rank_00_model_states.pt", *(
        f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
    )):  # fmt: skip
        save(whole, place / "global_step10" / name)
    (place / "latest").write_text("global_step10")
    save({"cpu": 1}, place / "rng_state_0.pth")
    (place / "trainer_state.json").write_text('{\n  "global_step": 10\n}\n')
    return place


_ACCELERATE = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(optimizer, 1))
for step in (10, 20):
    accelerator.save_state(f"{sys.argv[1]}/step_{step}")
"""


@cache
def _by_accelerate() -> Path:
    place = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, place)
    run_process([sys.executable, "-W", "ignore", "-c", _ACCELERATE, place])
    return Path(place)


def accelerate(root: Path) -> Path:
    """By accelerate itself, with an object of the script, which comes last.

    Its state is of a process.
    """
    pytest.importorskip("accelerate")
    shutil.copytree(_by_accelerate(), root / "out")
    return root / "out/step_20"


def lightning(root: Path) -> Path:
    """The dict of Lightning's dump_checkpoint, as far as it tells what it is."""
    _, whole = state()
    file = root / "lightning_logs/version_0/checkpoints/last.ckpt"
    dumped = {"epoch": 1, "global_step": 400, "pytorch-lightning_version": "2.6.6"}
    save(dumped | {"state_dict": whole["model"], "optimizer_states": [whole["optimizer"]]}, file)
    return file


def distributed(root: Path, name: str = "outputs/checkpoint/step-10") -> Path:
    place, (_, whole) = root / name, state()
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process
        checkpoint.save({"model": whole["model"]}, checkpoint_id=place)
    return place


def lightning_sharded(root: Path) -> Path:
    place = distributed(root, "logs/epoch=1-step=10.ckpt")
    save({"global_step": 10}, place / "meta.pt")
    return place


def deepspeed(root: Path) -> Path:
    _, whole = state()
    for tag in (5, 10):
        for name in ("mp_rank_00_model_states.pt", *(
            f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
        )):  # fmt: skip
            save(whole, root / f"out/global_step{tag}" / name)
        (root / "out/latest").write_text(f"global_step{tag}")
    return root / "out"


def megatron(root: Path) -> Path:
    _, whole = state()
    save(whole, root / "out/iter_0000010/mp_rank_00/model_optim_rng.pt")
    (root / "out/latest_checkpointed_iteration.txt").write_text("10")
    return root / "out"


def nanogpt(root: Path) -> Path:
    save(state()[1], root / "out/ckpt.pt")
    return root / "out/ckpt.pt"


def timm(root: Path) -> Path:
    _, whole = state()
    save(whole, root / "output/train/x/tmp.pth.tar")
    (root / "output/train/x/tmp.pth.tar").rename(root / "output/train/x/last.pth.tar")
    return root / "output/train/x/last.pth.tar"


def litgpt(root: Path) -> Path:
    save(state()[1], root / "out/step-00000010/lit_model.pth")
    return root / "out/step-00000010/lit_model.pth"


LAYOUTS: dict[str, tuple[Callable[[Path], Path], str, int | None]] = {
    "Trainer": (trainer, "Trainer", 10),
    "Trainer with DeepSpeed": (trainer_with_deepspeed, "Trainer", 10),
    "accelerate": (accelerate, "accelerate", 20),
    "Lightning": (lightning, "Lightning", 400),
    "torchtitan": (distributed, "torch.distributed.checkpoint", 10),
    "Lightning with FSDP": (lightning_sharded, "Lightning", 10),
    "DeepSpeed": (deepspeed, "DeepSpeed", 10),
    "Megatron": (megatron, "Megatron", 10),
    "nanoGPT": (nanogpt, "torch.save", None),
    "timm": (timm, "torch.save", None),
    "litgpt": (litgpt, "torch.save", 10),
}
"""What writes each, its form, and its step."""


def in_order(root: Path) -> list[Path]:
    """The files below a directory, in the order in which they were written."""
    files = [file for file in root.rglob("*") if file.is_file()]
    return sorted(files, key=lambda file: file.stat().st_mtime_ns)


def dated(root: Path, seconds: float = 1.0) -> list[Path]:
    """Give each file a time of its own, in that order, whatever the clock's tick is."""
    files = in_order(root)
    for number, file in enumerate(files):
        os.utime(file, 2 * (1e9 + number * seconds,))
    return files
