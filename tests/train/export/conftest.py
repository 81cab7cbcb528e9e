"""A real run on prepared data, and its job's export script."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import run_tiny
from .folders import VOCAB_SIZE

REPO = Path(__file__).parents[3]
JOB = REPO / "jobs" / "gpt2_zero1"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Prepare the job's text."""
    directory = tmp_path_factory.mktemp("data") / "prepared"
    command = [sys.executable, "-m", "trnslurm.prepare", "--text", str(JOB / "text.txt")]
    command += ["--tokenizer", f"train:{VOCAB_SIZE}", "--holdout", "0.05"]
    subprocess.run(
        [*command, "--output", str(directory)],
        env=os.environ | {"PYTHONPATH": str(REPO), "USE_TORCH_XLA": "0"},
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    return directory


@pytest.fixture(scope="session")
def trained(tmp_path_factory, data):
    """Train on it with two workers, to checkpoints of steps 3 and 6."""
    run = run_tiny(
        tmp_path_factory.mktemp("job") / "a run's dir", planned=2, started=2,
        data=str(data), model__vocab_size=VOCAB_SIZE, steps=6, train__save_every=3,
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    return run


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy of the run that a test may spoil."""
    return shutil.copytree(trained.directory, tmp_path / "a run's dir")


@pytest.fixture
def export(run_dir, monkeypatch, capfd):
    """Call the job's export script in this process; give what it printed."""
    spec = importlib.util.spec_from_file_location("export_of_gpt2", JOB / "export.py")
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*options):
        words = ["export.py", run_dir / "plan.json", *options]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        capfd.readouterr()
        job.export_job(job.make_model, job.text_tokens)
        return capfd.readouterr()

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)
