"""Checkpoints for real: the launcher, worker processes, their devices, and their deaths."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trnslurm.contract.checkpoints import checkpoint_name
from trnslurm.train.checkpoint.manifest import verify
from trnslurm.train.checkpoint.tensors import open_rows

from ...waiting import eventually
from ..attempts import children
from ..conftest import launcher_words, make_environment, node_environment, run_workers

pytestmark = pytest.mark.rest

WORKER = Path(__file__).with_name("worker.py")
REPO = WORKER.parents[3]
TIMEOUT_S = 600


class Runs:
    """Attempts of one run."""

    def __init__(self, run_dir, make_plan):
        self.run_dir = run_dir
        self.root = run_dir / "checkpoints"
        self.root.mkdir()
        self._make_plan = make_plan
        self._attempt = 0
        self._launched = []

    def start(self, device, workers, *, prefix="", code=0, **options):
        """Run an attempt to its end; return what the workers said."""
        if prefix:
            return self.finish(self.launch(device, workers, prefix=prefix, **options), code)
        done = run_workers(
            workers, WORKER, self._prepare(device, workers, options), cwd=self.run_dir,
            device=device, **self._environ(),
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return self._read(done.stdout)

    def launch(self, device, workers, *, prefix="", **options):
        """Start an attempt, as a batch script does."""
        given = self._prepare(device, workers, options)
        command = [sys.executable, *launcher_words(workers, WORKER, given)]
        if prefix:
            command = [*UNSHARE, "sh", "-c", prefix, "sh", *command]
        process = subprocess.Popen(
            command,
            cwd=self.run_dir,
            env=make_environment(device, "train", self.run_dir)
            | node_environment()
            | self._environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._launched.append(process)
        return process

    def close(self):
        """Whatever has happened, no process stays."""
        for process in self._launched:
            with process:
                pids = [] if process.poll() is not None else [process.pid]
                for pid in pids:  # which grows
                    pids += children(pid)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _prepare(self, device, workers, options):
        """Begin an attempt; return what its workers are given."""
        self._attempt += 1
        (self.run_dir / "state").mkdir(exist_ok=True)
        (self.run_dir / "state" / f"train-{self._attempt}.json").touch()
        plan = asdict(self._make_plan(units=12, workers=workers)) | {"device": device}
        (self.run_dir / "plan.json").write_text(json.dumps(plan))
        return json.dumps(options)

    def finish(self, process, code=0):
        """Wait for an attempt's end; return what the workers said."""
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == code, output
        return self._read(output)

    def _read(self, output):
        self.output = output
        # Gloo writes its lines in pieces, so that a worker's may stand in the middle of one.
        lines = [json.loads(said) for said in re.findall(r'{"rank": .*?}', self.output)]
        self.failed = {
            (line["step"], line["rank"]): line["failed"] for line in lines if "failed" in line
        }
        ends = [line for line in lines if "graphs" in line]
        return sorted(ends, key=lambda line: line["rank"])

    def _environ(self):
        path = f"{REPO}:{WORKER.parents[1]}"
        return {"PYTHONPATH": path, "TRNSLURM_ATTEMPT": str(self._attempt)}

    def tensors(self, step):
        """Every tensor of a checkpoint, joined."""
        checkpoint = self.root / checkpoint_name(step)
        manifest = verify(checkpoint)
        read = open_rows(checkpoint, manifest)
        return {
            (name, kind): read(name, kind, range(shape[0]))
            for name, shape in manifest.shapes.items()
            for kind in manifest.kinds
        }

    def names(self):
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture
def runs(tmp_path, make_plan):
    with contextlib.closing(Runs(tmp_path, make_plan)) as runs:
        yield runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, make_plan):
    """What two workers have after three steps if nothing happens to them."""
    runs = Runs(tmp_path_factory.mktemp("undisturbed"), make_plan)
    runs.start("cpu", 2, steps=3)
    return runs.tensors(3)


def assert_equal(tensors, others):
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, others[key]), key


