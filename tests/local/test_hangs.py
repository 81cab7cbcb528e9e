"""Scripts that hang: each ends with the stacks of all workers, and names the one to blame."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ..processes import run_process

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
# Worker 1 hangs in the place that argv[1] names.
HANG = """
def hang_in(place):
    if place == sys.argv[1] and os.environ.get("RANK", "1") == "1":
        while True:
            time.sleep(1000)
"""
PLAIN = f"""
import datetime, os, sys, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{HANG}
def load():
    for step in range(6):
        if step == 3:
            hang_in("loader")
        yield torch.ones(4, 2)

def save(model):
    hang_in("save")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.barrier()

hang_in("start")
dist.init_process_group("gloo", timeout=datetime.timedelta(hours=1))
model = DistributedDataParallel(torch.nn.Linear(2, 1))
for step, batch in enumerate(load()):
    model(batch).sum().backward()
    if step == 3:
        hang_in("collective")
        dist.all_reduce(torch.ones(1))
save(model)
if sys.argv[1] == "end" and dist.get_rank() == 1:
    threading.Thread(target=time.sleep, args=(1000,), name="writer").start()
dist.barrier()
"""
TRAINER = f"""
import os, sys, time
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
{HANG}
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        if i > 20: hang_in("loader")
        return {{"x": torch.ones(2), "labels": torch.zeros(1)}}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels):
        return {{"loss": ((self.layer(x) - labels) ** 2).mean()}}

class Saving(TrainerCallback):
    def on_save(self, *_, **__): hang_in("save")
    def on_step_end(self, _, state, *__, **___):
        if state.global_step == 3: hang_in("collective")

arguments = TrainingArguments("out", max_steps=8, save_steps=4, use_cpu=True, report_to=[],
    per_device_train_batch_size=1, ddp_timeout=3600, disable_tqdm=True)
hang_in("start")
Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[Saving()]).train()
hang_in("end")
"""
LIGHTNING = f"""
import datetime, os, sys, time
import lightning, torch
from lightning.pytorch.strategies import DDPStrategy
{HANG}
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, number):
        if number == 3: hang_in("collective")
        return self.layer(batch).sum()
    def on_train_end(self): hang_in("end")
    def on_save_checkpoint(self, checkpoint): hang_in("save")
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, i):
        if i > 14: hang_in("loader")
        return torch.ones(2)

hang_in("start")
strategy = DDPStrategy(process_group_backend="gloo", timeout=datetime.timedelta(hours=1))
trainer = lightning.Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy=strategy,
    max_epochs=1, logger=False, enable_progress_bar=False)
trainer.fit(Module(), torch.utils.data.DataLoader(Rows()))
"""
PROGRAM = "#!/bin/sh\necho begin\n[ $SLURM_NODEID = 0 ] || exec sleep 1000\nexec sleep 1001\n"
FRAMEWORKS = {"plain.py": PLAIN, "trainer.py": TRAINER, "lit.py": LIGHTNING, "program": PROGRAM}


def hang(home: Path, name: str, place: str) -> tuple[dict[str, Any], str]:
    """Submit a script that hangs; return its run's status and node 1's log."""
    project = home / "project"
    project.mkdir()
    script = project / name
    script.write_text(FRAMEWORKS[name])
    script.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(ROOT)}

    def trnslurm(*words: str, code: int) -> str:
        command = [sys.executable, "-m", "trnslurm", *words]
        done = run_process(command, env=environment, cwd=project)
        assert done.code == code, done.out + done.err
        return done.out

    options = ("--nodes", "2", "--set", "hang_minutes=0.2", "--set", "devices=[cpu]")
    trnslurm("submit", f"./{name}", *options, "--", place, code=1)
    status = json.loads(trnslurm("status", "last", "--json", code=0))
    run = Path(status["path"])
    return status, (run / "logs/train-1-node1.log").read_text()


@pytest.mark.parametrize(
    ("name", "place", "named", "at"),
    [
        ("plain.py", "loader", 1, "(hang_in)"),
        ("program", "-", None, "sleep: state S"),
        *(
            pytest.param(*case, marks=pytest.mark.faults)
            for case in (
                ("plain.py", "start", 1, "(hang_in)"),
                ("plain.py", "collective", 1, "(hang_in)"),
                ("plain.py", "save", 1, "(hang_in)"),
                ("plain.py", "end", 1, "threading.py"),
                ("trainer.py", "start", 1, "(hang_in)"),
                ("trainer.py", "loader", 1, "(hang_in)"),
                ("trainer.py", "collective", 1, "(hang_in)"),
                ("trainer.py", "save", 1, "(hang_in)"),
                ("trainer.py", "end", 1, "(hang_in)"),
                ("lit.py", "start", 1, "(hang_in)"),
                ("lit.py", "loader", 1, "(hang_in)"),
                ("lit.py", "collective", 1, "(hang_in)"),
                ("lit.py", "save", 1, "(hang_in)"),
                ("lit.py", "end", 1, "(hang_in)"),
            )
        ),
    ],
)
def test_a_hang_ends(tmp_path: Path, name: str, place: str, named: int | None, at: str) -> None:
    status, log = hang(tmp_path, name, place)
    print(status["reason"])
    who = f"worker {named} (node {named}, " if named is not None else ""
    assert who in status["reason"]
    assert at in status["reason"]
    assert "no progress: stacks of" in log
