"""Worker 0 of a training on torch_xla, alone, and the collectives and host work that it asks for.

    python benchmarks/xla_workers.py BUNDLE WAY RESULT

torch_xla's CPU client has no collectives between processes, and trnslurm/train/devices/xla_cpu.py,
which stands in for them, cuts the graphs where they would be. Here torch_xla's own functions trace
them for all workers of the plan, and their HLO is read, as neuron_parallel_compile collects graphs.
Then the graph is run with what worker 0 would get if all workers had its values: so the rest is run
as ever, and torch_xla's metrics tell executions and transfers. WAY is "ours", the bundle's job as
it is, or one of neuron_samples.py with the job's model.
"""

from __future__ import annotations

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
BYTES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1,
         "pred": 1}  # fmt: skip
_INSTRUCTION = re.compile(rf" = (.+?) ({'|'.join(KINDS)})\((.*?)\), ")
_SHAPE = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")


def read_collectives(hlo: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each collective of a graph: its kind, the bytes of its whole tensors, its types."""
    for result, kind, operands in _INSTRUCTION.findall(hlo):
        # What is gathered is whole as a result, what is scattered as an operand.
        shapes = _SHAPE.findall(operands if kind == "reduce-scatter" else result)
        sizes = []
        for dtype, dimensions in shapes:
            size = BYTES[dtype]
            for dimension in filter(None, dimensions.split(",")):
                size *= int(dimension)
            sizes.append(size)
        yield kind, sum(sizes), sorted({dtype for dtype, _ in shapes})


class Worker:
    """Worker 0 of so many, and what it has asked for."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.found: list[tuple[str, int, list[str]]] = []
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

        world = self.world
        reduce, scatter, gather = xm.all_reduce, xm.reduce_scatter, xm.all_gather
        sync = torch_xla.sync

        def listed(value: Any) -> list[Any]:
            return [value] if isinstance(value, torch.Tensor) else list(value)

        def kept(traced: Any) -> None:
            self._traced += listed(traced)

        def reduced(value: Any, reduce_type: str, scale: float) -> Any:
            return value * (world * scale) if reduce_type == xm.REDUCE_SUM else value * scale

        def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, **options: Any) -> Any:
            own = listed(inputs)
            copies = [each.detach().clone() for each in own]
            if isinstance(inputs, torch.Tensor):
                kept(reduce(reduce_type, copies[0], scale, **options))
                return reduced(inputs, reduce_type, scale)
            kept(reduce(reduce_type, copies, scale, **options))
            for each in own:
                each.copy_(reduced(each, reduce_type, scale))
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
                reduced(each.chunk(shard_count, scatter_dim)[0], reduce_type, scale)
                for each in listed(input)
            ]
            return own[0] if isinstance(input, torch.Tensor) else own

        def all_gather(value: Any, dim: int = 0, **options: Any) -> Any:
            kept(gather(value, dim, **options))
            own = [torch.cat([each] * world, dim) for each in listed(value)]
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
        xr.global_ordinal = lambda: 0

    def read(self) -> None:
        """Read the HLO of the collectives of the graph that ends here, if it counts."""
        import torch_xla

        traced, self._traced = self._traced, []
        if traced and WARM_UP <= self._step < WARM_UP + WINDOW:
            self.found += read_collectives(torch_xla._XLAC._get_xla_tensors_hlo(traced))

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
        return {"collectives": summarize(self.found, WINDOW), **counts, "compiled": compiled}


def summarize(found: list[tuple[str, int, list[str]]], steps: int) -> dict[str, Any]:
    """Add up collectives by kind, for a step; sizes are those of each, largest first."""
    kinds: dict[str, Any] = {}
    for kind, size, types in found:
        one = kinds.setdefault(kind, {"number": 0.0, "bytes": 0.0, "types": [], "sizes": []})
        one["number"] += 1 / steps
        one["bytes"] += size / steps
        one["types"] = sorted({*one["types"], *types})
        one["sizes"].append(size)
    for one in kinds.values():
        one["number"], one["bytes"] = round(one["number"], 2), round(one["bytes"])
        one["sizes"] = sorted(set(one["sizes"]), reverse=True)
    return kinds


def main() -> None:
    """Train as a bundle says, in one of the ways, and write down what was counted."""
    bundle, way, result = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    plan = json.loads((bundle / "plan.json").read_text())
    worker = begin(plan["workers"])
    os.environ["TRNSLURM_RUN_DIR"] = str(bundle)
    job = import_job(bundle / "code" / "jobs" / plan["recipe"] / "train.py")
    if sys.argv[4:] == ["--update"]:
        result.write_text(json.dumps(trace_update(worker, way, job, plan)))
        return
    sys.argv[1:] = [str(bundle / "plan.json")]
    with patched(worker):
        if way == "ours":
            job.main()
        else:
            import neuron_samples

            neuron_samples.train(way, job, worker.step_done)
    result.write_text(json.dumps(worker.result()))


def trace_update(worker: Worker, way: str, job: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the collectives of an update at the plan's size, from parameters of zero."""
    from types import SimpleNamespace

    import torch
    import torch_xla

    from trnslurm.train.optim.make import make_optimizer

    settings = job.Settings(**plan["train"])
    config = (job.make_config if hasattr(job, "make_config") else lambda m: job.GPT2Config(**m))(
        plan["model"]
    )
    with torch.device("meta"):
        model = (getattr(job, "BertForPreTraining", None) or job.GPT2LMHeadModel)(config)
    model.tie_weights()
    device = torch_xla.device()
    named = {
        name: torch.nn.Parameter(torch.zeros(each.shape, device=device))
        for name, each in model.named_parameters()
    }
    if way == "ours":
        zero1 = getattr(settings, "zero1", True)
        own: Any = SimpleNamespace(rank=0, world=worker.world, torch_device=device)
        own.put = lambda tensor: tensor.to(device)
        optimizer = make_optimizer(
            settings, own, named.items(), zero1=zero1, precision=settings.optimizer_precision
        )
        optimizer.step(1e-4)
    else:
        import neuron_samples

        neuron_samples.update(way, plan["recipe"], named)
    traced, worker._traced = worker._traced, []
    found = list(read_collectives(torch_xla._XLAC._get_xla_tensors_hlo(traced)))
    return {"collectives": summarize(found, 1), **dict.fromkeys((*METRICS, "syncs", "compiled"))}


def begin(workers: int) -> Worker:
    """Set what torchrun and node.sh would, and replace torch_xla's collectives."""
    os.environ |= {
        "PJRT_DEVICE": "CPU",
        "XLA_DISABLE_FUNCTIONALIZATION": "1",  # as in trnslurm/train/devices/open.py
        # Compiling is most of the work, and what is compiled runs for seconds.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0",
        "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers),
        # No watchdog and no stop, which ask the other workers.
        "TRNSLURM_PHASE": "precompile",
        "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    worker = Worker(workers)
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
    from trnslurm.train.loop import schedule
    from trnslurm.train.loop.run import Run

    # Kept by torchrun's agent otherwise.
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    end: Callable[..., None] = Run.end

    def ended(run: Run, step: int, *args: Any, **options: Any) -> None:
        end(run, step, *args, **options)
        worker.step_done(step)

    patches = ExitStack()
    for place, name, value in (
        (dist, "init_process_group", lambda *args, **options: None),
        (xla_cpu, "install", lambda timer: None),
        (schedule, "PRECOMPILE_STEPS", WARM_UP + WINDOW),
        (Run, "end", ended),
    ):
        patches.enter_context(mock.patch.object(place, name, value))
    return patches


if __name__ == "__main__":
    main()
