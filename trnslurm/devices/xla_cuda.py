"""GPUs with PyTorch/XLA, which has had no GPU builds since 2.8.

https://github.com/pytorch/xla/pull/9618: the nodes need another build, such as TorchAcc's.
"""

from __future__ import annotations

from collections.abc import Mapping

from trnslurm.devices.by_xla import ByXla
from trnslurm.devices.device_type import OF_XLA
from trnslurm.devices.gpu import Gpu


class XlaCuda(ByXla, Gpu):
    """GPUs with PyTorch/XLA."""

    __slots__ = ()

    name = "xla-cuda"
    also = "cuda"
    only_if_asked = True
    pins = OF_XLA
    one_of = ("torchacc", "torch_xla_cuda_plugin")
    pjrt = "CUDA"
    # XLA's GPU client accepts 32 (its max_inflight_computations), and torch_xla holds one more.
    graphs_in_flight = 33

    def environment(self, given: Mapping[str, str], rank: int) -> dict[str, str]:
        """Return torch_xla's name for the device, and a cache directory for this worker only."""
        own = super().environment(given, rank)
        # Two workers that write to one directory would corrupt each other's entries.
        if cache := given.get("XLA_PERSISTENT_CACHE_PATH"):
            own["XLA_PERSISTENT_CACHE_PATH"] = f"{cache}/{rank}"
        return own


XLA_CUDA = XlaCuda()
