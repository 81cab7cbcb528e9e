"""Samples of labelled rows: framed texts or pairs as tokens of a fixed length, with labels."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from tokenizers.processors import BertProcessing

from trnslurm.prepare import tokenizer, wordpiece
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.labelled.rows import RowBlock
from trnslurm.prepare.prepared import describe
from trnslurm.prepare.workers import Work, read_arrays

_ROWS_AT_ONCE = 1000
_PADS = ("<pad>", "[PAD]")
SPLITS = ("train", "eval", "eval_mismatched")
"""eval_mismatched is MNLI's: rows of kinds of text that the training rows do not contain."""

Samples = NDArray[Any]
"""Records of SampleWork._sample_type."""

UNLABELLED = -100
"""The label of a token that does not begin a word. PyTorch's cross entropy ignores these."""


def load_framing(path: Path) -> tuple[Tokenizer, int]:
    """Load a tokenizer that frames texts, and the id that pads a sample.

    The tokenizer is WordPiece, which frames texts as for BERT here, or one that frames texts
    itself.
    """
    read = tokenizer.read(path)
    if isinstance(read.model, models.WordPiece):
        pieces = wordpiece.load(path)
        read.post_processor = BertProcessing(("[SEP]", pieces.sep), ("[CLS]", pieces.cls))
        return read, pieces.pad
    vocabulary = read.get_vocab(with_added_tokens=True)
    pad = next((vocabulary[name] for name in _PADS if name in vocabulary), None)
    if pad is None or read.post_processor is None or not read.num_special_tokens_to_add(False):
        raise PrepareError(
            f"{path} is {type(read.model).__name__} without a padding token, or without special "
            "tokens "
            "around a text: choose a BERT, RoBERTa or ALBERT tokenizer"
        )
    return read, pad


def begin_words(path: Path) -> None:
    """Change RoBERTa's tokenizer.json so that single words get the same tokens as in a text.

    Its tokens for a word differ after a space. transformers requires add_prefix_space=True as well.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    changed = False
    for part in _parts(values.get("pre_tokenizer") or {}):
        if part.get("add_prefix_space") is False:
            part["add_prefix_space"] = changed = True
    if changed:
        with replacing(path) as stream:
            stream.write(f"{json.dumps(values, indent=2, ensure_ascii=False)}\n".encode())


def _parts(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    return parts


@dataclass(frozen=True, kw_only=True)
class SampleWork(Work[RowBlock, int]):
    """Tokenizes a block of rows; returns the number of texts that were longer than a sample."""

    tokenizer: Path
    seq_len: int
    numbers: dict[str, int]
    """The number of each label; empty if labels are numbers on a scale."""
    of_words: bool = False
    """Whether every word has a label."""

    def find(self, block: RowBlock) -> int | None:
        """Return the number of truncated texts, if an earlier run finished the block."""
        arrays = read_arrays(self.path(block.number))
        return None if arrays is None else int(arrays["cut"])

    def start(self) -> Callable[[RowBlock], int]:
        """Set up one worker; return the function that does its work."""
        framed, pad = load_framing(self.tokenizer)
        # The longer text of a pair is truncated first.
        framed.enable_truncation(self.seq_len, strategy="longest_first")
        kind = self._sample_type(tokenizer.vocab_size(framed))
        return lambda block: self._make(block, framed, kind, pad)

    def samples(self, block: RowBlock) -> Samples:
        """Return the samples of a finished block."""
        return self.arrays(block.number)["samples"]

    def _sample_type(self, vocab_size: int) -> np.dtype[Any]:
        """Return the type of a sample in files: all its fields together, read in one block."""
        label: Any = ("label", "<i4" if self.numbers else "<f4")
        if self.of_words:
            label = ("label", "<i2", (self.seq_len,))
        token = np.dtype(tokenizer.dtype_for(vocab_size)).newbyteorder("<")
        return np.dtype(
            [
                ("input_ids", token, (self.seq_len,)),
                ("token_type_ids", "u1", (self.seq_len,)),
                ("length", "<u4"),
                label,
            ]
        )

    def _make(self, block: RowBlock, framed: Tokenizer, kind: np.dtype[Any], pad: int) -> int:
        made, cut = [], 0
        left = block.rows()
        while rows := list(itertools.islice(left, _ROWS_AT_ONCE)):
            samples = np.zeros(len(rows), kind)
            samples["input_ids"] = pad
            texts = [tuple(texts) if len(texts) == 2 else texts[0] for _, texts in rows]
            encode = framed.encode_batch if self.of_words else framed.encode_batch_fast
            encoded = encode(texts, is_pretokenized=self.of_words)
            for sample, (label, _), found in zip(samples, rows, encoded, strict=True):
                sample["input_ids"][: len(found.ids)] = found.ids
                sample["token_type_ids"][: len(found.ids)] = found.type_ids
                sample["length"] = len(found.ids)
                if self.of_words:
                    sample["label"] = UNLABELLED
                    for place, word in first_pieces(found.word_ids):
                        sample["label"][place] = self.numbers[label[word]]
                else:
                    sample["label"] = self.numbers[label] if self.numbers else float(label)
                cut += bool(found.overflowing)
            made.append(samples)
        with replacing(self.path(block.number)) as stream:
            np.savez(stream, samples=np.concatenate(made), cut=cut)
        return cut


def first_pieces(words: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yield the position of each word's first token, and the word's number; skip None."""
    before = None
    for place, word in enumerate(words):
        if word is not None and word != before:
            yield place, word
        before = word


