"""submit on this machine, with a stand-in for the launcher: the rest of the chain is real."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trnslurm.node.graphs.manifest import GraphCache, GraphManifest, NodeResult
from trnslurm.runs.status import run_status

from ..waiting import eventually

RECIPE = "steps: 3\nbatch: {global_batch: 8}\nprecompile: %s\n"
SUBMIT = ("submit", "toy", "--cluster", "here", "--nodes", "2")


@pytest.fixture
def here(site) -> Callable[..., None]:
    """Make this machine a cluster whose Python runs bash lines in the place of the launcher."""

    def make(program: str, *, precompile: str = "never") -> None:
        site.here(program)
        site.recipe(RECIPE % precompile)

    return make


def test_followed_to_its_good_end(site, here, cli, run_cli, monkeypatch) -> None:
    here(
        'echo "phase $TRNSLURM_PHASE node $SLURM_NODEID secret ${MY_SECRET:-none}'
        ' gpus $CUDA_VISIBLE_DEVICES"\n'
        'if [ "$SLURM_NODEID$TRNSLURM_PHASE" = 0train ]; then\n'
        '  echo \'{"step": 1, "steps": 3, "loss": 9.5, "tokens_per_s": 100}\' > metrics.jsonl\n'
        '  echo \'{"step": 3, "steps": 3, "loss": 7.5, "tokens_per_s": 200, "eval_s": 1,'
        ' "eval_loss": 7, "eval_accuracy": 0.25}\' >> metrics.jsonl\n'
        "fi",
        precompile="always",
    )
    Path("tokenize.py").write_text("raise SystemExit('not the one of Python')\n")
    monkeypatch.setenv("MY_SECRET", "leaked")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    done = run_cli(*SUBMIT)
    run = site.run()
    assert done.code == 0, done
    assert done.out.splitlines() == [
        f"Submitted {run.name}",
        f"{run.name}: COMPLETED",
        "loss 9.5000 at step 1 -> 7.5000 at step 3, 200 tokens/s",
        "held out: loss 7.0000  accuracy 0.2500",
        f"run directory: {run.path}",
    ]
    for phase in ("precompile", "train"):
        for node in (0, 1):
            text = run.node_log(phase, 1, node).read_text()
            assert f"phase {phase} node {node} secret none gpus 3" in text
    assert cli("status", "last").out.startswith(f"{run.name}: COMPLETED")


def test_gpus_of_this_machine_need_no_network(cli, home: Path) -> None:
    """NCCL refuses to start where it finds no interface but those that it is told to leave out."""
    for cluster, name in (("local", "lo "), ("p4d", "'^lo,docker,veth' ")):
        gpus = ("--cluster", cluster, "--set", "device=cuda", "--set", "slurm.time_min=60")
        assert cli("render", "gpt2_zero1", *gpus, "--nodes", "1", "--output", cluster).code == 0
        [script] = Path(cluster).glob("train.s*")
        assert f"export NCCL_SOCKET_IFNAME={name}" in script.read_text()


def test_emulated_nodes_do_not_share_gpus(cli) -> None:
    """Every one of them would begin with the first GPU."""
    gpus = ("gpt2_zero1", "-p", "xl", "-c", "local", "--set", "device=cuda", "--workers", "1")
    refused = cli("render", *gpus, "--nodes", "2")
    assert refused.code == 1
    assert refused.error.endswith("Use --nodes 1 --workers 2, with a GPU for each worker")
    assert cli("plan", *gpus, "--nodes", "1").code == 0


def test_failure_is_told_with_its_first_error(site, here, run_cli) -> None:
    here('[ "$SLURM_NODEID" = 0 ] && exec sleep 600; echo "ValueError: the cause"; exit 3')
    done = run_cli(*SUBMIT)
    run = site.run()
    assert done.code == 1
    assert f"{run.name}: FAILED (local-1: ValueError: the cause)\nnext: " in done.out
    (attempt,) = run.attempts("train")
    assert (attempt.state, attempt.exit_code) == ("FAILED", 3)


def test_versions_of_the_packages_that_failed_are_told(site, here, run_cli, cli) -> None:
    """The attempt looks up those that the traceback names, and the node has noted what it has."""
    here(
        f"until [ -s state/machine-train-1-node$SLURM_NODEID.json ]; do sleep 0.1; done\n"
        f"exec '{sys.executable}' -c 'from yaml import nothing'"
    )
    assert run_cli(*SUBMIT).code == 1
    installed = f"installed: pyyaml {importlib.metadata.version('pyyaml')}"
    assert installed in cli("triage", "last").out
    assert json.loads(cli("triage", "last", "--json").out)["modules"] == ["yaml"]


def test_train_does_not_start_when_the_precompile_failed(site, here, run_cli) -> None:
    here('[ "$TRNSLURM_PHASE" = train ]', precompile="always")
    done = run_cli(*SUBMIT, "--json")
    run = site.run()
    assert done.code == 1
    assert json.loads(done.out)["run"] == run.name
    status = run_status(run)
    assert status.state == "FAILED"
    assert status.reason.startswith("precompile: exit code 1 while running")
    assert run.attempts("train") == []


WAITING = 'touch "started-$SLURM_NODEID"\nexec sleep 600'


def started(site) -> bool:
    return bool(site.runs()) and len(list(site.run().path.glob("started-*"))) == 2


def test_interrupted_from_the_keyboard(site, here) -> None:
    here(WAITING)
    with subprocess.Popen(
        [sys.executable, "-m", "trnslurm", *SUBMIT],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            eventually(lambda: started(site), said="both nodes run")
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of it
            _, err = process.communicate(timeout=600)
        finally:
            process.kill()
    run = site.run()
    assert process.returncode == 130
    assert err.splitlines()[-2:] == [
        f"{run.name}: CANCELLED (by trnslurm cancel; no step is saved)",
        f"next: trnslurm resume {run.name}",
    ]
    assert run.attempts("train")[0].state == "CANCELLED"
    assert not run.record().local_job_alive


def test_detached_runs_on_and_can_be_cancelled(site, here, cli, run_cli) -> None:
    here(WAITING)
    done = run_cli(*SUBMIT, "--detach")
    run = site.run()
    assert (done.code, done.out) == (
        0, f"Submitted {run.name}\nSee: trnslurm status {run.name}\n",
    )  # fmt: skip
    eventually(lambda: started(site), said="both nodes run")
    assert run_status(run).state == "RUNNING"
    assert cli("cancel", "last").out == f"Cancelled {run.name}\n"
    assert run_status(run).state == "CANCELLED"
    assert not run.record().local_job_alive


def test_second_run_waits_while_the_first_compiles(
    site, here, cli, run_cli, tmp_path: Path
) -> None:
    """Without Slurm there is no job to depend on: submit itself waits, and then looks again."""
    here('[ "$TRNSLURM_PHASE" = precompile ] && sleep inf')
    site.profile(
        "here", scheduler="local", instance_type="local", device="xla-cpu", workers_per_node=1,
        python=str(tmp_path / "a python"), slurm={},
    )  # fmt: skip
    site.recipe(RECIPE % "auto")
    submit = (*SUBMIT, "--detach")
    assert run_cli(*submit, "--name", "first").code == 0
    first = site.runs()[-1]
    eventually(lambda: run_status(first).state == "PRECOMPILING", said="the first compiles")
    with ThreadPoolExecutor() as pool:
        second = pool.submit(run_cli, *submit, "--name", "second")
        eventually(lambda: len(site.runs()) == 2, said="the second has a directory")
        time.sleep(0.5)  # several looks
        assert not second.done()
        facts = json.loads(cli("compile", "key", *SUBMIT[1:], "--json").out)
        node = NodeResult(node=0, host="x", graphs=1, compiled=1, failed=0, seconds=1.0)
        parts = {name: facts[name] for name in ("key", "ingredients", "versions")}
        manifest = GraphManifest(**parts, made={}, nodes=(node,))
        GraphCache(site.run_root / ".compiled").write(manifest)
        done = second.result()
    assert done.code == 0, done
    assert "Waiting: its graphs are being compiled (key " in done.err
    assert f" by {first.name} of " in done.err
    assert [run.record().phases for run in site.runs()] == [("precompile", "train"), ("train",)]
    for run in site.runs():
        cli("cancel", run.path)
        eventually(lambda run=run: not run.record().local_job_alive, said="it has ended")


def test_resumed_with_another_number_of_nodes(site, here, cli, run_cli) -> None:
    """Refused while it runs; then it continues in its directory, and completes."""
    here('[ "$TRNSLURM_ATTEMPT" -gt 1 ] || { touch there; sleep 600; }; echo "$SLURM_NNODES" > ran')
    assert run_cli(*SUBMIT, "--detach").code == 0
    run = site.run()
    eventually((run.path / "there").exists, said="its start")
    assert "is RUNNING: let it run, or run `trnslurm cancel" in cli("resume", "last").error
    assert cli("cancel", "last").code == 0
    done = run_cli("resume", "last", "--nodes", "1")
    assert done.code == 0, done
    assert f"{run.name}: COMPLETED" in done.out
    assert (run.path / "ran").read_text() == "1\n"
    status = run_status(run)
    assert [a.state for a in status.attempts] == ["CANCELLED", "COMPLETED"]
    assert (status.nodes, status.history[0]["nodes"], status.mend) == (1, 2, "")
