"""What a device does to stops, hangs and refusals."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles

from ..free_port import free_port
from ..processes import run_process
from ..waiting import eventually
from .trainings import LIMIT_S, REPO, Trainings

pytestmark = pytest.mark.gpu
QUIET = {"train__eval_every": 0, "train__save_every": 0, "steps": 100_000}


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def edit_loop(bundle: Path, *, before: str = "", inside: str = "") -> None:
    """Put lines into a job's snapshot, before its loop over the steps or at the begin of it."""
    [job] = bundle.glob("code/jobs/*/train.py")
    loop = "    for step in run.steps():\n"
    text = job.read_text()
    assert text.count(loop) == 1
    job.write_text(text.replace(loop, before + loop + inside))


def started(trainings: Trainings, bundle: Path) -> subprocess.Popen[bytes]:
    """Start a training, and wait for its first steps."""
    process = trainings.start(bundle)
    metrics = bundle / "metrics.jsonl"
    eventually(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, LIMIT_S)
    return process


def test_stops_on_request(trainings: Trainings, saw: Callable[..., None]) -> None:
    """Saves and ends when it is asked to, and resumes from there."""
    bundle = trainings.render("gpt2_zero1", **QUIET)
    process = started(trainings, bundle)
    (bundle / "state/stop-train-1.json").write_text("{}")
    ended = trainings.wait(bundle, process)
    last = max(ended.column("loss"))
    assert f"STOPPED (saved step {last})" in ended.log, ended.log[-6000:]
    assert (bundle / f"checkpoints/step-{last:08d}/manifest.json").is_file()

    plan = json.loads((bundle / "plan.json").read_text())
    plan["train"]["stop_at"] = last + 3
    (bundle / "plan.json").write_text(json.dumps(plan))
    again = trainings.run(bundle).well()
    assert f"resuming from step-{last:08d}" in again.log
    assert max(again.column("loss")) == last + 3
    saw(stopped_after=last)


@pytest.mark.parametrize("name", ["gpt2_zero1", "fsdp"])
def test_a_hang_is_ended(
    trainings: Trainings, device: str, saw: Callable[..., None], name: str
) -> None:
    """Ends an attempt in which the device does nothing any more, and says in which step."""
    bundle = trainings.render(name, train__watchdog_min_s=6.0, **QUIET)
    hang = "torch.cuda._sleep(10**11)" if device == "cuda" else "__import__('time').sleep(50)"
    edit_loop(bundle, inside=f"        if step == 8:\n            {hang}\n")
    ended = trainings.run(bundle)
    assert ended.code != 0
    stuck = json.loads((bundle / "state/stuck-train-1.json").read_text())
    # A host may be a step ahead of its device.
    assert stuck["step"] in (8, 9), stuck
    assert "no progress: stacks of worker 0" in ended.log
    saw(said=stuck["line"].partition(":")[0])


AHEAD = """\
import torch
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import read_environment
device = open_device("cuda", read_environment())
torch.cuda._sleep(10**9)
done = torch.cuda.Event()
done.record()
assert not done.query(), "the device was faster than its host"
device.put(torch.zeros(1))
assert done.query(), "put() does not wait for what was given before"
assert device.steps_ahead(2) == 1
device.close()
"""


COLLECTIVE = """\
import time, torch
from trnslurm.train.devices.plain import CudaTimer
timer = CudaTimer()
torch.cuda._sleep(10**9)
torch.cuda.synchronize()
began = time.monotonic()
with timer("collectives"):
    torch.cuda._sleep(10**9)
given = time.monotonic() - began
early = timer.take()["collectives"]
torch.cuda.synchronize()
took, counted = time.monotonic() - began, timer.take()["collectives"]
assert early == 0 and given < took / 2, "the host waited"
assert 0.7 * took < counted < 1.01 * took, (counted, took)
"""


def test_collectives_are_timed_on_the_device(device: str, tmp_path: Path) -> None:
    """Counts how long the GPU is in a collective, while the host goes on."""
    if device != "cuda":
        pytest.skip("a CPU's collectives are timed by its own clock")
    environ = os.environ | {"PYTHONPATH": str(REPO)}
    done = run_process([sys.executable, "-c", COLLECTIVE], env=environ, cwd=tmp_path)
    assert done.code == 0, done.err


def test_steps_are_recorded(trainings: Trainings, device: str, saw: Callable[..., None]) -> None:
    """Records three steps on request: what the device did, its memory, a trace and words."""
    bundle = trainings.render("gpt2_zero1", **QUIET)
    process = started(trainings, bundle)
    files = RunFiles(bundle)
    write_json(
        files.profile_request,
        {"id": "asked", "steps": 3, "workers": [0], "memory": device == "cuda"},
    )
    summary = files.profile_file("asked", 0, "summary.json")
    eventually(summary.exists, LIMIT_S)
    (bundle / "state/stop-train-1.json").write_text("{}")
    trainings.wait(bundle, process)
    facts = json.loads(summary.read_text())
    assert facts["steps"] == 3 and facts["shares"]["matrix products"] > 0
    with gzip.open(files.profile_file("asked", 0, "json.gz"), "rt") as trace:
        kinds = {event.get("cat") for event in json.load(trace)["traceEvents"]}
    assert ("kernel" in kinds) == (device == "cuda")
    if device == "cuda":
        snapshot = pickle.loads(files.profile_file("asked", 0, "memory.pickle").read_bytes())
        assert snapshot["segments"] and any(snapshot["device_traces"])
    saw(**{kind.replace(" ", "_"): f"{share:.0%}" for kind, share in facts["shares"].items()})


