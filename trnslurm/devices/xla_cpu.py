"""The host's CPUs by PyTorch/XLA: the stand-in for Trainium on a machine that has none.

torch_xla's own client for CPUs knows one process only, so gloo joins the workers below torch_xla's
collectives (trnslurm/train/devices/xla_cpu.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from trnslurm.devices.by_xla import ByXla


class XlaCpu(ByXla):
    """The host's CPUs by PyTorch/XLA."""

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
        """Return torch_xla's name of the device, and what Neuron's jobs have too."""
        # As on Neuron (AWS's torch-neuron-envvars.rst): views and writes in place are traced by
        # other code then, and aliases may be missed (pytorch/xla#8093).
        name = "XLA_DISABLE_FUNCTIONALIZATION"
        return super().environment(given, rank) | {name: given.get(name, "1")}


XLA_CPU = XlaCpu()
