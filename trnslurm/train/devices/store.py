"""The key-value store of torch.distributed, kept by worker 0 or by torchrun's agent.

The store does not depend on a disk that may be full and, unlike collectives, it can be used by a
background thread. A waiting call blocks all others on its connection, so each purpose that waits
opens a separate connection.
"""

import os
from typing import Any

import torch.distributed as dist

# torch.distributed does not say what it exports.
Store = Any
_dist: Any = dist


def open_store(purpose: str, store: Store | None = None) -> Store:
    """Open the keys of one purpose, on a new connection unless one is given."""
    # torchrun restarts workers under the same store: messages from before must not count.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if store is None:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = _dist.TCPStore(*place, is_master=False)
    return _dist.PrefixStore(f"trnslurm/{purpose}/{restart}", store)
