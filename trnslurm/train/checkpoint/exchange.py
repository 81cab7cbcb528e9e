"""What the workers tell each other about checkpoints, on a connection of its own.

It goes through the key-value store of torch.distributed, which torchrun's agent on the first node
keeps: it does not depend on a disk that may be full, outlives a worker, and unlike collectives can
be used by a thread beside the training. Every wait is bounded.
"""

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trnslurm.train.device import Device

Message = dict[str, Any]
# torch.distributed does not say what it exports.
Store = Any
_dist: Any = dist


class Exchange:
    """Messages between the workers, by topic."""

    def __init__(self, device: Device, store: Store | None, *, patience_s: float) -> None:
        self.rank = device.rank
        self.world = device.world
        self.patience_s = patience_s
        # torchrun restarts workers under the same store: what they said before must not count.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = _dist.PrefixStore(f"trnslurm/checkpoint/{restart}", store or _connect())

    def report(self, topic: str, message: Message) -> None:
        """Tell rank 0."""
        self._store.set(f"{topic}/{self.rank}", json.dumps(message))

    def reports(self, topic: str, deadline_s: float) -> list[Message | None]:
        """Give what each worker reported, in order; None for one that did not in this time.

        The time is that of all of them together.
        """
        end = time.monotonic() + deadline_s
        return [
            self._get(f"{topic}/{rank}", max(0.001, end - time.monotonic()))
            for rank in range(self.world)
        ]

    def announce(self, topic: str, message: Message) -> None:
        """Tell everyone, as rank 0."""
        self._store.set(f"{topic}/all", json.dumps(message))

    def announced(self, topic: str, deadline_s: float) -> Message | None:
        """Wait for what rank 0 tells everyone; None if it does not in this time."""
        return self._get(f"{topic}/all", deadline_s, keep=True)

    def _get(self, key: str, deadline_s: float, *, keep: bool = False) -> Message | None:
        try:
            self._store.wait([key], timedelta(seconds=deadline_s))
        except dist.DistStoreError:
            return None
        message: Message = json.loads(self._store.get(key))
        if not keep:
            self._store.delete_key(key)
        return message


def _connect() -> Store:
    return _dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
