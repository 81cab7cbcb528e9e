"""Shards are the same to HDF5, whoever compressed them."""

import h5py
import numpy as np
import pytest

from trnslurm.prepare.bert import shards
from trnslurm.prepare.bert.settings import SampleSettings

pytest.importorskip("deflate")
SETTINGS = SampleSettings(
    seq_len=16, max_pred=3, masked_lm_prob=0.15, dupe_factor=1, whole_words=False, seed=1
)


@pytest.mark.parametrize("samples", [1, 127, 128, 129, 2500])
def test_samples_compressed_by_libdeflate_are_read_by_hdf5(tmp_path, monkeypatch, samples):
    dice = np.random.default_rng(samples)
    step = shards._ROWS_AT_ONCE
    found = []
    for name in ("libdeflate", "zlib"):
        with h5py.File(tmp_path / name, "w") as file:
            for key, dtype in shards.DTYPES.items():
                shards._create(file, key, dtype, samples, SETTINGS)
                values = np.random.default_rng(5).integers(0, 99, file[key].shape)
                for first in range(0, samples, step):
                    shards._write(file[key], first, values[first : first + step])
        with h5py.File(tmp_path / name) as file:
            found.append({key: file[key][()] for key in shards.DTYPES})
            assert {file[key].compression for key in file} == {"gzip"}
            rows = np.sort(dice.permutation(samples)[:5])
            assert np.array_equal(file["input_ids"][rows], found[-1]["input_ids"][rows])
        monkeypatch.setattr(shards, "_deflate", None)
    for key in shards.DTYPES:
        assert found[0][key].dtype == found[1][key].dtype == shards.DTYPES[key]
        assert np.array_equal(found[0][key], found[1][key])
    sizes = [(tmp_path / name).stat().st_size for name in ("libdeflate", "zlib")]
    assert sizes[0] != sizes[1] or samples < 128, "both by the same"