def test_the_use_of_the_gpu_is_noted(trainings: Trainings, device: str) -> None:
    """Writes lines about the node with what nvidia-smi says."""
    bundle = trainings.render("gpt2_zero1", **QUIET, usage_seconds=1)
    process = started(trainings, bundle)
    notes = bundle / "usage/node0.jsonl"
    eventually(notes.exists, LIMIT_S)
    # The tool reports every second; the last line has what came after the first.
    steps = (bundle / "metrics.jsonl").read_text().count("\n")
    eventually(
        lambda: (
            time.time() - notes.stat().st_mtime > 5
            and (bundle / "metrics.jsonl").read_text().count("\n") > steps
        ),
        LIMIT_S,
    )
    (bundle / "state/stop-train-1.json").write_text("{}")
    trainings.wait(bundle, process)
    eventually(lambda: notes.read_text().count("\n") > 1, LIMIT_S)
    line = json.loads(notes.read_text().splitlines()[-1])
    assert line["phase"] == "train" and 0 <= line["cpu"] <= 1
    if device == "cuda":
        assert line["kind"] == "GPU" and max(line["device_use"]) > 0
        assert max(line["device_memory_gib"]) > 0.1


def test_a_host_is_a_step_ahead_at_most(device: str, tmp_path: Path) -> None:
    """Waits in put() for all work given before: what the agreement on a last step builds on."""
    if device != "cuda":
        pytest.skip("a CPU's host is never ahead")
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                "NCCL_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPO)}  # fmt: skip
    done = run_process([sys.executable, "-c", AHEAD], env={**os.environ, **torchrun}, cwd=tmp_path)
    assert done.code == 0, done.err


WAITS = """\
import torch
import transformers.models.gpt2.modeling_gpt2
import told

print("free", torch.ones(1, device="DEVICE").item())
"""


def test_workers_started_ahead_use_no_gpu(device: str, tmp_path: Path) -> None:
    """Imports torch and transformers, holds no memory of a GPU meanwhile, and then uses one."""
    script, there = tmp_path / "script.py", tmp_path / "there"
    script.write_text(WAITS.replace("DEVICE", device))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/told.py").write_text(f"open({str(there)!r}, 'w').close()\n")
    paths = (REPO / "trnslurm/node/startup", REPO, tmp_path / "lib")
    environ = {"RANK": "0", "TRNSLURM_STANDBY": "2", "TRNSLURM_RUN_DIR": str(tmp_path),
               "PYTHONPATH": ":".join(map(str, paths))}  # fmt: skip
    program = [sys.executable, "-m", "trnslurm.node.standby", "--workers=1", "--"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [*program, sys.executable, str(script)], env={**os.environ, **environ}, text=True, **pipes
    ) as standby:
        eventually(there.exists, LIMIT_S)
        if device == "cuda":
            [worker] = children(standby.pid)
            used = run_process(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"])
            assert str(worker) not in used.ok.split()
        out, _ = standby.communicate('{"TRNSLURM_RESUME": ""}\n', LIMIT_S)
    assert standby.returncode == 0 and "free 1.0" in out


def test_more_workers_than_gpus_are_refused(trainings: Trainings, device: str, gpus: int) -> None:
    """Refuses more workers than there are GPUs in one line, by preflight and by itself."""
    if device != "cuda" or gpus >= 8:
        pytest.skip("there are not too few GPUs here")
    for preflight, words in ((True, "the job needs"), (False, "each worker needs one")):
        ended = trainings.run(trainings.render("gpt2_zero1", workers=gpus + 1, preflight=preflight))
        assert ended.code != 0 and words in ended.log, ended.log[-6000:]


def test_a_memory_that_is_full_is_told(trainings: Trainings, device: str) -> None:
    """Names the cause when the device has too little memory."""
    if device != "cuda":
        pytest.skip("the host's memory is not to be filled")
    bundle = trainings.render(
        "gpt2_zero1", batch__global_batch=512, batch__micro_batch=512, **QUIET
    )
    # The GPU is shared with other tests, so a share of it is all that there is.
    edit_loop(bundle, before="    torch.cuda.set_per_process_memory_fraction(1e-5)\n")
    ended = trainings.run(bundle)
    assert ended.code != 0 and "OutOfMemoryError" in ended.log, ended.log[-6000:]


def test_term_saves(trainings: Trainings) -> None:
    """Saves when its script gets TERM, as at a preemption."""
    bundle = trainings.render("fsdp", **QUIET)
    process = started(trainings, bundle)
    process.send_signal(signal.SIGTERM)
    ended = trainings.wait(bundle, process)
    assert f"(saved step {max(ended.column('loss'))})" in ended.log, ended.log[-6000:]