def write_splits(
    blocks: list[RowBlock], work: SampleWork, names: list[str], holdout: float, output: Path
) -> dict[str, Any]:
    """Write a file for every split; return their entries in the index."""
    by_split: dict[str, list[RowBlock]] = {}
    for block in blocks:
        by_split.setdefault(block.split, []).append(block)
    entries = {}
    for split, parts in by_split.items():
        labels = np.concatenate([work.samples(block)["label"] for block in parts])
        held_out = np.zeros(len(labels), bool)
        by_label = names and labels.ndim == 1  # with words a sample has many labels
        if split == "train" and holdout:
            held_out = hold_out(labels if by_label else np.zeros(len(labels), np.int32), holdout)
            if not 0 < held_out.sum() < len(labels):
                raise PrepareError(
                    f"too few rows ({len(labels)}) to hold out a share of {holdout}: use "
                    "another --holdout, or --eval"
                )
            entries["eval"] = _write(output / "eval.npy", parts, work, held_out, names)
        entries[split] = _write(output / f"{split}.npy", parts, work, ~held_out, names)
    return {split: entries[split] for split in SPLITS if split in entries}


def hold_out(labels: NDArray[Any], share: float) -> NDArray[np.bool_]:
    """Choose a share of the rows of each label, evenly spread over them."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        wanted = round(len(rows) * share)
        numbers = np.arange(len(rows))
        ends = (numbers + 1) * wanted // len(rows) > numbers * wanted // len(rows)
        chosen[rows[ends]] = True
    return chosen


def _write(
    path: Path,
    blocks: list[RowBlock],
    work: SampleWork,
    chosen: NDArray[np.bool_],
    names: list[str],
) -> dict[str, Any]:
    first, counts = 0, np.zeros(len(names), np.int64)
    with replacing(path) as stream:
        for block in blocks:
            samples = work.samples(block)
            if not first:
                head = {  # of a .npy file; the bytes of the samples follow
                    "descr": np.lib.format.dtype_to_descr(samples.dtype),
                    "fortran_order": False,
                    "shape": (int(chosen.sum()),),
                }
                np.lib.format.write_array_header_1_0(stream, head)
            taken = samples[chosen[first : first + len(samples)]]
            stream.write(taken.tobytes())
            first += len(samples)
            if names:
                labels = taken["label"].flatten()
                counts += np.bincount(labels[labels >= 0], minlength=len(names))
    by_label = dict(zip(names, counts.tolist(), strict=True))
    return describe(path) | {"samples": int(chosen.sum()), "labels": by_label}
