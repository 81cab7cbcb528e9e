"""The host's CPUs with PyTorch/XLA, a stand-in for Trainium on machines without it.

torch_xla's own CPU client supports only one process, so gloo connects the workers beneath
torch_xla's collectives (trnslurm/train/devices/xla_cpu.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from trnslurm.devices.by_xla import ByXla


class XlaCpu(ByXla):
    """The host's CPUs with PyTorch/XLA."""

    __slots__ = ()

    name = "xla-cpu"
    on_host = True
    also = "cpu"
    pjrt = "CPU"
    backend = "gloo"  # its collectives block, so no graph is in flight
    compiles_ahead = True
    cache_name = "xla"
    cache_per_worker = True
    keeps_attention_weights = True
    checkup_mb = 8

    def environment(self, given: Mapping[str, str], rank: int) -> dict[str, str]:
        """Return torch_xla's name for the device, and a variable that Neuron jobs have too."""
        # As on Neuron (AWS's torch-neuron-envvars.rst): views and in-place writes are then traced
        # by other code, and aliases can be missed (pytorch/xla#8093).
        name = "XLA_DISABLE_FUNCTIONALIZATION"
        return super().environment(given, rank) | {name: given.get(name, "1")}


XLA_CPU = XlaCpu()
