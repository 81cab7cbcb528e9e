"""A worker records its steps when asked; where their time goes."""

from __future__ import annotations

import gzip
import json
import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trnslurm import tracing
from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.tracing import IDLE, OTHER, Tracer, kind_of, shares, spans_of

from ..waiting import eventually


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("trnslurm: collectives", "collectives"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collectives"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data"),
        ("trnslurm: checkpoint", "evaluation and saving"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("aten::addmm", "matrix products"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("aten::gelu", OTHER),
        ("aten::commutes", OTHER),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_outer_span_of_a_purpose_counts() -> None:
    spans = [
        (0.0, 4.0, "matrix products"),
        (1.0, 2.0, "copies"),  # inside
        (5.0, 6.0, "data"),
        (5.5, 6.0, OTHER),
        (6.0, 8.0, tracing._BESIDE),
        (6.5, 7.0, OTHER),  # hides the collective
    ]
    assert shares(spans, 10.0) == {
        "matrix products": 0.4,
        "collectives": 0.15,
        "data": 0.1,
        OTHER: 0.05,
        IDLE: 0.3,
    }
    assert shares([], 0.0) == {IDLE: 0.0}


def event(name: str, start: float, end: float, thread: int = 1, **more: Any) -> SimpleNamespace:
    """An event of torch.profiler, in seconds."""
    took = SimpleNamespace(start=1e6 * start, end=1e6 * end)
    facts = {"device_type": "DeviceType.CPU", "is_user_annotation": False}
    return SimpleNamespace(name=name, time_range=took, thread=thread, **facts | more)


def test_the_thread_that_computes_counts() -> None:
    """Gloo's own threads spend more time in collectives than the main thread in all."""
    annotation = {"is_user_annotation": True}
    events = [
        event("ProfilerStep*", 0.0, 10.0, **annotation),
        event("DistributedDataParallel.forward", 0.0, 4.0, **annotation),
        event("trnslurm: data", 0.0, 1.0, **annotation),
        event("aten::mm", 1.0, 2.0),
        event("gloo:all_reduce", 1.0, 9.0, thread=2, **annotation),
        event("aten::mm", 5.0, 7.0),
        event("aten::mul", 5.0, 5.5, thread=3),
    ]
    found = shares(spans_of(events), 10.0)
    assert found == {"collectives": 0.5, "matrix products": 0.3, "data": 0.1, IDLE: 0.1}
    on_device = event("gemm", 0.0, 1.0, device_type="DeviceType.CUDA")
    assert spans_of([*events, on_device]) == [(0.0, 1.0, "matrix products")]
    assert spans_of([]) == []


def ask(files: RunFiles, **changes: Any) -> None:
    write_json(files.profile_request, {"id": "a-1", "steps": 2, "workers": [0, 3]} | changes)


def worker(tmp_path: Path, rank: int = 3) -> tuple[RunFiles, Tracer]:
    files = RunFiles(tmp_path)
    files.state.mkdir(exist_ok=True)
    return files, Tracer(files, rank)


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_LOOK_S", 0.0)


def test_a_worker_records(tmp_path: Path) -> None:
    files, tracer = worker(tmp_path)
    tracer.step_done()
    assert not tracer.records
    ask(files)
    tracer.step_done()
    layer, batch = torch.nn.Linear(256, 256), torch.randn(512, 256)
    for _ in range(2):
        assert tracer.records
        layer(batch).sum().backward()
        time.sleep(0.01)
        tracer.step_done()
    assert not tracer.records
    file = files.profile_file("a-1", 3, "summary.json")
    facts = eventually(lambda: read_json(file))
    assert facts["steps"] == 2 and facts["rank"] == 3
    assert facts["shares"]["matrix products"] > 0 and facts["shares"][IDLE] > 0
    assert sum(facts["shares"].values()) == pytest.approx(1.0, abs=0.01)
    with gzip.open(file.with_name(facts["trace"]), "rt") as trace:
        names = {e.get("name") for e in json.load(trace)["traceEvents"]}
    assert {"aten::addmm", "ProfilerStep#0", "ProfilerStep#1"} <= names
    assert "ProfilerStep#2" not in names
    tracer.step_done()
    assert not tracer.records  # once for each request
    assert not Tracer(files, 3).records


def test_a_recipe_records_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRNSLURM_PROFILE", "2 1")
    files, tracer = worker(tmp_path, 0)
    _, other = worker(tmp_path, 3)
    begun = []
    for _ in range(4):
        tracer.step_done()
        other.step_done()
        begun.append((tracer.records, other.records))
    assert begun == [(False, False), (True, False), (False, False), (False, False)]
    assert eventually(lambda: read_json(files.profile_file("recipe", 0, "summary.json")))
    again = Tracer(files, 0)  # of the next attempt
    for _ in range(3):
        again.step_done()
        assert not again.records


@pytest.mark.parametrize(
    "request_", [{"workers": [1]}, {"workers": 3}, {"steps": 0}, {"id": "../x"}, {"id": None}]
)
def test_other_requests_are_ignored(tmp_path: Path, request_: dict[str, Any]) -> None:
    files, tracer = worker(tmp_path)
    ask(files, **request_)
    tracer.step_done()
    assert not tracer.records


def test_memory_is_of_a_gpu(tmp_path: Path) -> None:
    files, tracer = worker(tmp_path)
    ask(files, memory=True)
    tracer.step_done()
    problem = read_json(files.profile_file("a-1", 3, "summary.json"))["problem"]
    assert problem == "only GPU memory can be recorded, and this worker has no GPU"
    assert not tracer.records


def test_the_memory_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's calls in their order; the test on a GPU makes them."""
    called: list[dict[str, Any]] = []
    memory, profile = torch.cuda.memory, torch.profiler.profile
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(
        torch.profiler, "profile", lambda **how: profile(**how | {"activities": on_cpu})
    )
    monkeypatch.setattr(memory, "_record_memory_history", lambda **how: called.append(how))
    monkeypatch.setattr(memory, "_snapshot", lambda: {"segments": len(called)})
    files, tracer = worker(tmp_path)
    ask(files, memory=True, steps=1)
    for _ in range(2):
        tracer.step_done()
    assert eventually(lambda: read_json(files.profile_file("a-1", 3, "summary.json")))["trace"]
    assert called == [{"stacks": "python"}, {"enabled": None}]
    snapshot = files.profile_file("a-1", 3, "memory.pickle")
    assert pickle.loads(snapshot.read_bytes()) == {"segments": 1}


def test_a_second_profiler_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("Kineto is already in use")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    files, tracer = worker(tmp_path)
    ask(files)
    tracer.step_done()
    facts = read_json(files.profile_file("a-1", 3, "summary.json"))
    assert not tracer.records and "already in use" in facts["problem"]
