"""A job of 1,000 nodes: what its scripts, its environment, its files and its readers make of it.

Counted are bytes, files and Python's own steps, which no busy machine changes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from trnslurm.config.load import resolve
from trnslurm.config.search import Workspace, packaged_root
from trnslurm.contract.files import read_json, write_json
from trnslurm.devices import NEURON
from trnslurm.node import ports
from trnslurm.node.preflight.checks import Needs, open_files
from trnslurm.node.preflight.verdict import NodeReport, judge
from trnslurm.node.triage import causes
from trnslurm.node.triage.diagnosis import diagnose
from trnslurm.plan.spec import make_spec
from trnslurm.render.job import render_job

from ..processes import run_process

WORKSPACE = Workspace(roots=(packaged_root(),), cluster=None, cluster_source="")
NODES = 1000
MAX_ARG_STRLEN = 128 << 10  # of one word or variable: include/uapi/linux/binfmts.h, PAGE_SIZE * 32
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/fsx/run/code/jobs/gpt2_zero1/train.py", line 60, in main',
    "    run.end(step, optimizer.step(run.lr(step)))",
    "RuntimeError: Connection closed by peer [10.0.0.9]:4242",
]  # fmt: skip


def hosts(number: int) -> list[str]:
    return [f"compute-dy-trn1-{n}" for n in range(1, number + 1)]


def steps_of(action: Callable[[], Any]) -> int:
    """Return how many instructions of Python an action takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def bundle(nodes: int) -> dict[str, bytes]:
    settings = ["slurm.max_nodes=null", "batch.global_batch=32000"]
    config = resolve(WORKSPACE, "gpt2_zero1", cluster="trn1", settings=settings)
    spec = make_spec(config, nodes, need_time=False)
    return render_job(spec, WORKSPACE.template_dirs()).files


def test_scripts_do_not_grow_with_the_nodes() -> None:
    few, many = (bundle(nodes) for nodes in (2, NODES))
    assert few.keys() == many.keys()
    for name, content in many.items():
        assert len(content) < len(few[name]) + 100, name


@pytest.mark.parametrize(("nodes", "limit"), [(2, 65536), (510, 65536), (NODES, 128_256)])
def test_node_sh_raises_the_limit_that_the_preflight_asks_for(nodes, limit, monkeypatch) -> None:
    script = bundle(nodes)["node.sh"].decode()
    assert f"ulimit -n {limit} " in script
    needs = Needs(
        run=Path(), phase="train", nodes=nodes, device=NEURON, devices=16, workers=32, efa=8,
        data="", caches=(), min_free=0,
    )  # fmt: skip
    for given in (limit, 256 + 4 * 32 * nodes - 1):
        monkeypatch.setattr("resource.getrlimit", lambda _, given=given: (given, given))
        assert bool(open_files(needs).problem) == (given < limit)


def test_the_names_of_all_hosts_fit_into_the_environment() -> None:
    """The longest names that DNS and Slurm take have 63 characters."""
    names = ",".join(f"{'q' * 58}-{n:04}" for n in range(NODES))
    assert len(f"TRNSLURM_HOSTS={names}") < MAX_ARG_STRLEN / 2
    count = "import os; print(len(os.environ['TRNSLURM_HOSTS'].split(',')))"
    done = run_process(
        ["bash", "-c", 'exec "$0" -c "$1"', sys.executable, count],
        env=os.environ | {"TRNSLURM_HOSTS": names},
    )
    assert int(done.ok) == NODES


