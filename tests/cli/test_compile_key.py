"""compile key: what it is made of, where it is known, and why two are not the same."""

from __future__ import annotations

import json

import pytest

TOY = ("toy", "--cluster", "pc", "--nodes", "2")
OTHER = ("--set", "batch.micro_batch=4", "--set", "batch.global_batch=256")


def test_key_of_a_job(graphs, cli) -> None:
    done = cli("compile", "key", *TOY)
    assert (done.code, done.err) == (0, "")
    assert done.out.strip() == graphs.facts(cli, *TOY[:1], "--nodes", "2")["key"]
    assert len(done.out.strip()) == 16


def test_explain_shows_every_ingredient(graphs, cli) -> None:
    out = cli("compile", "key", *TOY, "--explain").out
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines()[3:]}
    assert (rows["nodes"], rows["micro_batch"], rows["device"]) == ("2", "1", "neuron")
    assert (rows["versions.torch"], rows["versions.neuronx-cc"]) == ("2.9.1", "2.26.1")
    assert len(rows["source.jobs/toy/train.py"]) == 12


@pytest.mark.parametrize(
    ("option", "same"),
    [
        ("steps=7", True), ("seed=9", True), ("batch.global_batch=128", True),
        ("run_root=/elsewhere", True), ("batch.micro_batch=2", False), ("precision=bf16", False),
        ("seq_len=64", False), ("neuron.cc_flags=-O1", False), ("workers_per_node=8", False),
        ("neuron.cc_flags=--retry_failed_compilation", True),
        ("env.NEURON_RT_STOCHASTIC_ROUNDING_EN=1", True), ("env.NEURON_FUSE_SOFTMAX=0", False),
        ("env.DISABLE_NUMERIC_CC_TOKEN=1", False),
    ],
)  # fmt: skip
def test_what_is_in_the_key(graphs, cli, option: str, same: bool) -> None:
    keys = [graphs.facts(cli, "toy", *more)["key"] for more in ((), ("--set", option))]
    assert (keys[0] == keys[1]) == same


def test_versions_are_in_the_key(graphs, cli) -> None:
    before = graphs.facts(cli, "toy")["key"]
    graphs.say_versions(torch="2.9.1", neuronx_cc="2.27.0")
    assert graphs.facts(cli, "toy")["key"] != before


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/shared/none/python", "there is no /shared/none/python on this host"),
        ("/bin/true", "/bin/true fails on this host: it did not print an answer"),
        ("/bin/false", "/bin/false fails on this host: it did not print an answer"),
    ],
)
def test_without_the_clusters_python(graphs, cli, python: str, why: str) -> None:
    graphs.profile(python=python)
    done = cli("compile", "key", *TOY)
    assert done.code == 1
    assert done.error == (
        f"the key is known only on the cluster: {why}. Pass --explain to show the rest"
    )
    explained = cli("compile", "key", *TOY, "--explain")
    assert explained.code == 0
    assert explained.out.startswith(f"The key is known only on the cluster: {why}\n")
    assert "micro_batch" in explained.out and "versions." not in explained.out


def test_python_without_torch_says_nothing_of_the_cluster(graphs, cli) -> None:
    graphs.say_versions(timm="1.0")
    assert "has no torch on this host" in cli("compile", "key", *TOY).error


def test_diff_of_runs_bundles_and_keys(graphs, site, fake_slurm, cli, stable) -> None:
    assert cli("submit", *TOY, "--name", "one").code == 0
    assert cli("submit", *TOY, "--name", "two", *OTHER, "--time", "60").code == 0
    bundle = site.root / "bundle"
    assert cli("render", *TOY, "-o", bundle, "--set", "steps=9").code == 0
    key = graphs.fill(graphs.facts(cli, "toy", "--nodes", "2", "--set", "seq_len=64"))

    diff = ("compile", "key", "--cluster", "pc", "--diff")
    done = cli(*diff, "one", "two")
    assert (done.code, done.out, done.err) == (1, "micro_batch: 1 -> 4\n", "")
    assert (cli(*diff, "one", bundle).code, cli(*diff, "one", bundle).out) == (0, "")
    assert cli(*diff, "two", key).out == "micro_batch: 4 -> 1\nseq_len: 0 -> 64\n"
    said = json.loads(cli(*diff, "one", "two", "--json").out)
    assert said == [{"ingredient": "micro_batch", "a": 1, "b": 4}]
    stable.json("compile key (--diff)", said)
    known = graphs.facts(cli, "toy")
    stable.json("compile key", known, free=["ingredients", "versions"])
    graphs.say_versions(torch="2.9.1", neuronx_cc="3")
    assert cli(*diff, "one", bundle).out == "versions.neuronx-cc: 2.26.1 -> 3\n"
    assert cli(*diff, "one", "0" * 16).error.startswith("no run '0000000000000000' in ")


def test_versions_that_are_not_known_are_not_compared(graphs, fake_slurm, cli) -> None:
    assert cli("submit", *TOY, "--name", "one").code == 0
    graphs.profile(python="/shared/none/python")
    assert cli("submit", *TOY, "--name", "two").code == 0
    done = cli("compile", "key", "--cluster", "pc", "--diff", "one", "two")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("note: versions not compared: two: ")


def test_plan_says_what_is_compiled(graphs, cli, stable) -> None:
    graphs.fill(graphs.facts(cli, "toy", "--nodes", "2"))
    lines = cli("plan", "toy", "--cluster", "pc", "--nodes", "1,2").out.splitlines()
    one, two = [line for line in lines if line.startswith("Graphs")]
    assert one.startswith("Graphs on 1 node: not compiled (key ")
    assert "; precompile about 0.5 node-hours (as for key " in one
    assert two.startswith("Graphs on 2 nodes: compiled (key ") and two.endswith("an-older-run)")

    plans = json.loads(cli("plan", "toy", "--cluster", "pc", "--nodes", "1,2,9", "--json").out)
    assert [row["graphs"]["compiled"] for row in plans["plans"]] == [False, True]
    gpt2 = json.loads(cli("plan", "gpt2_zero1", "--nodes", "1", "--json").out)
    stable.json("plan", plans, gpt2)

    graphs.profile(python="/shared/none/python")
    (line,) = [
        line
        for line in cli("plan", "toy", "--cluster", "pc", "--nodes", "1,2").out.splitlines()
        if line.startswith("Graphs")
    ]
    assert "known only on the cluster (there is no /shared/none/python on this host)" in line
    assert line.endswith("; precompile at most 3.0 hours on each node (its time limit)")
