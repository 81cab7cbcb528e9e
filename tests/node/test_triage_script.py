"""What the run's copy of a script and its configuration tells of a failure."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from trnslurm.node.triage.diagnosis import diagnose
from trnslurm.records.run import RunDir


@pytest.fixture
def run(make_run) -> RunDir:
    failed = {"state": "FAILED", "exit_code": 1}
    return make_run(states={"train": [failed]}, phases=("train",), jobs={"train": "1002"})


def cause(run: RunDir, script: str, error: str, files: dict[str, str] | None = None) -> str:
    """The cause of an error that a script raised in its last line, if the script tells it."""
    work = run.path / "work"
    work.mkdir(exist_ok=True)
    text = textwrap.dedent(script).strip()
    (work / "train.py").write_text(f"{text}\n")
    for name, content in (files or {}).items():
        (work / name).write_text(content)
    line = text.count("\n") + 1
    code = text.split("\n")[-1].strip()
    run.node_log("train", 1, 0).write_text(
        "[rank0]: Traceback (most recent call last):\n"
        f'[rank0]:   File "{work}/train.py", line {line}, in <module>\n'
        f"[rank0]:     {code}\n[rank0]: {error}\n"
    )
    found = diagnose(run.path, "train", 1)
    assert found is not None
    return found.cause if found.fix.startswith(("set ", "correct the key there")) else ""


UNBOUND = (
    "UnboundLocalError: cannot access local variable '{}' where it is not associated with a value"
)
UNDEFINED = "NameError: name '{}' is not defined"


@pytest.mark.parametrize(
    ("script", "name", "says"),
    [
        (
            """
            def train(loader):
                for batch in loader:
                    loss = batch.sum()
                print(loss)
            """,
            "loss",
            "train.py sets loss only at line 3, within `for batch in loader:` of line 2",
        ),
        (
            """
            def train(args):
                if args.amp:
                    scaler = 1
                elif args.half:
                    scaler = 2
                print(scaler)
            """,
            "scaler",
            "train.py sets scaler only at lines 3, 5, each in a block that may not run or after "
            "line 6",
        ),
        (
            """
            def train():
                try:
                    x = 1
                except OSError as error:
                    pass
                print(error)
            """,
            "error",
            "train.py sets error only at line 4, and Python deletes it at the end of that `except`",
        ),
        (
            """
            def train(x):
                with open(x) as f: y = f
                print(y)
            """,
            "y",
            "",  # every path sets it
        ),
        ("def f(): pass\nprint(lossy)", "lossy", ""),
    ],
)
def test_where_a_name_gets_its_value(run, script: str, name: str, says: str) -> None:
    for error in (UNBOUND, UNDEFINED):
        assert cause(run, script, error.format(name)) == says


def test_a_name_that_gets_its_value_later(run) -> None:
    script = "def train():\n    print(step)\n    step = 1\n"
    work = run.path / "work"
    work.mkdir()
    (work / "train.py").write_text(script)
    run.node_log("train", 1, 0).write_text(
        "Traceback (most recent call last):\n"
        f'  File "{work}/train.py", line 2, in train\n    print(step)\n{UNBOUND.format("step")}\n'
    )
    found = diagnose(run.path, "train", 1)
    assert found and found.cause == "train.py sets step only at line 3, after line 2"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "model:\n  hidden: 8\noptimizer:\n  lr: 1\n"),
        ("c.json", '{"model": {"hidden": 8}, "optimizer": {"lr": 1}}'),
        ("c.toml", "[model]\nhidden = 8\n[optimizer]\nlr = 1\n"),
    ],
)
def test_a_key_that_the_configuration_lacks(run, name: str, text: str) -> None:
    (run.path / "node.sh").write_text(f"TRNSLURM_COMMAND=(\n  train.py --config {name}\n)\n")
    script = "lr = cfg['optimiser']"
    files = {name: text}
    assert cause(run, script, "KeyError: 'optimiser'", files) == (
        f"{name} has no optimiser, but optimizer"
    )
    assert cause(run, script, "KeyError: 'seed'", files) == f"{name} has no seed"
    assert cause(run, script, "KeyError: 'hidden'", files) == ""  # it has one, elsewhere
    assert cause(run, "x = batch['seed']", "KeyError: 'seed'", files) == ""


def test_only_the_runs_own_copy_is_read(run, tmp_path: Path) -> None:
    outside = tmp_path / "c.yaml"
    outside.write_text("optimizer: 1\n")
    (run.path / "node.sh").write_text(f"  train.py --config {outside} --other ../../c.yaml\n")
    assert cause(run, "lr = cfg['optimiser']", "KeyError: 'optimiser'") == ""
    (run.path / "work/c.yaml").symlink_to(outside)
    (run.path / "node.sh").write_text("  train.py --config c.yaml\n")
    assert cause(run, "lr = cfg['optimiser']", "KeyError: 'optimiser'") == ""


@pytest.mark.parametrize(
    "script", ["(" * 5000, "def f(:", "\0", "x = 1\n" * 300_000 + "y", "y = 1" + "+1" * 9000]
)
def test_a_script_that_cannot_be_read(run, script: str) -> None:
    assert cause(run, script, UNDEFINED.format("x")) == ""


def test_syntax_of_a_newer_python(run) -> None:
    """This Python reads the file that the node's Python did not."""
    node = {"node": 0, "host": "a", "same": {"Python": "3.9.2"}}
    run.preflight_file("train", 1).write_text(json.dumps({"nodes": [node]}))
    (run.path / "work").mkdir()
    file = run.path / "work/train.py"
    file.write_text("x = 1\nmatch x:\n    case 1:\n        pass\n")
    error = f'  File "{file}", line 2\n    match x:\n          ^\nSyntaxError: invalid syntax\n'
    run.node_log("train", 1, 0).write_text(error)
    found = diagnose(run.path, "train", 1)
    assert found is not None
    assert found.cause.startswith("train.py, line 2 has syntax that Python 3.")
    assert found.cause.endswith("the node's Python (3.9.2) is too old for it")
