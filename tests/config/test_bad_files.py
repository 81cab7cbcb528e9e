"""What is wrong in files: profiles, recipes, templates, the admin's site file, settings."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from trnslurm.config import load

TOY = ("submit", "toy", "--cluster", "pc")
GOOD = "steps: 3\nbatch: {global_batch: 64}\nslurm: {time_min: 5}\n"


@pytest.fixture
def refused(site, fake_slurm, cli):
    """Submit the toy recipe, and return the one error line."""
    site.recipe(GOOD)

    def call(*arguments: str) -> str:
        done = cli(*TOY, *arguments)
        assert done.code == 1, done
        assert fake_slurm.calls() == []
        assert not site.run_root.exists()
        return done.error

    return call


# Nine levels of nine references: a little text that is a lot.
ALIASES = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
# Text of a recipe -> what the line must say; every line names the file.
RECIPES = {
    "syntax": ("steps: [1\nbatch: 2\n", "recipe.yaml:2: "),
    "tab": ("steps: 3\n\tx: 1\n", "recipe.yaml:2: "),
    "twice": (GOOD + "steps: 4\n", "recipe.yaml:4: key steps is given twice"),
    "twice below": ("batch: {global_batch: 1, global_batch: 2}\n", "global_batch is given twice"),
    "unknown key": (GOOD + "setps: 4\n", 'unknown key setps (did you mean "steps"?)'),
    "unknown below": (GOOD.replace("n: 5", "m: 5"), 'slurm.time_mim (did you mean "time_min"?)'),
    "type": ("steps: many\n", "steps must be a whole number, found 'many'"),
    "list": ("- steps\n", "expected `key: value` lines, found list"),
    "scalar": ("hello\n", "expected `key: value` lines, found str"),
    "mapping": (GOOD.replace("{global_batch: 64}", "64"), "batch must be a mapping, found 64"),
    "site facts": (GOOD + "run_root: /x\n", "unknown key run_root"),
    "description": (GOOD + "description: [a, b]\n", "description must be a string, found "),
    "presets": (GOOD + "presets: [xl]\n", "presets must be a mapping of names"),
    "then": (GOOD + "presets: {a: {then: bb}, b: {}}\n",
             "presets.a.then is 'bb', which is not a preset of the recipe (did you mean \"b\"?)"),
    "then, not text": (GOOD + "presets: {a: {then: [b]}, b: {}}\n", "presets.a.then is ['b'], "),
    "then itself": (GOOD + "presets: {a: {then: a}}\n", "forms a cycle: a -> …"),
    "then in a circle": (GOOD + "presets: {a: {then: b}, b: {then: c}, c: {then: b}}\n",
                         "presets.a.then forms a cycle: a -> b -> c -> …"),
    "key not text": (GOOD + "1: 2\n", "unknown key 1"),
    "env number": (GOOD + "env: {A: [1]}\n", "env.A must be a string, found [1]"),
    "env key": (GOOD + "env: {1: x}\n", "env has a key that is not a string: 1"),
    "python tag": ("steps: !!python/object/apply:os.system ['true']\n", "recipe.yaml:1: "),
    "two documents": ("steps: 3\n---\nsteps: 4\n", "recipe.yaml"),
    "number": (GOOD.replace("3", 5000 * "9"), "recipe.yaml:1: a number of 2**63 or more: quote"),
    "date": (GOOD + "train: {x: 2024-13-45}\n", "1..12: quote values that are strings"),
    "deep": (GOOD + f"train: {300 * '{a: '}1{300 * '}'}\n", "nested too deeply"),
    # libyaml itself overflows the stack there, which ends the process.
    # In libyaml's words, since PyYAML 6.0.4, or in ours.
    "very deep": (GOOD + f"train: {100_000 * '['}\n", "nest"),
    "aliases": (GOOD + ALIASES + "train: {x: *a9}\n",
                "recipe.yaml:1: more than 100,000 values, aliases counted"),
    "aliases merged": (GOOD + "a: &a {b: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}' if n else '*a'] * 9)}]}}\n"
        for n in range(9)), "more than 100,000 values, aliases counted"),
    "entry": (GOOD + "entry: go.py\n", "the recipe's entry go.py does not exist"),
    "entry outside": (GOOD + "entry: ../other.py\n", "the recipe's entry ../other.py does not"),
}  # fmt: skip


@pytest.mark.parametrize("what", RECIPES)
def test_recipe(refused, site, what: str) -> None:
    text, words = RECIPES[what]
    site.recipe(text)
    error = refused()
    assert words in error
    assert str(site.root / "jobs/toy") in error


@pytest.mark.parametrize("used", [(), ("-p", "good")])
@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("{train: {lrr: 1.0}}", 'unknown key train.lrr (did you mean "lr"?)'),
        ("{train: {lr: fast}}", "train.lr must be a number, found 'fast'"),
        ("{stepz: 1}", 'unknown key stepz (did you mean "steps"?)'),
        ("{reference: [{}]}", "reference[0] has no instance_type, nodes, samples_per_s"),
    ],
)
def test_presets_are_checked_whether_used_or_not(refused, site, used, preset, words) -> None:
    file = site.recipe(GOOD + f"train: {{lr: 0.1}}\npresets: {{good: {{}}, bad: {preset}}}\n")
    assert refused(*used) == f"{file}: presets.bad: {words}"


@pytest.mark.parametrize("what", ["steps: [1\n", "presets: {a: {stepz: 1}}\n"])
def test_a_broken_recipe_hides_no_other(site, cli, what: str, stable) -> None:
    file = site.recipe(what, name="bad")
    site.recipe(GOOD)
    table, listed = cli("recipes"), cli("recipes", "--json")
    for done in (table, listed):
        [line] = done.err.splitlines()
        assert line.startswith(f"error: {file}:")
        assert done.code == 1
    stable.json("recipes", json.loads(listed.out))
    names = [recipe["recipe"] for recipe in json.loads(listed.out)]
    assert "toy" in names and "gpt2_zero1" in names and "bad" not in names
    assert [line.split()[0] for line in table.out.splitlines()] == ["recipe", *names]


def test_a_broken_profile_hides_no_other(site, cli, stable) -> None:
    file = site.write("cluster-config/bad.yaml", "slurm: [\n")
    table, listed = cli("clusters"), cli("clusters", "--json")
    assert "\npc " in table.out
    stable.json("clusters", json.loads(listed.out))
    assert "pc" in [cluster["cluster"] for cluster in json.loads(listed.out)]
    for done in (table, listed):
        assert done.code == 1
        assert done.err.startswith(f"error: {file}:") and len(done.err.splitlines()) == 1


def test_a_directory_that_cannot_be_read(site, cli, tmp_path: Path, monkeypatch) -> None:
    """To root, who may run the tests, nothing is unreadable: scandir stands in."""
    closed, scandir = tmp_path / "closed", os.scandir

    def refusing(path: Any) -> Any:
        if Path(path) == closed / "jobs":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    closed.mkdir()
    monkeypatch.setattr(os, "scandir", refusing)
    for words in (("recipes",), ("show", "toy")):
        error = cli(*words, "--path", closed).error
        assert error == (
            f"search path {closed}: its jobs directory is not readable: fix the permissions, or "
            "remove it from the path"
        )


PROFILES = {
    "unknown key": ({"slurm": {"partiton": "x"}}, 'slurm.partiton (did you mean "partition"?)'),
    "type": ({"slurm": {"max_nodes": "four"}}, "slurm.max_nodes must be a whole number"),
    "scheduler": ({"scheduler": "slrum"}, "scheduler is 'slrum' (did you mean \"slurm\"?)"),
    "activate": ({"activate": "module load x"}, "activate must be a list such as [module load x]"),
    "instance type": (
        {"instance_types": {"trn1.32xlarge": {"vcpu": 3}}},
        "unknown key vcpu (did you",
    ),
    "new instance type": (
        {"instance_types": {"x": {"vcpus": 3}}, "instance_type": "x"},
        "requires ",
    ),
    "auto": ({"instance_type": "auto"}, "only on the local cluster"),
    "secret": ({"env": {"AWS_SECRET_ACCESS_KEY": "abcdefghijkl"}}, "looks like a secret"),
}


@pytest.mark.parametrize("what", PROFILES)
def test_profile(refused, site, what: str) -> None:
    changes, words = PROFILES[what]
    site.profile(**changes)
    assert words in refused()


def test_secret_in_a_recipe_is_not_printed(refused, site) -> None:
    site.recipe(GOOD + "env: {WANDB_API_KEY: 0123456789abcdef}\n")
    error = refused()
    assert "env.WANDB_API_KEY looks like a secret" in error
    assert "0123456789abcdef" not in error


def test_profile_that_is_not_text(refused, site) -> None:
    (site.root / "cluster-config/pc.yaml").write_bytes(b"\xff\xfe\x00")
    assert "pc.yaml: not a UTF-8 text file" in refused()


def test_template_variable_missing(refused, site) -> None:
    file = site.write("templates/node.sh.j2", "#!/bin/bash\necho {{ nodes }}\necho {{ nodez }}\n")
    assert refused() == f"{file}:3: 'nodez' is undefined"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% if %}\n", "node.sh.j2:1: "),
        ("ok\n{{ batch.__class__.__mro__ }}\n", "node.sh.j2:2: "),
        ("{{ batch }}\n", "neither a string nor a number"),
        ("{% include 'absent.j2' %}\n", "template absent.j2 was not found"),
        ("{{ title | shel }}\n", "node.sh.j2:1: "),
        ("{{ 1 / 0 }}\n", "node.sh.j2"),
        ("{{ nodes + 'x' }}\n", "node.sh.j2"),
    ],
)
def test_template(refused, site, text: str, words: str) -> None:
    site.write("templates/node.sh.j2", text)
    assert words in refused()


def site_file(text: str, monkeypatch, tmp_path: Path) -> Path:
    file = tmp_path / "etc-site.yaml"
    file.write_text(text)
    monkeypatch.setattr(load, "SITE_FILE", file)
    return file


def test_locked_key_cannot_be_broken(refused, cli, fake_slurm, monkeypatch, tmp_path) -> None:
    lock = "lock: {slurm: {partition: compute, max_nodes: 2}, env: {TEAM: a}}\n"
    file = site_file(lock, monkeypatch, tmp_path)
    assert refused("--set", "slurm.partition=debug") == (
        f"slurm.partition is locked to 'compute' by {file}; --set slurm.partition=debug asks for "
        "'debug': remove the setting, or ask the admin"
    )
    assert "env.TEAM is locked to 'a'" in refused("--set", "env.TEAM=b")
    locked = f"slurm.max_nodes (2): use at most 2, or ask the admin, who locked it in {file}"
    assert locked in refused("--nodes", "3")
    doctor = cli("doctor", "--run", "--cluster", "pc", "--nodes", "3").error
    assert locked in doctor
    # Less is free.
    assert "or change --set slurm.max_nodes=1" in refused(
        "--nodes", "2", "--set", "slurm.max_nodes=1"
    )
    assert "slurm.max_nodes is locked to 2" in refused("--set", "slurm.max_nodes=3")
    assert cli(*TOY, "--set", "slurm.partition=compute").code == 0
    script = fake_slurm.calls("sbatch")[0].script
    assert b"#SBATCH --partition=compute" in script
    assert b"export TEAM=a" in script


def test_a_lock_of_several_values(refused, cli, site, fake_slurm, monkeypatch, tmp_path) -> None:
    file = site_file("lock: {slurm: {partition: [a, debug], sbatch: [--nice=5]}}\n",
                     monkeypatch, tmp_path)  # fmt: skip
    asks = f"slurm.partition is locked to 'a' or 'debug' by {file}; --set slurm.partition=b asks"
    assert asks in refused("--set", "slurm.partition=b")
    for words, partition in (((), b"a"), (("--set", "slurm.partition=debug"), b"debug")):
        assert cli(*TOY, *words).code == 0
        script = fake_slurm.calls("sbatch")[-1].script
        assert b"#SBATCH --partition=%s " % partition in script and b"--nice=5 " in script
    bundle = site.root / "bundle"
    assert cli("render", "toy", "-o", str(bundle), "--cluster", "pc").code == 0
    assert cli("submit", "--rendered", str(bundle)).code == 0
    file.write_text("lock: {slurm: {partition: [b, c]}}\n")
    said = f"slurm.partition is 'a', but {file} locks it to 'b' or 'c': render the bundle again"
    assert said in cli("submit", "--rendered", str(bundle)).error


def test_a_site_file_is_tried_and_frees_of_no_lock(refused, cli, monkeypatch, tmp_path) -> None:
    installed = site_file("lock: {slurm: {partition: [a, debug]}}\n", monkeypatch, tmp_path)
    tried = tmp_path / "new.yaml"
    monkeypatch.setenv("TRNSLURM_SITE", str(tried))
    assert f"{tried}: no such file" in refused()
    tried.write_text("lock: {slurm: {partition: debug, account: research}}\n")
    shown = cli("show", "toy", "--cluster", "pc").out
    for key, value in (("partition", "debug"), ("account", "research")):
        assert re.search(rf"slurm.{key} +{value} +site lock: {tried}\n", shown)
    tried.write_text("lock: {slurm: {partition: mine}}\n")
    assert refused() == (
        f"slurm.partition is locked to 'a' or 'debug' by {installed}; {tried} asks for 'mine': "
        "remove the setting, or ask the admin"
    )


def test_recipe_cannot_break_a_lock_either(refused, site, monkeypatch, tmp_path) -> None:
    file = site_file("lock: {slurm: {time_min: 4}}\n", monkeypatch, tmp_path)
    error = refused()
    assert f"slurm.time_min is locked to 4 by {file}" in error
    assert "recipe.yaml asks for 5" in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("locked: {}\n", "unknown key locked (the only key is lock)"),
        ("lock: {slurm: {partiton: x}}\n", 'did you mean "slurm.partition"?'),
        ("lock: {slurm: {max_nodes: two}}\n", "must be a whole number"),
        ("lock: {slurm: {partition: []}}\n", "lock: slurm.partition does not allow any value"),
        ("lock: 3\n", "lock"),
        ("lock: [a]\n", "lock"),
    ],
)
def test_site_file_itself(refused, monkeypatch, tmp_path: Path, text: str, words: str) -> None:
    file = site_file(text, monkeypatch, tmp_path)
    error = refused()
    assert words in error
    assert str(file) in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clusters: pc\n", 'trnslurm.yaml: unknown key clusters (did you mean "cluster"?)'),
        ("cluster: [pc]\n", "cluster must be a name"),
        ("path: 3\n", "path must be a list of directories"),
    ],
)
def test_settings(refused, text: str, words: str) -> None:
    Path("trnslurm.yaml").write_text(text)
    assert words in refused()


def test_search_path_that_is_not_there(refused, tmp_path: Path) -> None:
    assert refused("--path", str(tmp_path / "none")).endswith("none: no such directory")
