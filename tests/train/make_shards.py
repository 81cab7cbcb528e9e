"""Little HDF5 shards as NVIDIA's preparation writes them, of sentences that can be learnt."""

import h5py
import numpy as np

PAD, UNKNOWN, CLS, SEP, MASK, WORDS = 0, 1, 2, 3, 4, 5
TYPES = {"input_ids": "i4", "input_mask": "i1", "segment_ids": "i1", "masked_lm_positions": "i4",
         "masked_lm_ids": "i4", "next_sentence_labels": "i1"}  # fmt: skip


def make_shards(directory, sizes, *, split="training", seq_len=32, max_pred=5, vocab_size=512):
    """Write a shard of each size; give their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, size in enumerate(sizes):
        path = directory / f"tiny_{split}_{number}.hdf5"
        dice = np.random.default_rng([number, split == "test"])
        samples = [make_sample(dice, seq_len, max_pred, vocab_size) for _ in range(size)]
        write_shard(path, {key: np.array([sample[key] for sample in samples]) for key in TYPES})
        paths.append(path)
    return paths


def write_shard(path, columns):
    """Write a shard, gzipped as the originals are."""
    with h5py.File(path, "w") as file:
        for key, values in columns.items():
            file.create_dataset(key, data=values, dtype=TYPES[key], compression="gzip")


def make_sample(dice, seq_len, max_pred, vocab_size):
    """Make two sentences of one word each, which is the same in both if the second follows."""
    length = int(dice.integers(seq_len // 2, seq_len + 1)) if dice.random() < 0.3 else seq_len
    first = int(dice.integers(3, length - 5))
    words = vocab_size - WORDS
    random_next = int(dice.random() < 0.5)
    word = dice.integers(words)
    other = (word + random_next * dice.integers(1, words)) % words
    one, two = [WORDS + word] * first, [WORDS + other] * (length - first - 3)
    ids = np.array([CLS, *one, SEP, *two, SEP])
    places = np.flatnonzero(ids >= WORDS)
    count = min(max_pred, max(1, round(length * 0.15)))
    positions = np.sort(dice.choice(places, count, replace=False))
    labels = ids[positions].copy()
    ids[positions] = MASK
    return {
        "input_ids": filled(ids, seq_len),
        "input_mask": filled(np.ones(length), seq_len),
        "segment_ids": filled(np.arange(length) > first + 1, seq_len),
        "masked_lm_positions": filled(positions, max_pred),
        "masked_lm_ids": filled(labels, max_pred),
        "next_sentence_labels": random_next,
    }


def filled(values, length):
    """Fill up with zeros."""
    return np.pad(values, (0, length - len(values))).astype(np.int64)
