"""submit: whether a run begins with a precompile job, depending on what the cache has."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trnslurm.cluster.claims import Holder, newest_in, take_next, update_claim
from trnslurm.submission import claims
from trnslurm.submission.lock import this_holder

TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2")


@pytest.fixture
def facts(graphs, cli):
    """What is known of the key of TOY."""
    return graphs.facts(cli, "toy", "--nodes", "2")


def graphs_of(done) -> str:
    (line,) = [line for line in (done.err + done.out).splitlines() if line.startswith("Graphs")]
    return line


def dependencies(fake_slurm) -> list[str]:
    """The dependency of each job, in order of submission."""
    found = []
    for call in fake_slurm.calls("sbatch"):
        words = [a for a in call.arguments if a.startswith("--dependency=")]
        found.append(words[0].removeprefix("--dependency=afterok:") if words else "")
    return found


def test_cold_key_is_compiled_first(graphs, facts, site, fake_slurm, cli) -> None:
    done = cli(*TOY)
    assert graphs_of(done) == (
        f"Graphs: not compiled (key {facts['key']}); precompile first, at most 6.0 node-hours (its "
        "time limit)"
    )
    run = site.run()
    assert run.record().jobs == {"precompile": "1001", "train": "1002"}
    assert run.record().precompile == {"key": facts["key"], "versions": facts["versions"]}
    claim = newest_in(graphs.files.directory(facts["key"]))
    assert claim is not None
    assert (claim.holder.job, claim.holder.run) == ("1001", str(run.path))
    assert f"graph key: {facts['key']}" in cli("status", "last").out


def test_warm_key_needs_no_precompile(graphs, facts, site, fake_slurm, cli) -> None:
    key = graphs.fill(facts)
    done = cli(*TOY)
    assert graphs_of(done) == (
        f"Graphs: compiled (key {key}, by an-older-run), so no precompile job; "
        "that saves 1.0 node-hours"
    )
    assert (
        "at most 13.0 node-hours within its time limits" in done.err
    )  # without the precompile's 6
    run = site.run()
    assert run.record().phases == ("train",)
    assert dependencies(fake_slurm) == [""]
    assert (run.path / "precompile.sbatch").exists()  # what is rendered never depends on a cache
    shown = cli("status", "last").out
    assert f"no precompile job: its graphs are compiled (key {key}, by an-older-run)" in shown
    assert json.loads(cli("status", "last", "--json").out)["precompile"]["key"] == key
    assert newest_in(graphs.files.directory(key)) is None


@pytest.mark.parametrize("damage", ["missing", "shorter", "untrusted"])
def test_damaged_key_is_compiled_again(graphs, facts, fake_slurm, cli, damage: str) -> None:
    key = graphs.fill(facts)
    graph = graphs.cache / f"neuronxcc-2/MODULE_{key}/model.neff"
    if damage == "missing":
        graph.unlink()
    elif damage == "shorter":
        graph.write_text("x")
    else:
        graph.chmod(0o666)
        graph.parent.chmod(0o777)
    said = graphs_of(cli(*TOY))
    assert said.startswith(f"Graphs: not compiled (key {key}: {graph}")
    assert dependencies(fake_slurm) == ["", "1001"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compile_cache": None}, "compile_cache is not set, so the graphs are on the nodes"),
        ({"compile_layout": "per-host"}, "every host has its own graphs"),
    ],
)
def test_graphs_on_the_nodes_are_looked_for_there(
    graphs, facts, fake_slurm, cli, changes: dict, why: str
) -> None:
    graphs.fill(facts)
    graphs.profile(**changes)
    for _ in range(2):  # another run's nodes may be others: nobody waits for them
        assert f"known only on the cluster ({why}); precompile first" in graphs_of(cli(*TOY))
    assert dependencies(fake_slurm) == ["", "1001", "", "1003"]


def test_policies(graphs, facts, site, fake_slurm, cli) -> None:
    graphs.fill(facts)
    assert graphs_of(cli(*TOY, "--precompile", "always")).endswith("node-hours (as for key "
        f"{facts['key']} of this recipe)")  # fmt: skip
    assert dependencies(fake_slurm) == ["", "1001"]
    never = cli(*TOY, "--precompile", "never")
    assert "no precompile (--precompile never)" in graphs_of(never)
    assert dependencies(fake_slurm)[2:] == [""]
    assert not (site.runs()[-1].path / "precompile.sbatch").exists()
    assert cli(*TOY, "--precompile", "auto").code == 0
    assert dependencies(fake_slurm)[3:] == [""]


def test_rendered_bundle_is_looked_up_too(graphs, facts, site, fake_slurm, cli) -> None:
    bundle = site.root / "bundle"
    assert cli("render", *TOY[1:], "-o", bundle).code == 0
    graphs.fill(facts)
    assert cli("submit", "--rendered", bundle).code == 0
    assert dependencies(fake_slurm) == [""]
    (bundle / "graphs.json").unlink()
    assert "the bundle does not list what determines its graphs" in graphs_of(
        cli("submit", "--rendered", bundle)
    )
    assert dependencies(fake_slurm)[1:] == ["", "1002"]


def test_second_submission_waits_for_the_first_ones_job(
    graphs, facts, site, fake_slurm, cli
) -> None:
    assert cli(*TOY, "--name", "first").code == 0
    done = cli(*TOY, "--name", "second", "--set", "steps=9", "--time", "60")
    line = graphs_of(done)
    assert line.startswith(f"Graphs: being compiled (key {facts['key']}) by ")
    assert "-first of " in line and line.endswith(", job 1001; training waits for that job")
    assert dependencies(fake_slurm) == ["", "1001", "1001"]
    second = site.runs()[-1]
    assert second.record().phases == ("train",)
    shown = cli("status", "last").out
    assert "waiting for job 1001, which compiles its graphs" in shown
    assert "no precompile job: " in shown and "-first of " in shown

    # Their compilation fails: Slurm drops what waited for it.
    fake_slurm.queue("1001|FAILED|NonZeroExitCode|N/A|", "1003|CANCELLED|Dependency|N/A|")
    status = json.loads(cli("status", "last", "--json").out)
    assert status["state"] == "CANCELLED"
    assert status["reason"] == (
        "never started: job 1001, which compiles its graphs, did not succeed"
    )
    fake_slurm.queue()
    assert json.loads(cli("status", "last", "--json").out)["state"] == "CANCELLED"


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "forgotten"])
def test_claim_of_a_job_that_ended_is_stale(graphs, facts, fake_slurm, cli, state: str) -> None:
    assert cli(*TOY).code == 0
    fake_slurm.queue(*([] if state == "forgotten" else [f"1001|{state}|None|N/A|"]))
    assert cli(*TOY).code == 0
    assert dependencies(fake_slurm) == ["", "1001", "", "1003"]
    claim = newest_in(graphs.files.directory(facts["key"]))
    assert claim is not None and (claim.number, claim.holder.job) == (2, "1003")
    assert not (claim.path.parent / "claim-1.json").exists()


def test_refused_submission_gives_its_claim_back(graphs, facts, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch", "sbatch: error: no")
    assert cli(*TOY).code == 1
    assert newest_in(graphs.files.directory(facts["key"])) is None


def test_claim_of_a_killed_submission_is_stale(graphs, facts, fake_slurm, cli) -> None:
    holder = Holder(host=socket.gethostname(), process="1@0", run="/x")
    take_next(graphs.files.open(facts["key"]), holder, None, graphs.cache)
    assert cli(*TOY).code == 0
    assert dependencies(fake_slurm) == ["", "1001"]


def test_submission_waits_for_one_that_is_submitting(
    graphs, facts, fake_slurm, cli, monkeypatch
) -> None:
    """Until it knows the job that it can depend on."""
    holder = this_holder(run="/runs/theirs")
    claim = take_next(graphs.files.open(facts["key"]), holder, None, graphs.cache)
    assert claim is not None
    fake_slurm.queue("77|RUNNING|None|N/A|")
    submits = SimpleNamespace(sleep=lambda _: update_claim(claim, replace(holder, job="77")))
    monkeypatch.setattr(claims, "time", submits)
    done = cli(*TOY)
    assert (
        "Waiting: its graphs are being compiled (key " in done.err and ") by theirs of " in done.err
    )
    assert dependencies(fake_slurm) == ["77"]


def test_two_at_the_same_moment_compile_once(graphs, facts, fake_slurm, run_cli) -> None:
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: run_cli(*TOY, "--name", n)}))
        for n in ("one", "two")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.code for r in results.values()] == [0, 0], results
    scripts = [c.arguments[-1] for c in fake_slurm.calls("sbatch")]
    assert sum("precompile" in Path(script).name for script in scripts) == 1
    assert len(scripts) == 3


def test_someone_who_is_not_trusted_compiles_for_himself(
    graphs, facts, fake_slurm, cli, monkeypatch
) -> None:
    assert cli(*TOY).code == 0
    own = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: own + 1)
    claim = newest_in(graphs.files.directory(facts["key"]))
    assert claim is not None
    if own == 0:
        os.chown(claim.path, 4242, -1)
    assert cli(*TOY).code == 0
    assert dependencies(fake_slurm)[2] == ""


def test_cache_that_cannot_be_written_is_only_warned_about(graphs, facts, fake_slurm, cli) -> None:
    graphs.cache.write_text("no directory")
    done = cli(*TOY)
    assert done.code == 0
    assert "others may compile the same graphs" in done.err
    assert dependencies(fake_slurm) == ["", "1001"]


def test_chain_has_a_key_for_each_run(graphs, site, fake_slurm, cli) -> None:
    site.recipe(
        "steps: 10\nbatch: {global_batch: 64}\ntrain: {init_from: '', save_every: 5}\n"
        "graphs: {free: [init_from]}\nslurm: {time_min: 60}\npresets:\n"
        "  a: {then: b}\n  b: {then: c, steps: 20}\n  c: {seq_len: 32}\n"
    )
    chain = ("submit", "toy", "--cluster", "pc", "--preset", "a", "--chain")
    done = cli(*chain)
    assert done.code == 0, done.err
    a, b, c = site.runs()
    assert [r.record().phases for r in (a, b, c)] == [
        ("precompile", "train"), ("train",), ("precompile", "train"),
    ]  # fmt: skip
    assert (
        "its graphs are compiled by another run of this submission"
        in b.record().precompile["left_out"]
    )
    assert dependencies(fake_slurm) == ["", "1001", "1002", "1003", "1004"]
    keys = [r.record().precompile["key"] for r in (a, b, c)]
    assert keys[0] == keys[1] != keys[2]
    # What waits for a training is not what others should wait for.
    assert newest_in(graphs.files.directory(keys[2])) is None
