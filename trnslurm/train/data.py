"""Text as byte tokens in blocks of seq_len, in an order that depends on (seed, epoch) alone."""

from pathlib import Path

import torch
from torch import Tensor

from trnslurm.train.batch import derive_seed
from trnslurm.train.errors import TrainError

END_OF_TEXT = 256
VOCAB_SIZE = END_OF_TEXT + 1


class ByteText:
    """An endless stream of samples: epoch after epoch of a text's blocks, each time reshuffled."""

    def __init__(self, path: Path, *, seq_len: int, seed: int) -> None:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise TrainError(f"train.data: {path} cannot be read ({error.strerror})") from None
        tokens = torch.tensor([*text, END_OF_TEXT])
        if len(tokens) < seq_len:
            raise TrainError(f"train.data: {path} is shorter than one block of {seq_len} bytes")
        # The tail that does not fill a block is left out, as in the usual packing of a corpus.
        self.blocks = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def order(self, epoch: int) -> list[int]:
        """Give the permutation of the blocks in an epoch."""
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
            order: list[int] = torch.randperm(len(self.blocks), generator=generator).tolist()
            # A batch may lie across the end of an epoch: keep the one before.
            self._orders = {
                **{e: o for e, o in self._orders.items() if e == epoch - 1},
                epoch: order,
            }
        return self._orders[epoch]

    def samples(self, first: int, count: int) -> Tensor:
        """Give the samples at positions first … first + count - 1 of the stream, one a row."""
        rows = []
        for position in range(first, first + count):
            epoch, place = divmod(position, len(self.blocks))
            rows.append(self.order(epoch)[place])
        return self.blocks[rows]
