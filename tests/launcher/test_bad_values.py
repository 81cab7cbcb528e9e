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
        ("slurm.cpus_per_task=0", "must be at least 1"),
        ("slurm.srun_wait_s=-4", "must be at least 0"),
        ("slurm.stop_before_s=-1", "must be at least 0"),
        ("slurm.max_crashes=0", "must be at least 1"),
        ("slurm.exclude_hours=-0.5", "must be at least 0"),
        ("train.lr=.nan", "train.lr is nan; it must be a finite number"),
        ("train.lr=.inf", "train.lr is inf; it must be a finite number"),
        ("reference=[{instance_type: trn1.32xlarge, nodes: 0, samples_per_s: 1}]", "above zero"),
        ("reference=[{instance_type: trn1.32xlarge, nodes: 1, samples_per_s: .nan}]", "above zero"),
        ("reference=[{nodes: 1}]", "reference[0] lacks instance_type, samples_per_s"),
        ("reference=[{}]", "reference[0] lacks instance_type, nodes, samples_per_s"),
        ("reference=[{nodes: 1, samples_per_s: 3}]", "reference[0] lacks instance_type"),
        ("run_root=$HOME/runs", "variables are not expanded"),
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
            "graphs: 'rates' is no key of train (did you",
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
    assert error == f"{file}: presets.a: reference[0] lacks instance_type"


@pytest.mark.parametrize("setting", ["strategy.name=", "strategy.name=null", "strategy={name: }"])
def test_nothing_is_empty_where_empty_is_a_choice(site, cli, setting: str) -> None:
    shown = json.loads(cli("show", "llama3_clm", "--set", setting, "--json").out)
    assert shown["config"]["strategy"]["name"] == ""
