"""What the workers tell each other about checkpoints, on a connection of its own.

It goes through the workers' store. Every wait is bounded.
"""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trnslurm.train.devices.device import Device
from trnslurm.train.devices.store import Store, open_store

Message = dict[str, Any]


class Exchange:
    """Messages between the workers, by topic."""

    def __init__(self, device: Device, store: Store | None, *, patience_s: float) -> None:
        self.rank = device.rank
        self.world = device.world
        self.patience_s = patience_s
        self._store = open_store("checkpoint", store)

    def report(self, topic: str, message: Message) -> None:
        """Tell rank 0."""
        self._store.set(f"{topic}/{self.rank}", json.dumps(message))

    def reports(self, topic: str, deadline_s: float) -> list[Message | None]:
        """Return what each worker reported, in order; None for one that did not in this time.

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
