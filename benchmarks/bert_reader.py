"""Reading BERT's HDF5 shards: train.data.shards and a Dataset that converts each sample.

    .venv/bin/python benchmarks/bert_reader.py

The peer does what scripts for this format do: it reads a shard whole, draws its samples at random
and makes tensors, and labels of every token, of each sample by itself; a DataLoader without worker
processes stacks them. `rows of the file` asks the file for each micro-batch's random rows instead.
All give micro-batches of the same shards, and time begins with a closed file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reporting

SEQ_LEN, MAX_PRED, VOCAB_SIZE = 128, 20, 30522
MICRO_BATCH = 16
ROWS = 64  # of those that take so long that a few must do
PEER = "Dataset, per sample"


def main() -> None:
    """Read with each in turn and print medians."""
    parser = reporting.make_parser("Compare readers of BERT's HDF5 shards.", rounds=3)
    parser.add_argument("--shards", type=reporting.at_least_one, default=4, help="(4)")
    parser.add_argument("--samples", type=reporting.at_least_one, default=20_000, help="each")
    options = parser.parse_args()
    reporting.require("h5py", "numpy", "torch")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_shards(directory, options)
        readers: dict[str, Callable[[], int]] = {
            "trnslurm.train.data.shards": lambda: read_ours(directory),
            PEER: lambda: read_per_sample(directory),
            "rows of the file": lambda: read_rows_of_file(directory),
        }
        report(measure(readers, options.rounds), options)


def measure(readers: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Return samples/s of each reader in every round."""
    results: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds):
        for name, read in readers.items():
            start = time.perf_counter()
            samples = read()
            results[name].append(samples / (time.perf_counter() - start))
    return results


def report(results: dict[str, list[float]], options: argparse.Namespace) -> None:
    """Print medians, and ratios to the peer of the same round."""
    rows = [
        {
            "name": name,
            "samples_per_s": statistics.median(rates),
            "ratio": statistics.median(a / b for a, b in zip(rates, results[PEER], strict=True)),
        }
        for name, rates in results.items()
    ]
    columns = {
        "name": ("", ""),
        "samples_per_s": ("samples/s", ",.0f"),
        "ratio": ("ratio", ",.3g"),
    }
    title = f"{options.shards} shards of {options.samples:,} samples, sequence length {SEQ_LEN}"
    title += f", medians of {options.rounds} rounds; ratio to {PEER}"
    reporting.report(title, rows, columns, options.json)


def write_shards(directory: Path, options: argparse.Namespace) -> None:
    """Write shards as NVIDIA's preparation does, of random words as frequent as in a text."""
    import h5py
    import numpy as np

    dice = np.random.default_rng(1)
    shape = (options.samples, SEQ_LEN)
    for number in range(options.shards):
        ids = 999 + np.minimum(dice.zipf(1.2, shape), VOCAB_SIZE - 1000)
        # Sorted and different: distances from one to the next of at least one.
        steps = dice.integers(1, SEQ_LEN // MAX_PRED, (options.samples, MAX_PRED))
        positions = np.cumsum(steps, axis=1)
        columns = {
            "input_ids": (ids, "i4"),
            "input_mask": (np.ones(shape), "i1"),
            "segment_ids": (np.arange(SEQ_LEN) >= dice.integers(9, 99, (options.samples, 1)), "i1"),
            "masked_lm_positions": (positions, "i4"),
            "masked_lm_ids": (np.take_along_axis(ids, positions, 1), "i4"),
            "next_sentence_labels": (dice.integers(0, 2, options.samples), "i1"),
        }
        with h5py.File(directory / f"a_training_{number}.hdf5", "w") as file:
            for key, (values, kind) in columns.items():
                file.create_dataset(key, data=values, dtype=kind, compression="gzip")


def read_ours(directory: Path) -> int:
    """Read an epoch in micro-batches; the first round looks at the shards for its index too."""
    from trnslurm.train.data.shards.index import index_shards
    from trnslurm.train.data.shards.reader import ShardedSamples

    index_shards(directory, "train", beside=directory)
    shards = ShardedSamples(
        directory, split="train", beside=directory, vocab_size=VOCAB_SIZE, seed=1
    )
    for first in range(0, shards.num_samples, MICRO_BATCH):
        shards.samples(first, MICRO_BATCH)
    return shards.num_samples


def read_per_sample(directory: Path) -> int:
    """Read an epoch as the peer does."""
    from torch.utils.data import DataLoader, RandomSampler

    samples = 0
    for path in sorted(directory.glob("*.hdf5")):
        dataset: Any = PerSample(path)
        loader: Any = DataLoader(dataset, MICRO_BATCH, sampler=RandomSampler(dataset))
        samples += sum(len(batch[0]) for batch in loader)
    return samples


class PerSample:
    """A shard in memory, of which each sample is converted when it is asked for."""

    def __init__(self, path: Path) -> None:
        import h5py

        from trnslurm.train.data.shards.files import KEYS

        with h5py.File(path) as file:
            self._columns = [file[key][:] for key in KEYS]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        import torch

        values = [torch.as_tensor(column[index]).long() for column in self._columns]
        ids, mask, segments, positions, masked_ids, next_sentence = values
        unused = (positions == 0).nonzero()
        count = unused[0].item() if len(unused) else len(positions)
        labels = torch.full_like(ids, -100)
        labels[positions[:count]] = masked_ids[:count]
        return ids, segments, mask, labels, next_sentence


def read_rows_of_file(directory: Path) -> int:
    """Read a few micro-batches of random rows of one shard."""
    import h5py
    import numpy as np

    from trnslurm.train.data.shards.files import KEYS

    with h5py.File(next(directory.glob("*.hdf5"))) as file:
        rows = np.random.default_rng(1).permutation(len(file["input_ids"]))[:ROWS]
        for batch in batches(rows):
            for key in KEYS:
                file[key][np.sort(batch)]
    return ROWS


def batches(rows: Any) -> Iterator[Any]:
    """Cut rows into micro-batches."""
    for first in range(0, len(rows), MICRO_BATCH):
        yield rows[first : first + MICRO_BATCH]


if __name__ == "__main__":
    main()
