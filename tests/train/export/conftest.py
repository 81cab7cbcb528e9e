"""A real run on prepared data, and its job's export script."""

import functools
import shutil

import pytest

from ..attempts import Run
from ..conftest import JOB, prepare_data
from .folders import VOCAB_SIZE


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Prepare the job's text."""
    directory = tmp_path_factory.mktemp("data") / "prepared"
    tokenizer = f"train:{VOCAB_SIZE}"
    words = ("--text", JOB / "text.txt", "--tokenizer", tokenizer, "--holdout", "0.05")
    return prepare_data(directory, *words)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, data):
    """Train on it with two workers, to checkpoints of steps 3 and 6."""
    run = Run(
        tmp_path_factory.mktemp("job") / "a run's dir", data=str(data),
        model__vocab_size=VOCAB_SIZE, steps=6, train__save_every=3,
    )  # fmt: skip
    run.output = run.undisturbed()
    return run


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy of the run that a test may spoil."""
    return shutil.copytree(trained.path, tmp_path / "a run's dir")


@pytest.fixture
def export(run_dir, run_export):
    """Call the job's export script in this process; give what it printed."""
    return functools.partial(run_export, JOB, run_dir)