def test_ports_of_thousands_of_jobs_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On nodes that jobs share a port that is taken is passed over; few begin at the same one."""
    monkeypatch.setattr(ports, "is_free", lambda port, address: True)
    usable = ports.usable_ports(range(32768, 61000))
    monkeypatch.setattr(ports, "usable_ports", lambda ephemeral: usable)
    jobs = 5000
    picks = [ports.choose(str(41_000_000 + n), 0, 2, None) for n in range(jobs)]
    assert all(first in ports.PREFERRED[0] and first != second for first, second in picks)
    # Thrown at random, so many balls hit 3,935 of 10,000 boxes, and hardly ever 3 % fewer.
    expected = len(usable) * (1 - (1 - 1 / len(usable)) ** jobs)
    assert len({first for first, _ in picks}) > 0.97 * expected
    mates = 64  # jobs at a time on one node, of consecutive numbers
    shared = sum(
        len({port for pick in picks[at : at + mates] for port in pick}) < 2 * mates
        for at in range(0, jobs - mates, mates)
    )
    assert shared < jobs / mates


def judged(number: int) -> int:
    """Steps of the verdict on nodes, a third of which have each another trouble."""

    def one(n: int) -> NodeReport:
        problems = {} if n % 3 else {"memory": f"{n} MiB of memory available"}
        same = {"Python": "3.11.7", "code/": "a" * 64 if n % 7 else f"{n:064}"}
        return NodeReport(node=n, host=f"n{n}", problems=problems, same=same, heard=n % 11 != 5)

    nodes = [one(n) for n in range(number)]
    return steps_of(lambda: judge(nodes, {5: "cannot reach node 0"}, 20.0))


def test_a_verdict_takes_as_long_per_node_for_any_number() -> None:
    judged(10)
    assert judged(NODES) < 11 * judged(NODES // 10)


@pytest.fixture
def crashed(make_run) -> Callable[[int], Any]:
    """Make a run that died of a lost peer, of which each of its workers tells."""

    def make(number: int, workers: int = 1) -> Any:
        names = hosts(number)
        state = {"state": "FAILED", "cause": "crash", "hosts": ",".join(names), "exit_code": 1}
        run = make_run(
            f"20260101-{number:06}-gpt{workers}", states={"train": [state]}, nodes=number,
            phases=("train",), jobs={"train": "1002"},
        )  # fmt: skip
        run.plan_file.write_text(json.dumps({"steps": 30, "workers_per_node": workers}))
        nodes = []
        for node, host in enumerate(names):
            nodes.append({"node": node, "host": host, "ok": True, "problems": []})
            log = f"train: node {node}\n"
            for rank in range(node * workers, (node + 1) * workers):
                text = "".join(f"[rank{rank}]: {line}\n" for line in TRACEBACK)
                log += text
                record = {
                    "time": 1e9 + rank, "rank": rank, "node": node, "host": host, "step": 3,
                    "steps_done": 2, "raised": ["builtins.RuntimeError"], "traceback": text,
                }  # fmt: skip
                write_json(run.failed_file("train", 1, rank), record)
            run.node_log("train", 1, node).write_text(log)
        write_json(run.preflight_file("train", 1), {"nodes": nodes, "bad": []})
        return run

    return make


def test_triage_takes_as_long_per_node_for_any_number(crashed) -> None:
    diagnose(crashed(5).path, "train", 1)
    few, many = crashed(20), crashed(200)
    taken = {}
    for run in (few, many):
        causes.built_in().matching.cache_clear()  # it knows lines of the run before
        taken[run] = steps_of(lambda run=run: diagnose(run.path, "train", 1))
    assert taken[many] < 11 * taken[few]


def test_triage_opens_as_many_files_for_any_number_of_workers(crashed, monkeypatch) -> None:
    """It finds the cause all the same, on a node whose clock is late."""
    opened: list[object] = []
    real = os.open

    def count(path: Any, *rest: Any, **named: Any) -> int:
        opened.append(path)
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", count)
    nodes, found = 40, []
    for workers in (8, 16):
        run = crashed(nodes, workers)
        rank = nodes * workers - 2
        file = run.failed_file("train", 1, rank)
        error = {"raised": ["builtins.KeyError"], "traceback": "KeyError: 'lr'", "time": 3e9}
        write_json(file, read_json(file) | error)
        late = time.time() + 3600
        for other in range((nodes - 1) * workers, nodes * workers):
            os.utime(run.failed_file("train", 1, other), (late + 9, late + 9))
        os.utime(file, (late, late))
        opened.clear()
        cause = diagnose(run.path, "train", 1)
        assert cause is not None and (cause.rank, cause.lines) == (rank, ("KeyError: 'lr'",))
        found.append(len(opened))
    assert nodes < found[1] <= found[0] < 6 * nodes


def test_a_run_on_a_thousand_nodes_is_told_in_a_few_lines(crashed, fake_slurm, cli) -> None:
    run = crashed(NODES)
    status = cli("status", run.name)
    assert status.code == 0, status.err
    assert "compute-dy-trn1-[1-1000]" in status.out and len(status.out) < 3000
    told = cli("triage", run.name)
    assert "node 0 (compute-dy-trn1-1)" in told.out and len(told.out) < 3000
    last = cli("logs", run.name, "--node", "999")
    assert "train: node 999" in last.out
    assert (
        cli("logs", run.name, "--node", "1000")
        .err.strip()
        .endswith("has no node 1000, only nodes 0 to 999")
    )
    everything = json.loads(cli("status", run.name, "--json").out)
    assert everything["phases"][0]["hosts"].split(",") == hosts(NODES)


def test_nodes_that_are_left_out_are_told_in_a_line(make_run, fake_slurm, cli) -> None:
    run = make_run(
        states={"train": [{"state": "REQUEUED", "hosts": "a,b"}]}, phases=("train",),
        jobs={"train": "1002"},
    )  # fmt: skip
    until = {
        host: {"until": time.time() + 3600, "why": "preflight failed"} for host in hosts(NODES - 1)
    }
    write_json(run.excluded_file, {"nodes": until})
    fake_slurm.queue("1002|PENDING|Resources|N/A|")
    told = cli("status", run.name)
    assert "excluding compute-dy-trn1-[1-999]" in told.out
