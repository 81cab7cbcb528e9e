"""Parameters read from a checkpoint by those who are no worker of the run."""

import os

import pytest
import torch

from trnslurm.train.checkpoint.reading import newest_whole, prove, read_parameters
from trnslurm.train.errors import TrainError


@pytest.mark.parametrize("workers", [1, 3])
def test_parameters_are_whole_whoever_wrote_them(team, workers):
    writers = team(workers)
    writers.save(1, 2)

    parameters = read_parameters(writers.root / "step-00000002")
    assert set(parameters) == set(writers.names)
    assert parameters["scale"].shape == ()
    for name, tensor in parameters.items():
        assert torch.equal(tensor, writers.value(name, "parameter", 2))


def test_a_damaged_one_is_an_error_and_stays_where_it_is(team):
    writers = team()
    writers.save(1, 2)
    checkpoint = writers.root / "step-00000002"
    os.truncate(writers.file(2), writers.file(2).stat().st_size - 4)

    with pytest.raises(TrainError, match=r"step-00000002 is damaged \(rank-00001-.*take another"):
        read_parameters(checkpoint)
    manifest, damaged = newest_whole(writers.root)
    assert manifest == prove(writers.root / "step-00000001")
    assert [path for path, _ in damaged] == [checkpoint]
    assert writers.steps() == [1, 2]


def test_what_is_no_checkpoint_is_refused(team):
    writers = team()
    writers.save(1)
    writers.file(1).parent.rename(writers.root / "step-00000001.damaged-2")

    for name in ("step-00000001.damaged-2", "", "step-1"):
        with pytest.raises(TrainError, match="is no checkpoint: name a directory such as"):
            read_parameters(writers.root / name)
    with pytest.raises(TrainError, match="step-00000001: no such checkpoint"):
        read_parameters(writers.root / "step-00000001")


def test_files_that_go_while_they_are_read_are_one_line(team):
    writers = team()
    writers.save(1)
    manifest = prove(writers.root / "step-00000001")
    writers.file(1).unlink()

    with pytest.raises(TrainError, match="step-00000001: cannot be read"):
        read_parameters(writers.root / "step-00000001", manifest)
