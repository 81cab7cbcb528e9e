"""Finished samples to the files of splits: which are held out, how many of each label."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.labelled.rows import Piece
from trnslurm.prepare.labelled.samples import Samples, Tokenizing
from trnslurm.prepare.prepared import describe

SPLITS = ("train", "eval", "eval_mismatched")
"""The last is MNLI's: rows of kinds of text that were not trained on."""


def write_splits(
    pieces: list[Piece], work: Tokenizing, names: list[str], holdout: float, output: Path
) -> dict[str, Any]:
    """Write a file for every split; return their entries in the index."""
    by_split: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_split.setdefault(piece.split, []).append(piece)
    entries = {}
    for split, parts in by_split.items():
        labels = np.concatenate([_samples(work, piece)["label"] for piece in parts])
        held_out = np.zeros(len(labels), bool)
        by_label = names and labels.ndim == 1  # a sample of words has many
        if split == "train" and holdout:
            held_out = hold_out(labels if by_label else np.zeros(len(labels), np.int32), holdout)
            if not 0 < held_out.sum() < len(labels):
                raise PrepareError(
                    f"too few rows ({len(labels)}) to hold out a share of {holdout} of them: use "
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
    path: Path, pieces: list[Piece], work: Tokenizing, chosen: NDArray[np.bool_], names: list[str]
) -> dict[str, Any]:
    first, counts = 0, np.zeros(len(names), np.int64)
    with replacing(path) as stream:
        for piece in pieces:
            samples = _samples(work, piece)
            if not first:
                head = {  # of a .npy file, which the samples follow as they are
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


def _samples(work: Tokenizing, piece: Piece) -> Samples:
    samples = work.samples(piece)
    if samples is None:
        raise KeptError(f"a finished piece of {piece.split} is damaged")
    return samples
