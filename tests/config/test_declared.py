"""What jobs declare of their keys, read from their source, which nothing imports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trnslurm.config.load import resolve
from trnslurm.config.schema import Recipe
from trnslurm.config.search import Workspace, packaged_root
from trnslurm.config.tree import fields_of, flatten
from trnslurm.declared import Field, find_problem, read_declaration
from trnslurm.plan.values import SECTIONS, declarations, reader

from ..bad_values import BAD

RECIPES = sorted(file.parent.name for file in packaged_root().glob("jobs/*/recipe.yaml"))
FILES = {
    "jobs/mine/train.py": b"""
import torch_of_the_nodes_only
from trnslurm.train.rooms import Base as Common
from beside import Depth
class Settings(Common):
    depth: Depth
    eval_samples: Free[Positive[int]]
    'how many'
class Other:
    ignored: Free[int]
""",
    "jobs/mine/beside.py": b"from typing import Literal\nDepth = Literal[1, 2]\n",
    "trnslurm/train/rooms/__init__.py": b"from trnslurm.train.settings import Base\n",
    "trnslurm/train/settings.py": b"""
Value = TypeVar("Value")
Free = Annotated[Value, "free"]
OnOff = Annotated[Value, "on or off"]
class Root:
    lr: Free[float]
    '''the learning
    rate'''
class Base(Root):
    save_every: OnOff[int]
    REFUSED = (({"lr": [0.0, 1.0], "precision": "fp32"}, "too" " fast"),)
