"""Values of the right type that no job can use: one line, before anything is made."""

from __future__ import annotations

import json

import pytest

SUBMIT = ("submit", "gpt2_zero1", "--cluster", "pc")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("env.PATH=/x", "env.PATH: the scripts set PATH themselves"),
        ("env.MASTER_ADDR=1.2.3.4", "rely on it"),
        ("env.SLURM_NODEID=0", "rely on it"),
        ("neuron.env.NEURON_RT_ROOT_COMM_ID=x", "rely on it"),
        ("steps=0", "steps is 0; it must be at least 1"),
        ("seed=-1", "seed is -1; it must be at least 0"),
        ("slurm.cpus_per_task=-1", "must be at least 0"),
        ("slurm.srun_wait_s=-4", "must be at least 0"),
        ("slurm.stop_before_s=-1", "must be at least 0"),
        ("slurm.max_crashes=0", "must be at least 1"),
        ("slurm.exclude_hours=-0.5", "must be at least 0"),
        ("train.lr=.nan", "train.lr is nan; it must be a finite number"),
        ("train.lr=.inf", "train.lr is inf; it must be a finite number"),
        ("reference=[{instance_type: trn1.32xlarge, nodes: 0, samples_per_s: 1}]", "than zero"),
        ("reference=[{instance_type: trn1.32xlarge, nodes: 1, samples_per_s: .nan}]", "than zero"),
        ("reference=[{nodes: 1}]", "reference[0] has no instance_type, samples_per_s"),
        ("reference=[{}]", "reference[0] has no instance_type, nodes, samples_per_s"),
        ("reference=[{nodes: 1, samples_per_s: 3}]", "reference[0] has no instance_type"),
        ("steps=" + 400 * "9", "a number of 2**63 or more: quote it if it is a string"),
        ("steps=" + 5000 * "9", "a number of 2**63 or more"),
        ("steps=0x" + 5000 * "f", "a number of 2**63 or more"),
        ("steps=-9223372036854775808", "a number of 2**63 or more"),
        ("ask_above_node_hours=9223372036854775808", "a number of 2**63 or more"),
        ("model.n_layer=9223372036854775808", "a number of 2**63 or more"),
        ("slurm.exclude_hours=.nan", "slurm.exclude_hours is nan; it must be at least 0"),
        ("steps=1:30", "steps must be a whole number, found '1:30'"),
        ("steps=010", "steps must be a whole number, found '010'"),
        ("train={lrr: 0.1}", 'unknown key train.lrr (did you mean "lr"?)'),
        ("train={lr: 1:30}", "train.lr must be a number, found '1:30'"),
        ("run_root=$HOME/runs", "Variables are not expanded"),
        ("run_root=", "run_root is empty"),
    ],
)
def test_refused(site, fake_slurm, cli, setting: str, words: str) -> None:
    done = cli(*SUBMIT, "--set", setting)
    assert done.code == 1
    assert words in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert site.runs() == []
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("presets: {p: 3}", "preset 'p' must be"),
        ("presets: {1: {}}", "preset 1 must be"),
        ("train: {since: 2024-01-01}", "train.since is a date: quote it"),
        ("train: {x: !!binary aGk=}", "train.x is a bytes: quote it"),
        (
            "train: {rate: 1}\ngraphs: {free: [rates]}",
            "graphs: 'rates' is not a key of train (did you",
        ),
    ],
)
def test_recipe_refused(site, fake_slurm, cli, recipe: str, words: str) -> None:
    site.recipe(f"batch: {{global_batch: 32}}\n{recipe}\n")
    done = cli("submit", "toy", "--cluster", "pc", "--time", "60")
    assert done.code == 1
    assert words in done.error
    assert site.runs() == []


def test_a_recipe_with_half_an_entry(site, cli) -> None:
    file = site.recipe("presets: {a: {reference: [{nodes: 1, samples_per_s: 2}]}}\n")
    error = cli("plan", "toy", "--preset", "a").error
    assert error == f"{file}: presets.a: reference[0] has no instance_type"


@pytest.mark.parametrize("setting", ["strategy.name=", "strategy.name=null", "strategy={name: }"])
def test_nothing_is_empty_where_empty_is_a_choice(site, cli, setting: str) -> None:
    shown = json.loads(cli("show", "gpt2_zero1", "--set", setting, "--json").out)
    assert shown["config"]["strategy"]["name"] == ""


@pytest.mark.parametrize("key", ["steps", "seq_len", "seed", "model.n_embd"])
def test_the_largest_numbers_are_reckoned_with(site, cli, key: str) -> None:
    others = {"seq_len": f"model.n_positions={2**63 - 1}", "model.n_embd": "model.n_head=7"}
    more = ("--set", others[key]) if key in others else ()
    sets = ("--set", f"{key}={2**63 - 1}", *more)
    done = cli("plan", "gpt2_zero1", "--cluster", "trn1", "--nodes", "1", *sets)
    if key in others:  # no device has such a memory
        assert "the parameters, gradients and optimizer state of a worker need" in done.error
    else:
        assert (done.code, done.err) == (0, "")


def test_sizes_that_no_model_has_are_left_to_the_job(site, cli) -> None:
    heads = ("--set", "model.num_attention_heads=0", "--nodes", "1")
    assert "GiB" not in cli("plan", "llama3_clm", *heads).out
    many = ("--set", "batch.micro_batch=1073741824", "--set", "batch.global_batch=1099511627776")
    done = cli("plan", "gpt2_zero1", *many, "--nodes", "1")
    assert done.out.splitlines()[-2].endswith("try --set batch.micro_batch=1")


def test_no_cluster_has_so_many_nodes(site, cli) -> None:
    for nodes in ("65537", 400 * "9"):
        error = cli("plan", "gpt2_zero1", "--nodes", nodes).error
        assert error == f"--nodes {nodes}: a cluster has at most 65,536 nodes"


def test_text_that_only_looks_like_a_number_is_text(site, cli) -> None:
    site.recipe("env: {UMASK: 027, AT: 1:30, PORT: 8080}\n")
    shown = json.loads(cli("show", "toy", "-c", "pc", "--json").out)
    assert shown["config"]["env"] == {"UMASK": "027", "AT": "1:30", "PORT": "8080"}
