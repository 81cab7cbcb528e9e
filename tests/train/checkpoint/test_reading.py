"""Parameters read from a checkpoint by those who are no worker of the run."""

import pytest
import torch

from trnslurm.train.checkpoint.reading import Parameters, prove
from trnslurm.train.errors import TrainError


@pytest.mark.parametrize("workers", [1, 3])
def test_parameters_are_whole_whoever_wrote_them(team, workers):
    writers = team(workers)
    writers.save(1, 2)

    checkpoint = writers.root / "step-00000002"
    parameters = Parameters(checkpoint, prove(checkpoint))
    assert set(parameters) == set(writers.names)
    assert parameters["scale"].shape == ()
    for name, tensor in parameters.items():
        assert torch.equal(tensor, writers.value(name, "parameter", 2))


def test_what_is_no_checkpoint_is_refused(team):
    writers = team()
    writers.save(1)
    writers.file(1).parent.rename(writers.root / "step-00000001.damaged-2")

    for name in ("step-00000001.damaged-2", "", "step-1"):
        with pytest.raises(TrainError, match="is not a checkpoint: name a directory such as"):
            prove(writers.root / name)
    with pytest.raises(TrainError, match="step-00000001: no such checkpoint"):
        prove(writers.root / "step-00000001")


def test_files_that_go_while_they_are_read_are_one_line(team):
    writers = team()
    writers.save(1)
    manifest = prove(writers.root / "step-00000001")
    writers.file(1).unlink()

    with pytest.raises(TrainError, match="step-00000001: cannot be read"):
        dict(Parameters(writers.root / "step-00000001", manifest))