""",
}
ENTRY = "jobs/mine/train.py"


def test_a_declaration_is_that_of_the_class_and_its_bases() -> None:
    declared = read_declaration(FILES.get, ENTRY, "Settings")
    assert declared is not None and declared.whole
    assert declared.fields == {
        "lr": Field(kind="float", marks=("free",), help="the learning rate"),
        "save_every": Field(kind="int", marks=("on or off",)),
        "depth": Field(kind="int", choices=(1, 2)),
        "eval_samples": Field(help="how many"),  # its marks are imported from nowhere
    }
    for lr, precision, found in ((1.0, "fp32", True), (0.5, "fp32", False), (1.0, "bf16", False)):
        problem = find_problem(declared, "train", {"lr": lr}, {"precision": precision})
        assert bool(problem) == found
        if problem:
            assert problem.text == "train.lr is 1.0 and precision is 'fp32': too fast"
            assert problem.keys == ("train.lr", "precision")


def test_a_job_without_the_class_declares_nothing() -> None:
    circle = {ENTRY: b"from beside import Settings"}
    circle["jobs/mine/beside.py"] = b"from train import Settings"
    for text in (b"", b"print(1)", b"class Settings(", b"from trnslurm.nowhere import Settings"):
        assert read_declaration({ENTRY: text}.get, ENTRY, "Settings") is None
    assert read_declaration(circle.get, ENTRY, "Settings") is None


def test_a_class_with_an_unknown_base_is_not_whole() -> None:
    text = b"import base\nclass Settings(base.Base):\n    lr: float\n"
    declared = read_declaration({ENTRY: text}.get, ENTRY, "Settings")
    assert declared is not None and not declared.whole


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_is_declared_with_a_line_of_help(recipe: str, home: Path) -> None:
    config = resolve(Workspace(roots=(packaged_root(),), cluster=None, cluster_source=""), recipe,
                     cluster="local")  # fmt: skip
    found = declarations(config)
    assert found.keys() == SECTIONS.keys()
    for section, declared in found.items():
        assert declared.whole
        assert set(config.tree[section]) <= declared.fields.keys()
        # --set accepts what is in a recipe, and strategy.name is a key of its own.
        assert declared.fields.keys() - config.tree[section] <= {"strategy"}
        for key, value in config.tree[section].items():  # --set takes values of the same type
            assert type(value).__name__ == declared.fields[key].kind, key
        for key, field in declared.fields.items():
            assert field.kind and 4 < len(field.help) <= 100, key


@pytest.mark.parametrize(("recipe", "values", "words"), BAD)
def test_a_bad_value_is_refused_before_anything_is_queued(
    site, cli, recipe: str, values: dict[str, object], words: str
) -> None:
    options = [w for key, value in values.items() for w in ("--set", f"{key}={_word(value)}")]
    done = cli("submit", recipe, "--cluster", "local", "--preset", "tiny", "--dry-run", *options)
    assert (done.code, done.out) == (1, "")
    assert words in done.error
    assert any(done.error.startswith(f"--set {word}: ") for word in options[1::2])
    assert site.runs() == []


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("command", ["show", "plan", "render"])
def test_other_commands_refuse_it_too(site, cli, command: str) -> None:
    done = cli(command, "gpt2_zero1", "--set", "model.n_layer=0")
    assert done.error == "--set model.n_layer=0: model.n_layer is 0; it must be at least 1"


def test_the_exponent_of_a_number_needs_no_point(site, cli) -> None:
    file = _copy(site)
    text = file.read_text()
    assert text.count("lr: 1.5e-4") == 1 and text.count("lr: 5.0e-3") == 2
    file.write_text(text.replace("lr: 1.5e-4", "lr: 1e-4").replace("lr: 5.0e-3", "lr: 5e-3"))
    for preset, lr in (("xl", 1e-4), ("tiny", 5e-3)):
        shown = json.loads(cli("show", "mine", "--preset", preset, "--json").out)
        assert shown["config"]["train"]["lr"] == lr


def test_the_file_is_named_in_which_it_stands(site, cli) -> None:
    file = _copy(site)
    tree = yaml.safe_load(file.read_text())
    tree["train"]["schedule"] = "linar"
    file.write_text(yaml.safe_dump(tree))
    error = cli("show", "mine").error
    assert error.startswith(f"{file}: train.schedule is 'linar' (did you mean \"linear\"?); ")
    del tree["train"]["schedule"]
    file.write_text(yaml.safe_dump(tree))
    assert cli("show", "mine").error == f"{file}: train is missing schedule, which train.py needs"
    bare = {"entry": "train.py", "batch": {"global_batch": 8}, "train": {"lr": 1e-4}}
    file.write_text(yaml.safe_dump(bare))
    declared = read_declaration(reader("mine", file.parent), ENTRY, "Settings")
    assert declared is not None
    first = [key for key in declared.fields if key != "lr"][:3]
    assert f"{file}: train is missing {', '.join(first)} and " in cli("show", "mine").error
    tree["train"] |= {"schedule": "linear", "lrr": 1.0}
    file.write_text(yaml.safe_dump(tree))
    assert cli("show", "mine").error == (
        f'{file}: train.py has no setting train.lrr (did you mean "lr"?)'
    )


def test_a_script_that_is_no_python_is_refused_with_its_line(site, cli) -> None:
    file = _copy(site).with_name("train.py")
    file.write_text("import torch\n\ndef main(:\n")
    done = cli("submit", "mine", "-c", "local", "-p", "tiny", "--dry-run")
    assert done.error == f"{file}:3: not valid Python: invalid syntax"
    for text, words in (
        (b"x = '\xff'\n", f"{file}:1: not valid Python: (unicode error)"),
        (b"(" * 5000, f"{file}:1: not valid Python: too many nested parentheses"),
        (b"x = " + b"-" * 100_000 + b"1\n", f"{file}: "),
        (b"x = 1\0", f"{file}"),
    ):
        file.write_bytes(text)
        assert cli("show", "mine").error.startswith(words)
    file.write_text("import re\nre.compile('\\d')\n")
    assert cli("show", "mine").code == 0  # warnings are Python's to say, when it runs
    assert site.runs() == []


def _copy(site) -> Path:
    """Copy a recipe of ours into the user's own directory; return its file."""
    for name in ("train.py", "recipe.yaml"):
        text = (packaged_root() / "jobs/gpt2_zero1" / name).read_text()
        file = site.write(f"jobs/mine/{name}", text)
    return file


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_lists_every_key_with_what_it_accepts(site, cli, recipe: str, stable) -> None:
    done = cli("recipes", recipe, "--preset", "tiny", "--json")
    keys = {entry["key"]: entry for entry in json.loads(done.out)}
    stable.json("recipes (of one)", json.loads(done.out), free=["[].default"])
    resolved = json.loads(cli("show", recipe, "--preset", "tiny", "--json").out)
    stable.json("show", resolved, free=["config", "origins"])
    shown = resolved["config"]
    ours = {key for key, _ in flatten({k: shown[k] for k in fields_of(Recipe)})}
    open_ones = ("neuron.env", "strategy.", "optimizer_bytes")
    assert {key for key in keys if not key.startswith(open_ones)} == {
        key for key in ours if not key.startswith(open_ones)
    }
    assert keys["train.lr"]["default"] == shown["train"]["lr"]
    assert keys["train.schedule"]["choices"] == ["cosine", "linear", "constant"]
    assert all(entry["help"] and entry["type"] for entry in keys.values())
    assert "\nsteps  " in (table := cli("recipes", recipe).out)
    assert "whole number, at least 1" in table


def test_recipes_says_of_a_script_of_ones_own_what_it_knows(site, cli) -> None:
    site.recipe("train: {greeting: hello}\n")
    [entry] = [e for e in json.loads(cli("recipes", "toy", "--json").out) if "greet" in e["key"]]
    assert entry == {"key": "train.greeting", "type": "text", "choices": [], "rules": [],
                     "default": "hello", "help": ""}  # fmt: skip
    assert cli("recipes", "--preset", "tiny").code == 2
