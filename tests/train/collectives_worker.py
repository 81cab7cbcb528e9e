"""Train as one worker of many on torch_xla, alone, and count its collectives and host work.

    python tests/train/collectives_worker.py BUNDLE RESULT [RANK]

torch_xla's CPU client has no collectives between processes, and trnslurm/train/devices/xla_cpu.py,
which stands in for them, cuts the graphs where they would be. Here torch_xla's own functions trace
them for all workers of the plan, and their HLO is read, as neuron_parallel_compile collects graphs.
The graph then runs with what the worker would get if all workers had its values, and torch_xla's
metrics count executions and transfers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

WARM_UP, WINDOW = 10, 10
"""Steps; what is counted is the window, from one report (train.log_every) to the next."""
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
# Of torch_xla's metrics.
METRICS = {"executions": "ExecuteTime", "to_device": "TransferToDeviceTime",
           "from_device": "TransferFromDeviceTime"}  # fmt: skip
_INSTRUCTION = re.compile(rf" = (.+?) ({'|'.join(KINDS)})\((.*?)\), ")
_TYPE = re.compile(r"\b([a-z]+\d+|pred)\[")
_GROUPS = re.compile(r"replica_groups=(\{.*?\}\}|\{\})")


def read_collectives(hlo: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the kind of each collective of a graph, and the types of its tensors."""
    for result, kind, operands in _INSTRUCTION.findall(hlo):
        yield kind, set(_TYPE.findall(result + operands))


class Worker:
    """A worker of so many, and what it has asked for."""

    def __init__(self, world: int, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.groups: set[str] = set()
        """The groups of workers that its collectives name."""
        self.hlo: Any = hashlib.sha256()
        """Of the graphs of the window."""
        self.found: list[tuple[str, set[str]]] = []
        """The collectives of the window."""
        self._traced: list[Any] = []
        self._step = 0
        self._syncs = 0
        self._marks: dict[int, dict[str, float]] = {}

    def install(self) -> None:
        """Put collectives that are traced and not run in the place of torch_xla's."""
        import torch
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        world, rank = self.world, self.rank
        reduce, scatter, gather = xm.all_reduce, xm.reduce_scatter, xm.all_gather
        sync = torch_xla.sync

        def listed(value: Any) -> list[Any]:
            return [value] if isinstance(value, torch.Tensor) else list(value)

        def kept(traced: Any) -> None:
            self._traced += listed(traced)

        def size(options: dict[str, Any]) -> int:
            return len((options.get("groups") or [range(world)])[0])

        def reduced(value: Any, reduce_type: str, scale: float, options: dict[str, Any]) -> Any:
            times = size(options) if reduce_type == xm.REDUCE_SUM else 1
            return value * (times * scale)

        def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, **options: Any) -> Any:
            own = listed(inputs)
            copies = [each.detach().clone() for each in own]
            if isinstance(inputs, torch.Tensor):
                kept(reduce(reduce_type, copies[0], scale, **options))
                return reduced(inputs, reduce_type, scale, options)
            kept(reduce(reduce_type, copies, scale, **options))
            for each in own:
                each.copy_(reduced(each, reduce_type, scale, options))
            return inputs

        def reduce_scatter(
            reduce_type: str,
            input: Any,  # noqa: A002  (torch_xla passes it by this name)
            scale: float,
            scatter_dim: int,
            shard_count: int,
            **options: Any,
        ) -> Any:
            kept(scatter(reduce_type, input, scale, scatter_dim, shard_count, **options))
            own = [
                reduced(each.chunk(shard_count, scatter_dim)[0], reduce_type, scale, options)
                for each in listed(input)
            ]
            return own[0] if isinstance(input, torch.Tensor) else own

        def all_gather(value: Any, dim: int = 0, **options: Any) -> Any:
            kept(gather(value, dim, **options))
            own = [torch.cat([each] * size(options), dim) for each in listed(value)]
            return own[0] if isinstance(value, torch.Tensor) else own

        def counted(*args: Any, **options: Any) -> Any:
            self._syncs += 1
            self.read()
            return sync(*args, **options)

        xm.all_reduce, xm.reduce_scatter, xm.all_gather = all_reduce, reduce_scatter, all_gather
        xm.rendezvous = lambda *args, **options: [b""]
        torch_xla.sync = counted
        for name in ("world_size", "global_device_count"):
            setattr(xr, name, lambda: world)
        xr.global_ordinal = lambda: rank

    def read(self) -> None:
        """Read the HLO of the collectives of the graph that ends here, if it counts."""
        import torch_xla

        traced, self._traced = self._traced, []
        if traced and WARM_UP <= self._step < WARM_UP + WINDOW:
            hlo = torch_xla._XLAC._get_xla_tensors_hlo(traced)
            self.found += read_collectives(hlo)
            self.groups |= {*_GROUPS.findall(hlo)}
            self.hlo.update(hlo.encode())

    def step_done(self, step: int) -> None:
        """Take down what has been asked for so far."""
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as debug

        self._step = step
        if step not in (WARM_UP, WARM_UP + WINDOW):
            return
        xm.wait_device_ops()
        mark = {name: (debug.metric_data(key) or [0])[0] for name, key in METRICS.items()}
        mark |= {"syncs": self._syncs, "compiled": debug.counter_value("UncachedCompile") or 0}
        self._marks[step] = mark

    def result(self) -> dict[str, Any]:
        """Return what a step of the window asks for on average, and its compilations in all."""
        first, last = (self._marks[step] for step in (WARM_UP, WARM_UP + WINDOW))
        counts = {name: (last[name] - first[name]) / WINDOW for name in (*METRICS, "syncs")}
        compiled = last["compiled"] - first["compiled"]
        graphs = {"groups": sorted(self.groups), "hlo": self.hlo.hexdigest()}
        return {"collectives": summarize(self.found), **counts, "compiled": compiled, **graphs}


