"""What a host can see that a job lacks is said before anything is queued, and nothing is made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trnslurm.submission import here

LOCAL = ("submit", "gpt2_zero1", "--cluster", "local", "--preset", "tiny", "--dry-run")
SLURM = ("submit", "gpt2_zero1", "--cluster", "pc", "--time", "60", "--allow-idle", "--preset",
         "tiny", "--dry-run")  # fmt: skip


@pytest.fixture
def profiles(site, fake_slurm):
    """Profiles of this machine and of a cluster, with a Python each."""

    def write(python: str | Path) -> None:
        site.profile(python=str(python))
        site.profile("mine", scheduler="local", instance_type="local", python=str(python))

    return write


def test_a_python_that_is_not_there(profiles, cli, tmp_path: Path) -> None:
    mine = (*LOCAL[:3], "mine", *LOCAL[4:])
    for python in (tmp_path / "venv/bin/python", "no-such-python"):
        profiles(python)
        assert "set python: in the profile mine" in cli(*mine).error
    profiles(tmp_path / "python")
    assert cli(*mine).error.startswith(f"{tmp_path}/python does not exist: ")
    done = cli(*SLURM)  # the nodes may have it
    assert done.code == 0
    assert f"warning: python: {tmp_path}/python does not exist on this host, " in done.err
    (tmp_path / "python").touch()
    assert cli(*mine).error.startswith(f"{tmp_path}/python cannot be run: ")
    profiles("/nowhere/venv/bin/python")  # of the nodes' image
    assert "warning" not in cli(*SLURM).err


def test_first_parameters_that_are_not_there(site, fake_slurm, cli, tmp_path: Path) -> None:
    def error(value: str | Path, command: tuple[str, ...] = LOCAL) -> str:
        return str(cli(*command, "--set", f"train.init_from={value}").error)

    assert error(tmp_path / "none").endswith("none': there is no such file or directory")
    assert error(tmp_path / "none", SLURM).endswith("none': there is no such file or directory")
    assert error("./step-3").endswith("looked up in the run directory: use an absolute path")
    assert "no such model in the Hugging Face cache" in error("gpt3")
    done = cli(*SLURM, "--set", "train.init_from=/nowhere/models/x")
    assert done.code == 0 and "warning: train.init_from is '/nowhere/models/x'" in done.err
    assert cli(*LOCAL, "--set", f"train.init_from={tmp_path}").code == 0
    assert site.runs() == []


@pytest.mark.parametrize("module", ["timm", "flash_attn"])
def test_a_package_that_this_python_lacks(site, cli, monkeypatch, module: str) -> None:
    find = here.importlib.util.find_spec
    monkeypatch.setattr(
        here.importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    if module == "timm":
        (site.root / "data").mkdir(parents=True)
        (site.root / "data/a_training_0.hdf5").touch()
        done = cli("submit", "bert_pretrain", "-c", "local", "-p", "tiny", "--dry-run",
                   "--set", "train.optimizer=lamb", "--set", f"data.path={site.root}/data",
                   "--set", "train.eval_every=0")  # fmt: skip
    else:
        site.profile("gpus", scheduler="local", instance_type="p4d.24xlarge", python="python3")
        done = cli("submit", "llama3_clm", "-c", "gpus", "-p", "tiny", "--dry-run",
                   "--set", "train.attention=flash_attention_2", "--set", "precision=bf16",
                   "--set", "batch.global_batch=16")  # fmt: skip
    assert f"but {sys.executable} does not have {module}: run pip install " in done.error


def test_a_package_that_the_clusters_python_seems_to_lack(profiles, cli, tmp_path: Path) -> None:
    packages = tmp_path / "venv/lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "venv/bin").mkdir()
    python = tmp_path / "venv/bin/python"
    python.symlink_to(sys.executable)
    profiles(python)
    lamb = ("submit", "bert_pretrain", "-c", "pc", "-p", "tiny", "--allow-idle", "--dry-run",
            "--set", "data_root=/nowhere", "--set", "train.optimizer=lamb")  # fmt: skip
    done = cli(*lamb)
    assert done.code == 0
    assert (
        f"warning: train.optimizer is 'lamb', but {python} does not have timm: run pip " in done.err
    )
    (packages / "timm").mkdir()
    assert "warning" not in cli(*lamb).err


@pytest.mark.parametrize("kind", ["shards", "tokens"])
def test_evaluation_without_held_out_data(site, cli, kind: str) -> None:
    data = site.root / "data"
    data.mkdir(parents=True)
    recipe = "bert_pretrain" if kind == "shards" else "gpt2_zero1"
    command = ("submit", recipe, "-c", "local", "-p", "tiny", "--dry-run",
               "--set", f"data.path={data}")  # fmt: skip
    if kind == "shards":
        (data / "wiki_training_0.hdf5").touch()
    else:
        (data / "index.json").write_text(json.dumps({"splits": {"train": {}}}))
    error = cli(*command).error
    assert error.startswith(f"train.eval_every is 10, but the data at {data} has no")
    assert "--set train.eval_every=0, or " in error
    assert cli(*command, "--set", "train.eval_every=0").code == 0
    if kind == "shards":
        (data / "wiki_test_0.hdf5").touch()
    else:
        (data / "index.json").write_text(json.dumps({"splits": {"train": {}, "eval": {}}}))
    assert cli(*command).code == 0


def test_a_directory_of_path_that_is_missing(site, cli, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trnslurm.yaml").write_text("path: mine\n")
    assert cli("recipes").error == "trnslurm.yaml: path names mine, which is not a directory"
    Path("mine").mkdir()
    assert cli("recipes").code == 0


def test_a_file_that_the_script_imports_is_read_too(site, cli) -> None:
    site.recipe()
    site.write("jobs/toy/train.py", "import helper\n")
    site.write("jobs/toy/helper.py", "def f(:\n")
    done = cli("submit", "toy", "-c", "pc", "--dry-run")
    assert done.error == "code/jobs/toy/helper.py:1: not valid Python: invalid syntax"


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (
            {"metrics": ["accuracy"]},
            "are evaluated by loss, accuracy: pass --set train.keep_best=accuracy",
        ),
        ({"metrics": ["entity_f1"], "pad_id": 1}, "model.pad_token_id is 0, but the data at "),
    ],
)
def test_labelled_data_of_another_kind(site, cli, index: dict[str, object], words: str) -> None:
    data = site.root / "data"
    data.mkdir(parents=True)
    splits = {"splits": {"train": {}, "eval": {}}}
    (data / "index.json").write_text(json.dumps(splits | index))
    command = ("submit", "bert_ner", "-c", "local", "-p", "tiny", "--dry-run",
               "--set", f"data.path={data}")  # fmt: skip
    assert words in cli(*command).error
    (data / "index.json").write_text(json.dumps(splits | {"metrics": ["entity_f1"], "pad_id": 0}))
    assert cli(*command).code == 0


def test_more_workers_than_this_machine_starts(cli, monkeypatch) -> None:
    monkeypatch.setattr(here.os, "sched_getaffinity", lambda _: {0, 1})
    for gib, nodes, most in ((100.0, 33, 32), (10.2, 21, 20), (0.1, 9, 8)):
        monkeypatch.setattr(here, "available_gib", lambda gib=gib: gib)
        some = ("--allow-idle", "--nodes")
        said = cli(*LOCAL, *some, str(nodes)).error
        assert said.startswith(f"--nodes {nodes} would start {nodes} workers here, but 2 ")
        assert f"enough for only about {most}: lower --nodes or --workers, or pass --yes. " in said
        assert cli(*LOCAL, *some, str(most)).code == 0
        assert cli(*LOCAL, *some, str(nodes), "--yes").code == 0
    assert cli("render", *LOCAL[1:-1], "--allow-idle", "--nodes", "200").code == 0
