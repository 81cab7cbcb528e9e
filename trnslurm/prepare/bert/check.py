"""Checks whether training can read shards, which another program may have made."""

from pathlib import Path
from typing import Any

import h5py

from trnslurm.prepare.bert.shards import DTYPES
from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.progress import Progress

_BY_PREDICTION = ("masked_lm_positions", "masked_lm_ids")
_AGAIN = "fetch or create it again"


def check_shards(
    directory: Path,
    *,
    whole: bool,
    seq_len: int | None = None,
    max_pred: int | None = None,
    source: str = "",
) -> str:
    """Open every shard and compare their shapes; return a one-line summary of the shards.

    With `whole`, also read all samples. Reject shards whose samples do not have the given numbers
    of tokens and masked tokens. `source` says where they come from.
    """
    paths = sorted(directory.glob("*.hdf5"))
    if not paths:
        raise PrepareError(f"{directory}: contains no shards (*.hdf5)")
    sizes = [path.stat().st_size for path in paths]
    progress = Progress("reading shards", sum(sizes))
    shapes = []
    for number, path in enumerate(paths):
        shapes.append(_check(path, whole))
        if shapes[-1][1:] != shapes[0][1:]:
            raise PrepareError(
                f"{path}: its samples have {shapes[-1][1]} tokens and at most {shapes[-1][2]} "
                "masked "
                f"tokens, but those in {paths[0].name} have {shapes[0][1]} and {shapes[0][2]}"
            )
        progress.show(sum(sizes[: number + 1]))
    progress.finish()
    samples = sum(shape[0] for shape in shapes)
    _, tokens, masked = shapes[0]
    summary = (
        f"{len(paths):,} shards with {samples:,} samples of {tokens} tokens, at most {masked} of "
        "them masked"
    )
    for option, wanted, found in (("--seq-len", seq_len, tokens), ("--max-pred", max_pred, masked)):
        if wanted is not None and wanted != found:
            raise KeptError(f"{source}: contains {summary}, which contradicts {option} {wanted}")
    return summary


def _check(path: Path, whole: bool) -> tuple[int, int, int]:
    """Return the number of samples in a shard, and the tokens and most masked tokens of each."""
    try:
        with h5py.File(path, "r") as file:
            shape = _shape(path, file)
            if whole:
                for name in DTYPES:
                    file[name][:]
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "truncated, damaged, or not an HDF5 file"
        raise PrepareError(f"{path}: cannot be read ({reason}): {_AGAIN}") from None
    return shape


def _shape(path: Path, file: Any) -> tuple[int, int, int]:
    missing = [name for name in DTYPES if not isinstance(file.get(name), h5py.Dataset)]
    if missing:
        raise PrepareError(f"{path}: not a BERT shard: {', '.join(missing)} is missing")
    shapes = {name: file[name].shape for name in DTYPES}
    if len(shapes["input_ids"]) != 2 or len(shapes["masked_lm_ids"]) != 2:
        raise PrepareError(f"{path}: not a BERT shard: its samples differ in length")
    samples, seq_len = shapes["input_ids"]
    max_pred = shapes["masked_lm_ids"][1]
    for name, shape in shapes.items():
        width = () if name == "next_sentence_labels" else (seq_len,)
        width = (max_pred,) if name in _BY_PREDICTION else width
        if shape != (samples, *width) or file[name].dtype.kind not in "iu":
            raise PrepareError(f"{path}: not a BERT shard: {name} is {file[name].dtype} {shape}")
    return samples, seq_len, max_pred
