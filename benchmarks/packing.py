"""Tokenizing and packing text: trnslurm.prepare beside a loop of datasets.map and group_texts.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install datasets tokenizers
    .venv/bin/python benchmarks/packing.py --peer /tmp/peer/bin/python

Both get the same lines, tokenizer and number of processes, and run in turn, each as a process of
its own with all its start-up; the peer calls the tokenizers library directly, without the cost of
transformers' wrapping. Memory is that of all processes together (each shared page counted once).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
TEXT = REPO / "jobs" / "gpt2_zero1" / "text.txt"
VOCAB_SIZE = 4096
BLOCK = 1024
SAMPLE_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run."""

    seconds: float
    megabytes: float
    tokens: int


def main() -> None:
    """Run both in turn and print medians."""
    parser = argparse.ArgumentParser(description="Compare tokenizing and packing of text.")
    parser.add_argument("--peer", metavar="PYTHON", help="one that has datasets and tokenizers")
    parser.add_argument("--megabytes", type=float, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-peer", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_peer:
        text, tokenizer, cache, processes = options.as_peer
        print(json.dumps(run_peer(text, tokenizer, cache, int(processes))))
        return
    with tempfile.TemporaryDirectory() as directory:
        results = compare(options, Path(directory))
    print(f"{options.megabytes:g} MB, {options.processes} processes, {options.rounds} rounds")
    print(f"{'':22}{'s':>8}{'tokens/s':>12}{'MB peak':>10}{'tokens kept':>14}")
    for name, runs in results.items():
        seconds = statistics.median(run.seconds for run in runs)
        megabytes = statistics.median(run.megabytes for run in runs)
        tokens = runs[0].tokens
        print(f"{name:22}{seconds:8.1f}{tokens / seconds:12,.0f}{megabytes:10,.0f}{tokens:14,}")


def compare(options: argparse.Namespace, directory: Path) -> dict[str, list[Measured]]:
    """Run each in every round."""
    text = write_text(directory / "text.txt", options.megabytes)
    tokenizer = directory / "base" / "tokenizer.json"
    base = ["--text", str(TEXT), "--tokenizer", f"train:{VOCAB_SIZE}"]
    prepare = [sys.executable, "-m", "trnslurm.prepare"]
    measure([*prepare, "--output", str(tokenizer.parent), *base])
    results: dict[str, list[Measured]] = {"trnslurm.prepare": []}
    if options.peer:
        results["datasets, group_texts"] = []
    for number in range(options.rounds):
        output = directory / f"prepared-{number}"
        command = ["--text", str(text), "--document-per", "line", "--tokenizer", str(tokenizer)]
        command += ["--output", str(output), "--processes", str(options.processes), "--json"]
        seconds, megabytes, out = measure([*prepare, *command])
        splits = out["index"]["splits"].values()
        # Without the ends of text, which the peer does not write.
        tokens = sum(split["tokens"] - split["documents"] for split in splits)
        run = Measured(seconds=seconds, megabytes=megabytes, tokens=tokens)
        results["trnslurm.prepare"].append(run)
        if options.peer:
            cache = directory / f"cache-{number}"
            arguments = [str(text), str(tokenizer), str(cache), str(options.processes)]
            command = [options.peer, __file__, "--as-peer", *arguments]
            seconds, megabytes, out = measure(command)
            run = Measured(seconds=seconds, megabytes=megabytes, tokens=out["tokens"])
            results["datasets, group_texts"].append(run)
    return results


def write_text(path: Path, megabytes: float) -> Path:
    """Write lines of the job's text in a random order, words of each shuffled."""
    lines = [line.split() for line in TEXT.read_text().splitlines() if line]
    dice = random.Random(1)
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            # About as long as a paragraph of WikiText.
            words = [word for _ in range(6) for word in dice.choice(lines)]
            dice.shuffle(words)
            file.write(" ".join(words) + "\n")
    return path


def measure(command: list[str]) -> tuple[float, float, Any]:
    """Run a command; give its seconds, the most memory of all its processes, and its JSON."""
    environ = os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    peak = [0.0]
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(process.pid, peak, done))
    watcher.start()
    out, err = process.communicate()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"error: {command}: {err}")
    return seconds, peak[0], json.loads(out) if out.startswith("{") else None


def watch(session: int, peak: list[float], done: threading.Event) -> None:
    """Sample the memory of a session's processes."""
    while not done.wait(SAMPLE_EVERY_S):
        kilobytes = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.getsid(int(process.name)) == session:
                    rollup = (process / "smaps_rollup").read_text()
                    kilobytes += int(rollup.partition("\nPss:")[2].split()[0])
            except (OSError, IndexError):
                continue  # it ended
        peak[0] = max(peak[0], kilobytes / 1000)


def run_peer(text: str, tokenizer_file: str, cache: str, processes: int) -> dict[str, int]:
    """Tokenize and pack as training scripts of transformers do."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from datasets import load_dataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    def group_texts(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = [token for ids in rows["input_ids"] for token in ids]
        whole = len(joined) // BLOCK * BLOCK
        return {"input_ids": [joined[i : i + BLOCK] for i in range(0, whole, BLOCK)]}

    rows = load_dataset("text", data_files=text, split="train", cache_dir=cache)
    tokens = rows.map(tokenize, batched=True, num_proc=processes, remove_columns=["text"])
    blocks = tokens.map(group_texts, batched=True, num_proc=processes)
    return {"tokens": len(blocks) * BLOCK}


if __name__ == "__main__":
    main()
