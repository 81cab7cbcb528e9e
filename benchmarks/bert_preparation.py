"""Making BERT's samples: trnslurm.prepare bert beside a plain loop over documents and tokens.

    .venv/bin/python benchmarks/bert_preparation.py

The loop is the classical one of create_pretraining_data.py, written anew: Python lists of tokens, a
shuffle of each sample's places, everything in memory, one HDF5 file at the end. It gets the same
sentences, one a line, the same tokenizer from the same fast library (the scripts in use have a
slower one), and makes as many samples of as many passes. Both are one process each and run in turn.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reporting

REPO = Path(__file__).parents[1]
TEXT = REPO / "jobs" / "gpt2_zero1" / "text.txt"
VOCAB_SIZE = 1024
MASKED_LM_PROB, DUPE_FACTOR, SHORT_SHARE, SEED = 0.15, 5, 0.1, 12345
OURS, PEER = "trnslurm.prepare bert", "plain loop"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run."""

    cpu_seconds: float
    """Of the process and its children: what other programs take does not count."""
    samples: int

    @property
    def samples_per_s(self) -> float:
        """Of one core."""
        return self.samples / self.cpu_seconds


def main() -> None:
    """Run both in turn and print medians."""
    parser = reporting.make_parser("Compare the making of BERT's samples.", rounds=3)
    parser.add_argument("--megabytes", type=float, default=8, help="of text (8)")
    parser.add_argument("--seq-len", type=int, default=128, help="(128)")
    parser.add_argument("--max-pred", type=int, default=20, help="(20)")
    parser.add_argument("--whole-words", action="store_true", help="ours; the loop knows tokens")
    parser.add_argument("--as-peer", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    reporting.require("tokenizers", "numpy", "h5py")
    if options.as_peer:
        text, tokenizer, output = options.as_peer
        print(run_peer(text, tokenizer, output, options.seq_len, options.max_pred))
        return
    with tempfile.TemporaryDirectory() as directory:
        report(compare(options, Path(directory)), options)


def report(results: dict[str, list[Measured]], options: argparse.Namespace) -> None:
    """Print medians, and ratios to the loop of the same round."""
    rows = []
    for name, runs in results.items():
        pairs = zip(runs, results[PEER], strict=True)
        row = {
            "name": name,
            "samples_per_s": statistics.median(run.samples_per_s for run in runs),
            "ratio": statistics.median(r.samples_per_s / p.samples_per_s for r, p in pairs),
            "cpu_seconds": statistics.median(run.cpu_seconds for run in runs),
            "samples": runs[0].samples,
        }
        rows.append(row)
    columns = {
        "name": ("", ""),
        "samples_per_s": ("samples/s per core", ",.0f"),
        "ratio": ("ratio", ".1f"),
        "cpu_seconds": ("CPU s", ".1f"),
        "samples": ("samples", ","),
    }
    title = f"{options.megabytes:g} MB of text, sequence length {options.seq_len}, "
    title += f"{DUPE_FACTOR} passes, medians of {options.rounds} rounds"
    reporting.report(title, rows, columns, options.json)


def compare(options: argparse.Namespace, directory: Path) -> dict[str, list[Measured]]:
    """Run each in every round."""
    text = write_text(directory / "text.txt", options.megabytes)
    lengths = ["--seq-len", str(options.seq_len), "--max-pred", str(options.max_pred)]
    prepare = [sys.executable, "-m", "trnslurm.prepare", "bert", "--processes", "1", "--json"]
    base = ["--text", str(TEXT), "--tokenizer", f"train:{VOCAB_SIZE}", "--wrapped"]
    measure([*prepare, *base, "--output", str(directory / "base")])
    tokenizer = str(directory / "base" / "tokenizer.json")
    ours = [*prepare, *lengths, "--text", str(text), "--tokenizer", tokenizer]
    ours += ["--dupe-factor", str(DUPE_FACTOR), "--seed", str(SEED)]
    ours += ["--whole-words"] * options.whole_words
    results: dict[str, list[Measured]] = {OURS: [], PEER: []}
    for number in range(options.rounds):
        seconds, out = measure([*ours, "--output", str(directory / f"ours-{number}")])
        samples = out["index"]["splits"]["train"]["samples"]
        results[OURS].append(Measured(cpu_seconds=seconds, samples=samples))
        output = str(directory / f"peer-{number}.hdf5")
        peer = [sys.executable, __file__, *lengths, "--as-peer", str(text), tokenizer, output]
        seconds, samples = measure(peer)
        results[PEER].append(Measured(cpu_seconds=seconds, samples=samples))
    return results


def write_text(path: Path, megabytes: float) -> Path:
    """Write documents of the job's sentences in random order, one a line."""
    paragraphs = TEXT.read_text().replace("\n\n", "\0").replace("\n", " ").split("\0")
    lines = [s for paragraph in paragraphs for s in paragraph.replace(". ", ".\n").split("\n") if s]
    dice = random.Random(1)
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            document = [dice.choice(lines) for _ in range(dice.randint(5, 80))]
            file.write("".join(f"{line}\n" for line in document) + "\n")
    return path


def measure(command: list[str]) -> tuple[float, Any]:
    """Run a command; give its seconds of CPU, and its JSON."""
    environ = os.environ | {"PYTHONPATH": str(REPO), "TOKENIZERS_PARALLELISM": "false"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"error: {command}: {done.stderr}")
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, json.loads(done.stdout)


def run_peer(text: str, tokenizer_file: str, output: str, seq_len: int, max_pred: int) -> int:
    """Make samples the classical way; give how many."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    ids = {name: tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "[MASK]")}
    vocab_size = tokenizer.get_vocab_size()
    documents = read_documents(text, tokenizer)
    dice = random.Random(SEED)
    dice.shuffle(documents)
    samples = []
    for _ in range(DUPE_FACTOR):
        for number in range(len(documents)):
            for a, b, is_random in make_pairs(documents, number, seq_len - 3, dice):
                tokens = [ids["[CLS]"], *a, ids["[SEP]"], *b, ids["[SEP]"]]
                segments = [0] * (len(a) + 2) + [1] * (len(b) + 1)
                places, truth = mask(tokens, ids, max_pred, vocab_size, dice)
                samples.append((tokens, segments, places, truth, is_random))
    dice.shuffle(samples)
    write_samples(output, samples, seq_len, max_pred)
    return len(samples)


def read_documents(text: str, tokenizer: Any) -> list[list[list[int]]]:
    """Read sentences, one a line, and an empty line between documents."""
    documents: list[list[list[int]]] = [[]]
    for line in Path(text).read_text().split("\n"):
        if not line:
            documents.append([])
        elif ids := tokenizer.encode(line, add_special_tokens=False).ids:
            documents[-1].append(ids)
    return [document for document in documents if document]


def write_samples(output: str, samples: list[Any], seq_len: int, max_pred: int) -> None:
    """Fill arrays row by row, and write them."""
    import h5py
    import numpy as np

    widths = {
        "input_ids": seq_len,
        "segment_ids": seq_len,
        "masked_lm_positions": max_pred,
        "masked_lm_ids": max_pred,
        "input_mask": seq_len,
    }
    arrays = {name: np.zeros((len(samples), width), np.int32) for name, width in widths.items()}
    for row, (*lists, _) in enumerate(samples):
        for name, values in zip(widths, [*lists, [1] * len(lists[0])], strict=True):
            arrays[name][row, : len(values)] = values
    arrays["next_sentence_labels"] = np.array([sample[-1] for sample in samples], np.int32)
    with h5py.File(output, "w") as file:
        for name, values in arrays.items():
            dtype = "i1" if name in ("input_mask", "segment_ids", "next_sentence_labels") else "i4"
            file.create_dataset(name, data=values, dtype=dtype, compression="gzip")


def make_pairs(
    documents: list[list[list[int]]], number: int, most: int, dice: random.Random
) -> list[tuple[list[int], list[int], int]]:
    """Walk through a document, sentence by sentence."""
    document = documents[number]
    target = most if dice.random() >= SHORT_SHARE else dice.randint(2, most)
    pairs = []
    chunk: list[list[int]] = []
    place = length = 0
    while place < len(document):
        chunk.append(document[place])
        length += len(document[place])
        if place == len(document) - 1 or length >= target:
            middle = dice.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            a = [token for sentence in chunk[:middle] for token in sentence]
            is_random = len(chunk) == 1 or dice.random() < 0.5
            if is_random:
                b = random_part(documents, number, target - len(a), dice)
                place -= len(chunk) - middle
            else:
                b = [token for sentence in chunk[middle:] for token in sentence]
            while len(a) + len(b) > most:
                longer = a if len(a) > len(b) else b
                if dice.random() < 0.5:
                    del longer[0]
                else:
                    longer.pop()
            pairs.append((a, b, int(is_random)))
            chunk, length = [], 0
        place += 1
    return pairs


def random_part(
    documents: list[list[list[int]]], number: int, length: int, dice: random.Random
) -> list[int]:
    """Take sentences of another document."""
    for _ in range(10):
        other = dice.randrange(len(documents))
        if other != number:
            break
    part: list[int] = []
    for sentence in documents[other][dice.randrange(len(documents[other])) :]:
        part.extend(sentence)
        if len(part) >= length:
            break
    return part


def mask(
    tokens: list[int], ids: dict[str, int], max_pred: int, vocab_size: int, dice: random.Random
) -> tuple[list[int], list[int]]:
    """Mask tokens in place; give where, and what they were."""
    special = (ids["[CLS]"], ids["[SEP]"])
    places = [place for place, token in enumerate(tokens) if token not in special]
    dice.shuffle(places)
    wanted = min(max_pred, max(1, round(len(tokens) * MASKED_LM_PROB)))
    chosen = sorted(places[:wanted])
    before = [tokens[place] for place in chosen]
    for place in chosen:
        if dice.random() < 0.8:
            tokens[place] = ids["[MASK]"]
        elif dice.random() >= 0.5:
            tokens[place] = dice.randrange(vocab_size)
    return chosen, before


if __name__ == "__main__":
    main()
