"""A pipeline on a real Slurm: what runs after what, and what runs again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..waiting import eventually
from .jobs import User

pytestmark = pytest.mark.rest

FILES = {
    "prepare.py": "import sys\nopen(sys.argv[1] + '/data', 'w').write('3 4')\n",
    "train.py": """
import sys, trnslurm
from pathlib import Path
numbers = Path(sys.argv[1], "data").read_text().split()
for step in (1, 2, 3):
    trnslurm.report(step=step, steps=3, loss=len(numbers) / step)
(saved := Path(sys.argv[2], "step-3.pt")).write_text("weights")
trnslurm.saved(3, saved)
""",
    "eval.py": """
import sys, trnslurm
assert open(sys.argv[1]).read() == "weights"
trnslurm.report(step=int(sys.argv[2]), accuracy=0.5)
""",
    "export.sh": '#!/bin/bash\ncp "$1" "$2/model"\n',
    "smoke.sh": '#!/bin/bash\necho "smoke: $(cat "$1/model"), accuracy $2"\n',
}
STAGES = """
stages:
  prepare: ./prepare.py {sets} -- {{out}}
  train: ./train.py --nodes 2 {sets} -- {{prepare.out}} {{checkpoints}}
  evaluate: ./eval.py {sets} -- {{train.checkpoint}} {{train.step}}
  export: ./export.sh {sets} -- {{train.checkpoint}} {{out}}
  smoke:
    submit: ./smoke.sh {sets} -- {{export.out}} {{evaluate.accuracy}}
    if: evaluate.accuracy > 0.6
"""


def test_stages_wait_for_each_other_and_are_done_once(user: User) -> None:
    place = user.home
    for name, text in FILES.items():
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    settings = (f"run_root={user.run_root}", "device=cpu", "workers_per_node=1")
    sets = " ".join(["--time 5", *(f"--set {setting}" for setting in settings)])
    (place / "nightly.yaml").write_text(STAGES.format(sets=sets))

    def submit() -> list[dict[str, Any]]:
        words = ("submit", "nightly.yaml", "--cluster", user.sandbox.cluster, "--json")
        return list(json.loads(user.trnslurm(*words)))

    def standing(group: str) -> dict[str, dict[str, Any]]:
        told = json.loads(user.trnslurm("status", group, "--json"))
        return {stage["stage"]: stage for stage in told["stages"]}

    def until_over(group: str) -> dict[str, dict[str, Any]]:
        over = ("COMPLETED", "FAILED", "CANCELLED")
        eventually(
            lambda: all(s["state"] in over for s in standing(group).values()),
            said=lambda: f"{standing(group)}\n{user.sandbox.queue()}",
        )
        return standing(group)

    first = submit()
    assert [run["values"]["stage"] for run in first] == [
        "prepare", "train", "evaluate", "export", "smoke",
    ]  # fmt: skip
    found = until_over(first[0]["pipeline"])
    assert {stage["state"] for name, stage in found.items() if name != "smoke"} == {"COMPLETED"}
    assert found["smoke"]["state"] == "FAILED"
    why = "evaluate.accuracy is 0.5, and the run starts only if evaluate.accuracy > 0.6"
    assert f"exit code 1 while checking its inputs: {why}" in found["smoke"]["status"]["reason"]
    assert user.sandbox.queue() == []

    # One stage changes: it and what comes after it run again, with the results of the others.
    (place / "eval.py").write_text(FILES["eval.py"].replace("0.5", "0.75"))
    second = submit()
    assert [run["values"]["stage"] for run in second] == ["evaluate", "smoke"]
    found = until_over(second[0]["pipeline"])
    assert {stage["state"] for stage in found.values()} == {"COMPLETED"}
    earlier = [name for name, stage in found.items() if stage["earlier"]]
    assert earlier == ["prepare", "train", "export"]
    assert "smoke: weights, accuracy 0.75\n" in user.trnslurm("logs", found["smoke"]["run"])
    said = user.trnslurm("submit", "nightly.yaml", "--cluster", user.sandbox.cluster)
    assert said.endswith("All stages are done: nothing to submit\n")
