"""Tokenizing and packing text: trnslurm.prepare beside a loop of datasets.map and group_texts.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install datasets tokenizers
    .venv/bin/python benchmarks/packing.py --peer /tmp/peer/bin/python

The limit is the fastest encoder alone, tiktoken with GPT-2's own expression where its ids are
proven equal and else tokenizers, in a plain loop over the lines that keeps nothing. The goal is 0.9
of it, with all start-up, and 1.8 times as fast with two processes.

All get the same lines and tokenizer, and run in turn, each as a process of its own with all its
start-up; the peer calls the tokenizers library directly, without the cost of transformers'
wrapping. It gets as many processes as the last of ours. Memory is that of all processes together
(each shared page counted once). CPU is their processor time: on a busy machine it says more than
seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reporting

REPO = Path(__file__).parents[1]
TEXT = REPO / "jobs" / "gpt2_zero1" / "text.txt"
VOCAB_SIZE = 4096
# https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
BLOCK = 1024
SAMPLE_EVERY_S = 0.05
OURS, PEER = "trnslurm.prepare", "datasets, group_texts"
LIMIT = "encoder alone"
GOAL, GOAL_OF_PROCESSES = 0.9, 0.9


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run."""

    seconds: float
    cpu_seconds: float
    megabytes: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Of tokens that were kept."""
        return self.tokens / self.seconds


def main() -> None:
    """Run both in turn and print medians."""
    parser = reporting.make_parser("Compare tokenizing and packing of text.", rounds=3)
    parser.add_argument("--peer", metavar="PYTHON", help="one that has datasets and tokenizers")
    sizes = [60, 400]
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=sizes, help="of text (60 400)"
    )
    parser.add_argument("--processes", type=int, default=2, help="beside one (2)")
    parser.add_argument("--as-peer", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--as-encoder", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_encoder:
        text, tokenizer = options.as_encoder
        print(json.dumps(run_encoder(Path(text), Path(tokenizer))))
        return
    if options.as_peer:
        text, tokenizer, cache, processes = options.as_peer
        print(json.dumps(run_peer(text, tokenizer, cache, int(processes))))
        return
    reporting.require("tokenizers", "numpy")
    if options.peer:
        check_peer(options.peer)
    rows: list[reporting.Row] = []
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as directory:
            rows += summarize(compare(options, megabytes, Path(directory)), options, megabytes)
    report(rows, options)


def check_peer(python: str) -> None:
    """End with one line if the peer cannot run there."""
    try:
        check = [python, "-c", "import datasets, tokenizers"]
        done = subprocess.run(check, capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"error: --peer {python}: {error.strerror}")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        sys.exit(f"error: --peer {python}: {last}: {python} -m pip install datasets tokenizers")


def summarize(
    results: dict[str, list[Measured]], options: argparse.Namespace, megabytes: float
) -> list[reporting.Row]:
    """Return rows of medians, and of ratios to others of the same round."""
    rows: list[reporting.Row] = []
    for name, runs in results.items():
        pairs = list(zip(runs, results.get(PEER, []), strict=False))
        limits = list(zip(runs, results[LIMIT], strict=True))
        ones = list(zip(runs, results[ours(1)], strict=True))
        is_ours = name.startswith(OURS)
        row: reporting.Row = {
            "name": name,
            "text": megabytes,
            "seconds": statistics.median(run.seconds for run in runs),
            "cpu_seconds": statistics.median(run.cpu_seconds for run in runs),
            "tokens_per_s": statistics.median(run.tokens_per_s for run in runs),
            "megabytes": statistics.median(run.megabytes for run in runs),
            "tokens": runs[0].tokens,
            "speed_ratio": median(run.tokens_per_s / peer.tokens_per_s for run, peer in pairs),
            "memory_ratio": median(run.megabytes / peer.megabytes for run, peer in pairs),
            "of_limit": median(run.tokens_per_s / limit.tokens_per_s for run, limit in limits),
            "to_one": median(run.tokens_per_s / one.tokens_per_s for run, one in ones)
            if is_ours
            else None,
            "goal": None
            if not is_ours
            else f"{GOAL} of limit"
            if name == ours(1)
            else f"{GOAL_OF_PROCESSES * options.processes:.1f} to one",
        }
        rows.append(row)
    return rows


def report(rows: list[reporting.Row], options: argparse.Namespace) -> None:
    """Print the rows."""
    columns = {
        "name": ("", ""),
        "text": ("MB of text", "g"),
        "seconds": ("s", ".1f"),
        "cpu_seconds": ("CPU s", ".1f"),
        "tokens_per_s": ("tokens/s", ",.0f"),
        "speed_ratio": ("ratio", ".2f"),
        "of_limit": ("of limit", ".2f"),
        "to_one": ("to one", ".2f"),
        "goal": ("goal", ""),
        "megabytes": ("MB peak", ",.0f"),
        "memory_ratio": ("ratio", ".2f"),
        "tokens": ("tokens kept", ","),
    }
    title = f"Medians of {options.rounds} rounds; ratios to {PEER}"
    reporting.report(title, rows, columns, options.json)


def median(values: Iterable[float]) -> float | None:
    """Return the median, or None if there was no peer."""
    known = list(values)
    return statistics.median(known) if known else None


def compare(
    options: argparse.Namespace, megabytes: float, directory: Path
) -> dict[str, list[Measured]]:
    """Run each in every round."""
    text = write_text(directory / "text.txt", megabytes)
    tokenizer = directory / "base" / "tokenizer.json"
    base = ["--text", str(TEXT), "--tokenizer", f"train:{VOCAB_SIZE}"]
    prepare = [sys.executable, "-m", "trnslurm.prepare"]
    measure([*prepare, "--output", str(tokenizer.parent), *base])
    same = [*prepare, "--document-per", "line", "--tokenizer", str(tokenizer), "--json"]
    counts = sorted({1, options.processes})
    results: dict[str, list[Measured]] = {ours(count): [] for count in counts}
    results[LIMIT] = []
    if options.peer:
        results[PEER] = []
    for number in range(options.rounds):
        for count in counts:
            output = directory / f"prepared-{number}-{count}"
            command = [*same, "--processes", str(count)]
            used, out = measure([*command, "--text", str(text), "--output", str(output)])
            results[ours(count)].append(Measured(**used, tokens=kept(out)))
        encoder = [sys.executable, __file__, "--as-encoder", str(text), str(tokenizer)]
        used, out = measure(encoder)
        results[LIMIT].append(Measured(**(used | out[0])))  # its loop only
        if options.peer:
            cache = directory / f"cache-{number}"
            arguments = [str(text), str(tokenizer), str(cache), str(options.processes)]
            command = [options.peer, __file__, "--as-peer", *arguments]
            used, out = measure(command)
            results[PEER].append(Measured(**used, tokens=out[0]["tokens"]))
    return results


def kept(results: list[Any]) -> int:
    """Return the tokens that runs of ours made, less the ends of text: the peer writes none."""
    splits = [split for out in results for split in out["index"]["splits"].values()]
    return sum(split["tokens"] - split["documents"] for split in splits)


def ours(processes: int) -> str:
    """Return the name of our row."""
    return f"{OURS}, {processes} process{'es' if processes > 1 else ''}"


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


def measure(command: list[str]) -> tuple[dict[str, float], list[Any]]:
    """Run a command; return its seconds, those of CPU and its most memory, and its JSON."""
    environ = os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
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
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    used = {"seconds": seconds, "cpu_seconds": cpu_seconds, "megabytes": peak[0]}
    return used, [json.loads(line) for line in out.splitlines() if line.startswith("{")]


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


def run_encoder(text: Path, tokenizer_file: Path) -> dict[str, float]:
    """Make tokens of lines with the fastest encoder, and nothing else."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from trnslurm.prepare import bytepairs, tokenizer

    encoder = tokenizer.read(tokenizer_file)
    pairs = bytepairs.find(encoder)
    lines = text.read_text().splitlines()
    start, cpu = time.perf_counter(), time.process_time()
    tokens = 0
    if pairs:
        import tiktoken

        encoding: Any = tiktoken.Encoding(
            "plain", pat_str=GPT2, mergeable_ranks=bytepairs._ranks(encoder), special_tokens={}
        )
        for line in lines:
            tokens += len(encoding.encode_ordinary(line))
    else:
        for first in range(0, len(lines), 1000):
            some = lines[first : first + 1000]
            encodings = encoder.encode_batch_fast(some, add_special_tokens=False)
            tokens += sum(len(encoding.ids) for encoding in encodings)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "tokens": tokens,
    }


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