def summarize(found: list[tuple[str, set[str]]]) -> dict[str, Any]:
    """Return the number per step, and the types, of each kind of collective."""
    kinds: dict[str, Any] = {}
    for kind, types in found:
        one = kinds.setdefault(kind, {"number": 0, "types": set()})
        one["number"] += 1
        one["types"] |= types
    return {
        kind: {"number": one["number"] / WINDOW, "types": sorted(one["types"])}
        for kind, one in kinds.items()
    }


def main() -> None:
    """Train the bundle's job, and write what was counted."""
    bundle, result = Path(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads((bundle / "plan.json").read_text())
    worker = begin(plan["workers"], int(sys.argv[3]) if sys.argv[3:] else 0)
    os.environ["TRNSLURM_RUN_DIR"] = str(bundle)
    job = import_job(bundle / "code" / "jobs" / plan["recipe"] / "train.py")
    sys.argv[1:] = [str(bundle / "plan.json")]
    with patched(worker):
        job.main()
    result.write_text(json.dumps(worker.result()))


def begin(workers: int, rank: int) -> Worker:
    """Set what torchrun and node.sh would, and replace torch_xla's collectives."""
    os.environ |= {
        "PJRT_DEVICE": "CPU",
        "XLA_DISABLE_FUNCTIONALIZATION": "1",  # as in trnslurm/train/devices/open.py
        # Compiling is most of the work, and what is compiled runs for seconds.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
        "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers),
        # No watchdog and no stop, which ask the other workers.
        "TRNSLURM_PHASE": "precompile",
        "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    worker = Worker(workers, rank)
    worker.install()
    return worker


def import_job(path: Path) -> Any:
    """Import a job's script."""
    spec = importlib.util.spec_from_file_location("job", path)
    assert spec and spec.loader
    job = importlib.util.module_from_spec(spec)
    sys.modules["job"] = job
    spec.loader.exec_module(job)
    return job


def patched(worker: Worker) -> ExitStack:
    """Let the job's runtime train without the other workers, and count its steps."""
    import torch.distributed as dist

    from trnslurm.train.devices import xla_cpu
    from trnslurm.train.loop import run as run_module
    from trnslurm.train.loop.run import TrainingRun

    # Kept by torchrun's agent otherwise.
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    end: Callable[..., None] = TrainingRun.end

    def ended(run: TrainingRun, step: int, *args: Any, **options: Any) -> None:
        end(run, step, *args, **options)
        worker.step_done(step)

    patches = ExitStack()
    for place, name, value in (
        (dist, "init_process_group", lambda *args, **options: None),
        (xla_cpu, "install", lambda timer: None),
        (run_module, "PRECOMPILE_STEPS", WARM_UP + WINDOW),
        (TrainingRun, "end", ended),
    ):
        patches.enter_context(mock.patch.object(place, name, value))
    return patches


if __name__ == "__main__":
    main()
