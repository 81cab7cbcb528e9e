"""A worker's file: one image in memory, kept from save to save, and written past the page cache."""

import errno
import fcntl
import hashlib
import os

import pytest
import torch
from safetensors.torch import load_file

from trnslurm.saves import memory as memories
from trnslurm.saves.memory import PAGE, HostCopy
from trnslurm.train.checkpoint.state import TensorShard
from trnslurm.train.checkpoint.tensors import pieces_of

# Types and sizes after which, in this order, the next tensor would begin at an odd place.
STATE = {
    "half": torch.arange(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "wide": torch.arange(6, dtype=torch.float64).view(2, 3),
    "turned": torch.arange(2000, dtype=torch.float32).view(40, 50).T,
    "none": torch.empty(0, 4),
}


def shards_of(state):
    return [
        TensorShard(name, "parameter", range(len(t) if t.dim() else 1), t)
        for name, t in state.items()
    ]


def write_and_check(memory, path, state):
    memory.copy(pieces_of(shards_of(state)))
    written = memory.write(path)
    content = path.read_bytes()
    assert written == (len(content), hashlib.sha256(content).hexdigest())
    loaded = load_file(path)
    assert loaded.keys() == {f"parameter/{name}" for name in state}
    for name, tensor in state.items():
        assert torch.equal(loaded[f"parameter/{name}"], tensor)
        assert loaded[f"parameter/{name}"].dtype == tensor.dtype


def test_the_file_is_what_safetensors_reads(tmp_path):
    write_and_check(HostCopy(), tmp_path / "a", STATE)
    assert (tmp_path / "a").stat().st_size % PAGE


def test_the_memory_is_kept_from_save_to_save(tmp_path):
    memory = HostCopy()
    large = {"more": torch.ones(5000), **STATE}
    write_and_check(memory, tmp_path / "a", large)
    place = memory._memory.data_ptr()
    # What the larger one left behind the end of the smaller one is not in its file.
    write_and_check(memory, tmp_path / "b", STATE)
    assert memory._memory.data_ptr() == place
    assert place % PAGE == 0


def needs_direct_writes(directory):
    try:
        os.close(os.open(directory / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct writes in {directory}: {error.strerror}")


def test_whole_pages_pass_the_page_cache_by(tmp_path, monkeypatch):
    needs_direct_writes(tmp_path)
    monkeypatch.setattr(memories, "BLOCK", PAGE)
    seen, write = [], memories._write

    def note(file, block):
        seen.append((len(block), bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)))
        return write(file, block)

    monkeypatch.setattr(memories, "_write", note)
    write_and_check(HostCopy(), tmp_path / "a", STATE)
    assert seen == [(PAGE, True)] * -(-(tmp_path / "a").stat().st_size // PAGE)


def test_where_direct_writes_cannot_begin_files_are_written_plainly(tmp_path, monkeypatch):
    refused, plain = [], os.open

    def refuse(path, flags, *args):
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    write_and_check(HostCopy(), tmp_path / "a", STATE)
    assert refused == [tmp_path / "a"]


def test_after_a_direct_write_that_is_refused_the_rest_is_written_plainly(tmp_path, monkeypatch):
    needs_direct_writes(tmp_path)
    # No file system takes that directly; so is what is left of a write that was cut short.
    monkeypatch.setattr(memories, "BLOCK", 1001)
    write_and_check(HostCopy(), tmp_path / "a", STATE)
