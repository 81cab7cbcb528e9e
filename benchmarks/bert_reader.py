"""Reading BERT's HDF5 shards: train.data.shards and a Dataset that converts each sample.

    .venv/bin/python benchmarks/bert_reader.py

The peer does what scripts for this format do: it reads a shard whole, draws its samples at random
and makes tensors, and labels of every token, of each sample by itself; a DataLoader without worker
processes stacks them. `rows of the file` asks the file for each micro-batch's random rows instead.
All give micro-batches of the same shards, and time begins with a closed file.

Then a node: as many processes as a trn1.32xlarge has workers read their units of each step, and
count what their host's main thread and all their threads need of a processor. *busy* is that as a
share of the time in which the accelerator trains so many samples, at a published speed. Here the
processes have few cores, so seconds say nothing; processor time does.
"""

from __future__ import annotations

import argparse
import multiprocessing
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
GLOBAL_BATCH = 16384
NODE_RATE = 3826.6
"""BERT-large's phase 1 on a trn1.32xlarge, samples/s: AWS's published figure for SDK 2.28."""
GOAL = 0.02


def main() -> None:
    """Read with each in turn and print medians."""
    parser = reporting.make_parser("Compare readers of BERT's HDF5 shards.", rounds=3)
    parser.add_argument("--shards", type=reporting.at_least_one, default=4, help="(4)")
    parser.add_argument("--samples", type=reporting.at_least_one, default=20_000, help="each")
    parser.add_argument("--workers", type=reporting.at_least_one, default=32, help="(32)")
    parser.add_argument("--node-rate", type=float, default=NODE_RATE, help=f"({NODE_RATE})")
    options = parser.parse_args()
    reporting.require("h5py", "numpy", "torch")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tempfile.tempdir = name  # what a node's workers share goes with it
        write_shards(directory, options)
        readers: dict[str, Callable[[], int]] = {
            "trnslurm.train.data.shards": lambda: read_ours(directory),
            PEER: lambda: read_per_sample(directory),
            "rows of the file": lambda: read_rows_of_file(directory),
        }
        rows = summarize(measure(readers, options.rounds))
        for name, read in {
            "trnslurm.train.data.shards": lambda number: read_units(
                directory, number, options, shared=True
            ),
            "the same, not shared": lambda number: read_units(
                directory, number, options, shared=False
            ),
            PEER: lambda number: read_share(directory, number, options),
        }.items():
            rows.append({"name": f"{options.workers} x {name}"} | measure_node(read, options))
        report(rows, options)


def measure(readers: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Return samples/s of each reader in every round."""
    results: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds):
        for name, read in readers.items():
            start = time.perf_counter()
            samples = read()
            results[name].append(samples / (time.perf_counter() - start))
    return results


def summarize(results: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return medians, and ratios to the peer of the same round."""
    none = dict.fromkeys(("main_busy", "busy", "goal", "megabytes"))
    return [
        {
            "name": name,
            "samples_per_s": statistics.median(rates),
            "ratio": statistics.median(a / b for a, b in zip(rates, results[PEER], strict=True)),
        }
        | none
        for name, rates in results.items()
    ]


def measure_node(read: Callable[[int], int], options: argparse.Namespace) -> dict[str, Any]:
    """Run a node's workers at once; return their mean use of a processor, and their memory."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    results: Any = context.SimpleQueue()
    everyone = context.Barrier(options.workers)

    def work(number: int) -> None:
        everyone.wait()
        main, whole = time.thread_time(), time.process_time()
        samples = read(number)
        main, whole = time.thread_time() - main, time.process_time() - whole
        everyone.wait()  # with all of them in memory
        results.put((samples, main, whole, megabytes()))

    workers = [context.Process(target=work, args=(n,)) for n in range(options.workers)]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    trained_s = sum(samples for samples, *_ in found) / options.node_rate * len(found)
    return {
        "samples_per_s": None,
        "ratio": None,
        "main_busy": sum(main for _, main, _, _ in found) / trained_s,
        "busy": sum(whole for _, _, whole, _ in found) / trained_s,
        "goal": GOAL,
        "megabytes": sum(memory for *_, memory in found),
    }


def megabytes() -> float:
    """Return this process's memory, each shared page counted once over all processes."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("\nPss:")[2].split()[0]) / 1000


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table."""
    columns = {
        "name": ("", ""),
        "samples_per_s": ("samples/s", ",.0f"),
        "ratio": ("ratio", ",.3g"),
        "main_busy": ("main thread", ".2%"),
        "busy": ("all threads", ".2%"),
        "goal": ("goal", ".0%"),
        "megabytes": ("MB", ",.0f"),
    }
    title = f"{options.shards} shards of {options.samples:,} samples, sequence length {SEQ_LEN}"
    title += f", medians of {options.rounds} rounds; ratio to {PEER}; {options.workers} workers: "
    title += f"busy at {options.node_rate:,.0f} samples/s, MB of them all"
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


def read_units(directory: Path, worker: int, options: argparse.Namespace, *, shared: bool) -> int:
    """Read a worker's units of two epochs' steps, and the denominators of all."""
    from trnslurm.train.data.shards.reader import ShardedSamples

    shards = ShardedSamples(
        directory, split="train", beside=directory, vocab_size=VOCAB_SIZE, seed=1, shared=shared
    )
    samples = 0
    for start in range(0, 2 * shards.num_samples, GLOBAL_BATCH):
        shards.masked_tokens(start, GLOBAL_BATCH)
        for first in range(worker * MICRO_BATCH, GLOBAL_BATCH, options.workers * MICRO_BATCH):
            shards.samples(start + first, MICRO_BATCH)
            samples += MICRO_BATCH
    return samples


def read_share(directory: Path, worker: int, options: argparse.Namespace) -> int:
    """Read a worker's share of an epoch as the peer does, with a sampler that divides a shard."""
    from torch.utils.data import DataLoader, DistributedSampler

    samples = 0
    for path in sorted(directory.glob("*.hdf5")):
        dataset: Any = PerSample(path)
        sampler: Any = DistributedSampler(dataset, num_replicas=options.workers, rank=worker)
        loader: Any = DataLoader(dataset, MICRO_BATCH, sampler=sampler)
        samples += sum(len(batch[0]) for batch in loader)
    return samples


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
