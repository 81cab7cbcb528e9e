"""Tokenizers: an existing tokenizer.json, or one trained on the text itself."""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trnslurm.prepare.bytepairs import BytePairs
from trnslurm.prepare.errors import LEARNING, PrepareError
from trnslurm.prepare.files import replacing

VERSION: str = tokenizers.__version__
FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token in common tokenizers.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Every byte, and the end-of-text token.
LEAST = 257
_TRAIN = "train:"
# Ids below this fit two bytes.
_LARGEST_UINT16 = 65535
_SAY_EVERY_S = 30


def vocab_size(tokenizer: Tokenizer) -> int:
    """Return one more than the largest token id."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return max(vocabulary.values()) + 1


def dtype_for(num_tokens: int) -> str:
    """Return the smallest type for token ids."""
    return "uint16" if num_tokens <= _LARGEST_UINT16 else "uint32"


def trained_size(name: str, least: int = LEAST) -> int | None:
    """Return V of train:V, or None for the name of a file."""
    if not name.startswith(_TRAIN):
        return None
    size = name.removeprefix(_TRAIN)
    if not re.fullmatch(r"[0-9]{1,7}", size) or int(size) < least:
        raise PrepareError(
            f"--tokenizer {name}: in train:V, V must be a whole number of {least} or more"
        )
    return int(size)


def find(name: str) -> Path:
    """Return the tokenizer.json that a name refers to: itself, or the one in a directory."""
    path = Path(name)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise PrepareError(
            f"--tokenizer {name}: no such file or directory with {FILE}: fetch one on a machine "
            "with "
            "a network, or use train:V"
        )
    return path


def short_name(name: str) -> str:
    """Return the name for the index: the directory's or file's, without its path."""
    if name.startswith(_TRAIN):
        return name
    path = find(name).absolute()
    return path.parent.name if path.name == FILE else path.name


def keep(name: str, directory: Path, train: Callable[[int], bytes]) -> Path:
    """Put the tokenizer.json into a directory; train it for train:V."""
    path = directory / FILE
    if not path.exists():
        if name.startswith(_TRAIN):
            data = train(int(name.removeprefix(_TRAIN)))
        else:
            data = find(name).read_bytes()
        with replacing(path) as stream:
            stream.write(data)
    return path


def read(path: Path) -> Tokenizer:
    """Read a tokenizer.json, set to return only tokens, without truncation or special tokens."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other
        raise PrepareError(
            f"{path}: not a valid {FILE} ({str(error).partition(chr(10))[0]})"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Text that looks like a special token stays text. Only a document's end is an end of text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def load(path: Path, end_of_text: str) -> tuple[Tokenizer, int]:
    """Load a tokenizer.json. Return it and its end-of-text id, by default the id of a common
    name."""
    tokenizer = read(path)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    names = (end_of_text,) if end_of_text else _ENDS
    found = [vocabulary[name] for name in names if name in vocabulary]
    if not found:
        raise PrepareError(
            f"{path}: has no token {' or '.join(names)}: name the token that ends a text with "
            "--end-of-text"
        )
    return tokenizer, found[0]


def train(documents: Iterable[str], size: int, processes: int) -> bytes:
    """Train a byte-level BPE tokenizer like GPT-2's; the same text makes the same bytes."""
    os.environ["RAYON_NUM_THREADS"] = str(processes)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learn(tokenizer, documents, trainer)
    text: str = tokenizer.to_str(pretty=True)
    return f"{text}\n".encode()


def learn(tokenizer: Tokenizer, texts: Iterable[str], trainer: trainers.Trainer) -> None:
    """Train in a thread, because the library ignores signals until it is done, possibly for hours.

    The library first counts all texts. Then it joins pairs, at half a millisecond per character if
    text has no blanks.
    """
    read = threading.Event()

    def counted() -> Iterator[str]:
        yield from texts
        read.set()

    learned: Future[None] = Future()

    def work() -> None:
        try:
            learned.set_result(tokenizer.train_from_iterator(counted(), trainer))
        except BaseException as error:
            learned.set_exception(error)

    threading.Thread(
        target=work, name=LEARNING, daemon=True
    ).start()  # a signal ends it with the process
    while not wait([learned], _SAY_EVERY_S).done:
        if read.is_set():
            print("training the tokenizer: all text has been read, merging pairs", file=sys.stderr)
    learned.result()


def encode(
    tokenizer: Tokenizer, documents: list[str], end_of_text: int, pairs: BytePairs | None
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return all tokens, with an end-of-text token after each document, and the counts."""
    if pairs and (found := pairs.encode(documents, end_of_text)):
        return found
    encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    ids = [[*encoding.ids, end_of_text] for encoding in encodings]
    return np.array([*chain.from_iterable(ids)], np.uint32), np.array([*map(len, ids)], np.int64)
