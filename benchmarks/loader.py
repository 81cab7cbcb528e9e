"""Samples per second of trnslurm.loader and trnslurm.mix, and of torchdata and mosaicml-streaming.

    .venv/bin/python benchmarks/loader.py --peer .venv-libraries/bin/python

All read the same 8,000 blocks of 1,024 tokens from the local disk, once, in a shuffled order, as
batches of eight. The first batch does not count for samples/s: before it, worker processes start.
The processor time is that of all processes, and depends less on other load.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import reporting

SAMPLES, TOKENS, BATCH = 8_000, 1024, 8
PROCESSES = (0, 1, 2)
SOURCES = {"web": 0.6, "code": 0.3, "math": 0.1}
OURS = "trnslurm"
# The table's parts: what is read, and the peer that ratios refer to.
PARTS = {
    "array": "StatefulDataLoader",
    "MDS": "mosaicml-streaming",
    "mix of three MDS": "mosaicml-streaming",
}


def main() -> None:
    """Measure everything in turn, round after round."""
    parser = reporting.make_parser(__doc__.partition("\n")[0], rounds=5)
    parser.add_argument("--peer", default=sys.executable, help="a Python that has the peers")
    parser.add_argument("--measure", metavar="DIRECTORY", help="(in the peer's Python)")
    options = parser.parse_args()
    if not options.measure:
        with tempfile.TemporaryDirectory() as directory:
            command = [options.peer, __file__, "--measure", directory]
            command += ["--rounds", str(options.rounds), *(["--json"] if options.json else [])]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
            sys.exit(subprocess.run(command, env=environment).returncode)
    reporting.require("torch", "torchdata", "streaming")
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # streaming's
    readers = make_readers(Path(options.measure))
    measured: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for processes in PROCESSES:
            for (part, name), read in readers.items():
                found = measure(read, processes)
                measured.setdefault((part, name, processes), []).append(found)
    rows = []
    for (part, name, processes), rounds in measured.items():
        pairs = [*zip(rounds, measured[part, PARTS[part], processes], strict=True)]
        rows.append({
            "name": name, "part": part, "processes": processes,
            "rate": median(rate for rate, _ in rounds),
            "ratio": median(ours[0] / peer[0] for ours, peer in pairs),
            "cpu": median(cpu for _, cpu in rounds) * 1e6,
            "cpu_ratio": median(peer[1] / ours[1] for ours, peer in pairs),
        })  # fmt: skip
    rows.sort(key=lambda row: (list(PARTS).index(row["part"]), row["processes"]))
    columns = {
        "part": ("", ""), "name": ("", ""), "processes": ("processes", "d"),
        "rate": ("samples/s", ",.0f"), "ratio": ("ratio", ".2f"),
        "cpu": ("CPU µs/sample", ",.0f"), "cpu_ratio": ("ratio", ".2f"),
    }  # fmt: skip
    title = f"One epoch of {SAMPLES:,} samples, medians of {options.rounds} rounds"
    reporting.report(title, rows, columns, options.json)


def measure(read: Callable[[int], Any], processes: int) -> tuple[float, float]:
    """Return the samples per second after the first batch, and the processor seconds per sample."""
    before = processor_s()
    batches: Iterator[Any] = iter(read(processes))
    next(batches)
    begin, count = time.perf_counter(), 0
    for batch in batches:
        count += len(batch["input_ids"])
    rate = count / (time.perf_counter() - begin)
    del batches, batch  # the worker processes end here
    gc.collect()
    return rate, (processor_s() - before) / SAMPLES


def processor_s() -> float:
    """Return the processor time of this process and of those that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def make_readers(directory: Path) -> dict[tuple[str, str], Callable[[int], Any]]:
    """Write the data, and return what reads it with some number of worker processes."""
    import numpy as np
    import torch
    from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
    from torch.utils.data import DataLoader, DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    import trnslurm

    tokens = np.random.default_rng(1).integers(0, 50_000, (SAMPLES, TOKENS), np.int32)
    np.save(directory / "tokens.npy", tokens)
    paths = {"all": range(SAMPLES)}
    first = 0
    for name, share in SOURCES.items():
        paths[name] = range(first, first := first + int(share * SAMPLES))
    for name, numbers in paths.items():
        columns = {"input_ids": f"ndarray:int32:{TOKENS}"}
        with MDSWriter(out=str(directory / name), columns=columns) as writer:
            for number in numbers:
                writer.write({"input_ids": tokens[number]})

    class Array(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.tokens = np.load(directory / "tokens.npy", mmap_mode="r")

        def __len__(self) -> int:
            return len(self.tokens)

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"input_ids": torch.from_numpy(self.tokens[number].copy())}

    def ours(processes: int, dataset: Any, **options: Any) -> Any:
        return trnslurm.loader(
            dataset, micro_batch=BATCH, num_workers=processes, rank=0, world_size=1, **options
        )

    def mixed(processes: int) -> Any:
        datasets = {name: trnslurm.dataset(directory / name) for name in SOURCES}
        mix = trnslurm.mix({name: (len(each), SOURCES[name]) for name, each in datasets.items()},
                           global_batch=BATCH)  # fmt: skip
        return ours(processes, datasets, mix=mix, steps_per_epoch=SAMPLES // BATCH)

    def sampled(kind: Any, processes: int) -> Any:
        data = Array()
        order = DistributedSampler(data, 1, 0)
        return kind(data, BATCH, sampler=order, num_workers=processes)

    def streamed(processes: int, **options: Any) -> Any:
        dataset = StreamingDataset(shuffle=True, batch_size=BATCH, **options)
        return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=processes)

    def streams() -> list[Any]:
        return [Stream(local=str(directory / name), proportion=share)
                for name, share in SOURCES.items()]  # fmt: skip

    return {
        ("array", OURS): lambda n: ours(n, Array(), global_batch=BATCH),
        ("array", f"{OURS}, scales"): lambda n: ours(n, Array(), global_batch=BATCH, scales=True),
        ("array", "StatefulDataLoader"): lambda n: sampled(StatefulDataLoader, n),
        ("array", "DataLoader"): lambda n: sampled(DataLoader, n),
        ("MDS", OURS): lambda n: ours(n, trnslurm.dataset(directory / "all"), global_batch=BATCH),
        ("MDS", "mosaicml-streaming"): lambda n: streamed(n, local=str(directory / "all")),
        ("mix of three MDS", OURS): mixed,
        ("mix of three MDS", "mosaicml-streaming"): lambda n: streamed(n, streams=streams()),
    }


if __name__ == "__main__":
    main()
