"""What scripts that torchrun starts share with the tests: jobs as modules, measures of a worker."""

import importlib.util
import os
import sys

from trnslurm.train.settings import OptimizerSettings

# Of a Llama, for each way in which a group of workers divides parameters, and has copies.
FROZEN = (
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
)


MOMENTS = ("exp_", "momentum")


def import_job(path):
    spec = importlib.util.spec_from_file_location("job", path)
    job = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = job
    spec.loader.exec_module(job)
    return job


def use_cache(options, rank):
    """Let torch_xla keep compiled graphs; one directory for each, as workers disturb each other."""
    import torch_xla.runtime as xr

    os.environ["PJRT_DEVICE"] = "CPU"
    xr.initialize_cache(f"{options['path']}/{rank}", readonly=options["readonly"])


def cache_misses(device):
    """Count the graphs that the cache had not."""
    if device.torch_device.type != "xla":
        return 0
    import torch_xla.debug.metrics

    return torch_xla.debug.metrics.counter_value("PersistentCacheMiss") or 0


def state_bytes(optimizer):
    """The bytes of what the optimizer really holds of each parameter, padding included."""
    inside = getattr(optimizer, "_inside", None) or [optimizer._base]
    states = [state for each in inside for state in each.state.values()]
    held = [value for state in states for key, value in state.items() if key.startswith(MOMENTS)]
    # A DTensor counts the bytes of all workers.
    return sum(getattr(value, "to_local", lambda value=value: value)().nbytes for value in held)


def optimizer_settings(optimizer, **changes):
    """Settings of an optimizer by itself."""
    usual = {"weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "max_norm": 1.0}
    return OptimizerSettings(optimizer=optimizer, **usual | changes)
