"""Custom scripts on the device: each is stopped after its first step, and resumed; and a hang."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .trainings import REPO, Ended, Trainings, apart

pytestmark = pytest.mark.gpu
# What a script is given, and how it is made to use a GPU.
SCRIPTS = {
    "told.py": (
        ["--out", "{checkpoints}", "--resume", "{resume}"],
        {'"gloo"': '"nccl"', ".double()": '.double().to("cuda")',
         "dtype=torch.double": 'dtype=torch.double, device="cuda"'},
    ),
    "glue.py": (
        ["--told", "--output_dir", "{checkpoints}", "--resume_from_checkpoint", "{resume}",
         "--max_steps=6", "--logging_steps=1", "--report_to=none", "--disable_tqdm=True"],
        {},
    ),
    "lightning/train.py": (["--out", "{checkpoints}", "--resume", "{resume}"], {}),
    "accelerate/train.py": (["--out", "{checkpoints}", "--resume", "{resume}"], {}),
}  # fmt: skip
# Lightning and Trainer may use kernels that add up in any order.
AS_WITHOUT_STOP = 1e-3
HANGS_FOREVER = """
import time, torch
for step in range(13):  # seen in ten looks, the job is known to write
    print("computed", torch.ones(4, device="DEVICE").sum().item(), flush=True)
    time.sleep(1.2)
while True:
    HANG
"""

SLEEPS = "time.sleep(1000)"
HANGS = {
    "on_the_host": {"cuda": SLEEPS, "cpu": SLEEPS},
    "on_the_device": {
        "cuda": "torch.cuda._sleep(10**11); torch.cuda.synchronize()",
        "cpu": "sum(range(10**9))",
    },
}


def project(trainings: Trainings, device: str) -> Path:
    """Return a copy of the tests' project whose scripts use the device."""
    copy = trainings.root / "project"
    if not copy.exists():
        shutil.copytree(REPO / "tests/project", copy)
        shutil.copytree(REPO / "trnslurm/examples", copy, dirs_exist_ok=True)
        for name, (_, changes) in SCRIPTS.items():
            text = (copy / name).read_text()
            for old, new in changes.items() if device == "cuda" else ():
                assert old in text, (name, old)
                text = text.replace(old, new)
            (copy / name).write_text(text)
    return copy


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.xdist_group("scripts")
def test_a_script_stops_and_resumes(
    trainings: Trainings, device: str, saw: Callable[..., None], name: str
) -> None:
    """Ends after its first step when asked, resumes, and has the losses of a run without a stop."""
    words, _ = SCRIPTS[name]
    directory = project(trainings, device)

    def render() -> Path:
        return trainings.render_script(directory / name, words)

    whole = trainings.run(render()).well()
    bundle = render()
    (bundle / "state").mkdir(exist_ok=True)
    (bundle / "state/stop-train-1.json").write_text('{"cause": "time limit"}')
    trainings.run(bundle)
    stopped = json.loads((bundle / "state/stopped-train-1.json").read_text())
    assert (stopped["step"], stopped["saved"]) == (1, True)
    again = trainings.run(bundle).well()
    assert max(again.column("step")) == max(whole.column("step")) > 1
    difference = apart(whole, again)
    assert difference < AS_WITHOUT_STOP
    saw(steps=max(again.column("step")), loss_apart=difference)


@pytest.mark.parametrize("name", ["nanogpt/train.py", "notebook/run.py"])
@pytest.mark.xdist_group("scripts")
def test_a_script_without_a_word_of_ours_learns(
    trainings: Trainings, device: str, saw: Callable[..., None], name: str
) -> None:
    ended = trainings.run(trainings.render_script(project(trainings, device) / name, [])).well()
    losses = [float(line.split()[-1]) for line in ended.log.splitlines() if ": loss " in line]
    assert losses[-1] < losses[0]
    saw(losses=losses)


@pytest.mark.parametrize("name", HANGS)
def test_a_script_that_hangs_is_ended(
    trainings: Trainings, device: str, saw: Callable[..., None], name: str
) -> None:
    """Is ended with its stacks, four times later if the device is busy, be it for other tests."""
    script = trainings.root / "scripts" / name / f"waits_{name}.py"
    script.parent.mkdir(parents=True)
    script.write_text(HANGS_FOREVER.replace("DEVICE", device).replace("HANG", HANGS[name][device]))
    ended: Ended = trainings.run(trainings.render_script(script, [], hang_minutes=0.1))
    assert ended.code != 0
    stuck = json.loads((ended.directory / "state/stuck-train-1.json").read_text())
    assert script.name in json.dumps(stuck) and "no progress: stacks of worker 0" in ended.log
    saw(said=stuck["line"].partition(":")[0])