def assert_no_padding(checkpoint, tensors):
    files = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    for (name, kind), tensor in tensors.items():
        key = f"{kind}/{name}"
        assert torch.equal(torch.cat([file[key] for file in files if key in file]), tensor)


def test_the_state_goes_through_any_device_and_number_of_workers(runs):
    runs.start("cpu", 2, steps=3, save_at=[3])
    written = runs.tensors(3)
    # Attempts that load and train no step save the very state they loaded.
    sizes = {}
    for device, workers in [("xla-cpu", 1), ("xla-cpu", 3), ("cpu", 1)]:
        ends = runs.start(device, workers, steps=3, save_loaded=True)
        assert "resuming from step-00000003" in runs.output
        assert_equal(runs.tensors(3), written)
        assert_no_padding(runs.root / "step-00000003", written)
        sizes[device, workers] = [end["state_bytes"] for end in ends]

    whole = sum(tensor.nbytes for (_, kind), tensor in written.items() if kind != "parameter")
    row_bytes = sum(t[0].nbytes for (_, kind), t in written.items() if kind != "parameter")
    assert sizes["xla-cpu", 1] == sizes["cpu", 1] == [whole]
    for size in sizes["xla-cpu", 3]:
        assert whole / 3 <= size < whole / 3 + row_bytes, "more than a third and padding"


def test_resumed_training_is_bitwise_the_same_and_compiles_nothing(runs):
    cache = {"path": str(runs.run_dir / "cache"), "readonly": False}
    trial = runs.start("xla-cpu", 2, steps=4, save_at=[2, 4], cache=cache)
    uninterrupted = runs.tensors(4)
    assert all(end["graphs"][2:] == [0, 0] for end in trial)

    shutil.rmtree(runs.root / "step-00000004")
    resumed = runs.start("xla-cpu", 2, steps=4, save_at=[4], cache=cache | {"readonly": True})
    assert_equal(runs.tensors(4), uninterrupted)
    assert [end["first"] for end in resumed] == [2, 2]
    assert [end["misses"] for end in resumed] == [0, 0], "a graph that the trial run had not"
    assert all(end["graphs"][1:] == [0] for end in resumed), "a late graph"
    # The same as a step in the middle of the trial run: making the state takes one more.
    assert resumed[0]["graphs"][0] > 0


def test_killed_while_a_slow_save_is_written(runs, undisturbed):
    fault = {"fault": "write_half_and_hang", "fault_at": 2, "fault_rank": 1}
    attempt = runs.launch("cpu", 2, steps=3, **fault)
    eventually((runs.run_dir / "hangs").exists)
    # Torchrun passes TERM on; a worker's death, not its patience, ends the save.
    attempt.terminate()
    runs.finish(attempt, code=1)
    assert runs.names() == ["step-00000001", "step-00000002.tmp-1"]

    [first, _] = runs.start("cpu", 2, steps=3)
    assert first["first"] == 1
    assert runs.names() == ["step-00000002", "step-00000003"]
    assert_equal(runs.tensors(3), undisturbed)


UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def test_a_full_disk_keeps_nobody_from_training_on(runs):
    small_disk = (
        "mount -t tmpfs -o size=100k tmpfs checkpoints && "
        '{ "$@"; code=$?; cp -a checkpoints/. copy && exit $code; }'
    )
    (runs.run_dir / "copy").mkdir()
    fault = {"fault": "fill_the_disk", "fault_at": 2, "fault_rank": 0}
    runs.start("cpu", 2, prefix=small_disk, steps=3, **fault)
    runs.root = runs.run_dir / "copy"

    # Whether the other worker wrote before is chance.
    assert runs.failed == {(step, rank): step == 2 for step in (1, 2, 3) for rank in (0, 1)}
    [warning] = re.findall("warning: no checkpoint .*", runs.output)
    assert f": No space left on device: '{runs.run_dir}/checkpoints/step-00000002.tmp" in warning
    assert runs.names() == ["step-00000001", "step-00000003"]
    runs.tensors(1), runs.tensors(3)
