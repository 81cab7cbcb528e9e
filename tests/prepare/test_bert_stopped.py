"""BERT's shards do not depend on how the work was done, nor on what stopped it."""

import pytest

from .stopping import finished, go_on, started

pytestmark = pytest.mark.rest

SHARDS = "finished/*.hdf5"
ALONE = ("--processes", 1)
TOGETHER = ("--processes", 2, "--chunk-bytes", 10_000)


@pytest.fixture(scope="module")
def long_text(text, tmp_path_factory):
    """Enough for a second of work."""
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text("\n\n".join(f"{number}: {text.read_text()}" for number in range(10)))
    return path


@pytest.fixture(scope="module")
def command(long_text):
    shards = ("--shards", 60, "--test-shards", 10, "--holdout", 0.1)
    return ("bert", "--text", long_text, "--tokenizer", "train:600", "--wrapped", *shards)


@pytest.fixture(scope="module")
def at_once(command, run_prepare, read_data, tmp_path_factory):
    """The result of one process that nothing stops."""
    output = tmp_path_factory.mktemp("at-once") / "data"
    done = run_prepare(*command, *ALONE, "--output", output, PYTHONHASHSEED="1")
    assert done.code == 0, done
    return read_data(output).files()


def test_a_run_resumes_in_each_of_its_steps(
    prepare, read_data, left_beside, command, at_once, tmp_path
):
    """And neither processes nor small chunks nor hash seeds change a byte."""
    output = tmp_path / "data"
    work = (*command, *TOGETHER)
    with started(output, work) as process:
        chunks = finished(output)
        process.kill()
    with started(output, work) as process:
        # Nothing is done twice.
        assert chunks.items() <= finished(output).items()
        process.kill()
    with started(output, work, SHARDS) as process:
        process.kill()
    shards = finished(output, SHARDS)
    with started(output, work, SHARDS) as process:
        assert shards.items() <= finished(output, SHARDS).items()
        process.terminate()
        go_on(process)
        assert process.wait(180) == 128 + 15
    assert prepare(*work, *ALONE, "--output", output).code == 0
    assert left_beside(output) == []
    assert read_data(output).files() == at_once


def test_a_damaged_shard_is_made_again(prepare, read_data, command, at_once, tmp_path):
    output = tmp_path / "data"
    work = (*command, *TOGETHER)
    with started(output, work, SHARDS) as process:
        process.kill()
    damaged, *_ = finished(output, SHARDS)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert prepare(*work, *ALONE, "--output", output).code == 0
    assert read_data(output).files() == at_once
