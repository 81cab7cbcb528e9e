"""Rendered scripts, as they are and edited by hand; and the CPUs that their workers get."""

from __future__ import annotations

import json
import os

import pytest

from ..json_lines import read_lines
from ..waiting import eventually

pytestmark = pytest.mark.rest

MACHINE = sorted(os.sched_getaffinity(0))
# What a shell inside another allocation may have; each would make the script's srun fail.
INSIDE = """
export SLURM_GPUS=4 SLURM_CPUS_PER_GPU=3 SLURM_NTASKS_PER_GPU=2 SLURM_THREADS_PER_CORE=2
export SLURM_MPI_TYPE=no SLURM_DISTRIBUTION=no SLURM_CONSTRAINT=no SLURM_RESERVATION=no
export SLURM_WORKING_DIR=/nowhere SLURM_STDOUTMODE=none
"""


def test_the_printed_lines_run_a_bundle(user) -> None:
    """All it takes is sbatch; what runs is what was reviewed; and workers have every CPU."""
    bundle = user.home / "reviewed"
    options = user.options(2, "precompile=always", "workers_per_node=2")
    said = user.trnslurm("render", "probe", *options, "-o", bundle).splitlines()

    def state(phase: str) -> dict[str, object]:
        file = bundle / f"state/{phase}-1.json"
        text = file.read_text() if file.exists() else ""
        return json.loads(text or "{}")

    script = (bundle / "train.sbatch").read_bytes()
    train = user.shell(INSIDE + "\n".join(said[1:]), bundle).split()[-1]
    eventually(lambda: state("precompile").get("state") == "RUNNING")
    user.sandbox.slurm("scontrol", "write", "batch_script", train, str(user.home / "taken"))
    assert (user.home / "taken").read_bytes() == script
    eventually(lambda: state("train").get("ended"))
    assert state("precompile")["state"] == "COMPLETED"
    assert (state("train")["state"], state("train")["exit_code"]) == ("COMPLETED", 0)
    facts = [json.loads(f.read_text()) for f in bundle.glob("facts-train-1-*.json")]
    assert [f["affinity"] for f in facts] == [MACHINE] * 4


def test_srun_could_take_the_cpus_away(user) -> None:
    """The control of the test above: task/affinity binds here as it does on a cluster."""
    bundle = user.home / "reviewed"
    user.trnslurm("render", "probe", *user.options(1, "workers_per_node=2"), "-o", bundle)
    script = bundle / "train.sbatch"
    ours, bound = "--cpus-per-task=128 --cpu-bind=none", "--cpus-per-task=1 --cpu-bind=cores"
    assert ours in script.read_text()
    script.write_text(script.read_text().replace(ours, bound))
    run = user.submit_rendered(bundle)
    run.until("COMPLETED")
    assert [len(facts["affinity"]) for facts in run.facts().values()] == [1, 1]


def test_a_run_is_resumed_without_trnslurm(user) -> None:
    """The same script, in the run directory: it continues after the newest checkpoint."""
    small = ("device=cpu", "preflight=false", "steps=6", "train.save_every=2", "train.eval_every=0")
    small += ("model.n_layer=1", "train.stop_at=2", "slurm.requeue=false")
    run = user.submit(*small, nodes=2, recipe="gpt2_zero1")
    run.until("COMPLETED")
    plan = json.loads((run.path / "plan.json").read_text())
    plan["train"]["stop_at"] = 0
    (run.path / "plan.json").write_text(json.dumps(plan))

    user.shell("sbatch train.sbatch", run.path)
    ends = run.path / "state/train-2.json"
    eventually(lambda: ends.exists() and json.loads(ends.read_text() or "{}").get("ended"))
    assert json.loads(ends.read_text())["state"] == "COMPLETED", run.story()
    lines = read_lines(run.path / "metrics.jsonl")
    assert [(line["attempt"], line["step"]) for line in lines] == [
        *((1, step) for step in (1, 2)), *((2, step) for step in (3, 4, 5, 6)),
    ]  # fmt: skip
