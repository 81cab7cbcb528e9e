"""A custom script: found, taken along with its project, and given what the plan knows."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import trnslurm
from trnslurm.api.arguments import options_of
from trnslurm.config.catalog import catalog
from trnslurm.config.load import resolve
from trnslurm.config.schema import Slurm
from trnslurm.config.search import Workspace
from trnslurm.config.values import for_libraries
from trnslurm.contract.checkpoints import newest_checkpoint, saves_in
from trnslurm.contract.rundir import RunFiles
from trnslurm.devices import XLA_CPU
from trnslurm.errors import TrnslurmError
from trnslurm.plan.spec import make_spec
from trnslurm.render.directives import _cpus_of_node
from trnslurm.render.job import render_job
from trnslurm.render.project import project_files

from ..security.hostile import HOSTILE, MARK
from ..toy_site import write_attempt

CPU = ("--cluster", "pc", "--set", "device=cuda", "--set", "instance_type=p4d.24xlarge")
TIME = ("--time", "60")
# Hostile texts that a file system takes as one name.
FILE_NAMES = ("substitution", "backticks", "double quote", "single quote", "newline", "dash",
              "expression", "shell's own")  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    """A project with a package, in which the user stands."""
    directory = tmp_path / "project"
    for name, text in {
        "train.py": "import widths\n", "scripts/other.py": "", "run.sh": "#!/bin/bash\necho $@\n",
        "widths/__init__.py": "", "configs/base.yaml": "lr: 1\n",
    }.items():  # fmt: skip
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    monkeypatch.chdir(directory)
    return directory


def command_of(node_script: str, **variables: str) -> list[str]:
    """What node.sh would start, with these variables."""
    text = node_script[node_script.index("TRNSLURM_COMMAND=(") :]
    text = text.replace(
        'exec "${TRNSLURM_COMMAND[@]}"', "printf '%s\\0' \"${TRNSLURM_COMMAND[@]}\""
    )
    environment = {
        "PATH": os.environ["PATH"], "TRNSLURM_PYTHON": "python", "SLURM_NODEID": "1",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000", "TRNSLURM_RUN_DIR": "/runs/a b",
        "TRNSLURM_CHECKPOINTS": "/runs/a b/checkpoints", "TRNSLURM_RESUME": "",
        "TRNSLURM_ATTEMPT": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "PYTHONPATH": "code",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-euc", text], env=environment | variables, capture_output=True, check=True,
        timeout=600,
    )  # fmt: skip
    words = done.stdout.decode().split("\0")[:-1]
    assert words[:2] == ["bash", "-c"] and words[2].startswith("cd work && ")
    return words[4:]


def rendered(site, cli, *words: str) -> dict[str, str]:
    """The files of a script's bundle."""
    done = cli(
        "render", *words[:1], *CPU, *TIME, "-o", str(site.root / "out"), "--force", *words[1:]
    )
    assert done.code == 0, done.err
    found = (site.root / "out").rglob("*")
    return {
        str(file.relative_to(site.root / "out")): file.read_text()
        for file in found
        if file.is_file() and file.suffix != ".zip"
    }


def test_a_script_needs_no_recipe(site, cli, project) -> None:
    batch = ("--set", "batch.global_batch=64", "--set", "batch.micro_batch=2")
    arguments = (
        "--", "--bs={micro_batch}", "--accum", "{accumulation}", "--resume", "{resume}", "--out",
        "{checkpoints}/x y", "--at={attempt}", "$HOME `id`", "{{braces}}", '{"json": {"a": 1}}', "",
    )  # fmt: skip
    files = rendered(site, cli, "./train.py", "--nodes", "2", *batch, *arguments)
    head = ["python", "-m", "trnslurm.node.launcher", "--workers=8", "--", "train.py"]
    given = [
        "--bs=2", "--accum", "2", "--out", "/runs/a b/checkpoints/x y", "--at=2", "$HOME `id`",
        "{braces}", '{"json": {"a": 1}}', "",
    ]  # fmt: skip
    assert command_of(files["node.sh"]) == [*head, *given]
    resuming = command_of(files["node.sh"], TRNSLURM_RESUME="/runs/step 5")
    assert resuming == [*head, *given, "--resume", "/runs/step 5"]
    assert {name for name in files if name.startswith("code/project")} == {
        "code/project.json", "code/project/train.py", "code/project/scripts/other.py",
        "code/project/run.sh", "code/project/widths/__init__.py", "code/project/configs/base.yaml",
    }  # fmt: skip
    assert "precompile.sbatch" not in files and "global batch G" in files["train.sbatch"]


def test_what_starts_a_script(site, cli, project) -> None:
    def start(script: str, *options: str) -> list[str]:
        files = rendered(site, cli, script, "--workers", "2", "--nodes", "2", *options, "--", "--a")
        assert "global batch G" not in files["train.sbatch"]  # nobody here knows it
        return command_of(files["node.sh"])

    assert start("run.sh") == ["./run.sh", "--a"]
    assert start("scripts/other.py", "--launcher=python") == ["python", "scripts/other.py", "--a"]
    assert start("./train.py", "--launcher=srun") == ["python", "train.py", "--a"]
    assert start("./run.sh", "--launcher=srun") == ["./run.sh", "--a"]
    tee = ("--launcher=torchrun", "--set", "launcher_arguments=[--tee, '3']")
    assert start("./train.py", *tee) == [
        "python", "-m", "trnslurm.node.torchrun", "--nnodes=2", "--node_rank=1",
        "--nproc_per_node=2", "--master_addr=10.0.0.1", "--master_port=4000", "--tee", "3",
        "train.py", "--a",
    ]  # fmt: skip
    words = start("./train.py", "--launcher=accelerate")
    assert words[:3] == ["python", "-m", "accelerate.commands.launch"]
    assert {"--num_machines=2", "--machine_rank=1", "--num_processes=4", "--multi_gpu"} <= {*words}
    config = ("--set", "launcher_arguments=[--config_file, a b.yaml]")
    words = start("./train.py", "--launcher=accelerate", *config)
    assert words[-4:] == ["--config_file", "a b.yaml", "train.py", "--a"]
    assert "--multi_gpu" not in words  # the file says what it is
    words = start("./train.py", "--launcher=deepspeed")
    assert words[:3] == ["python", "-m", "deepspeed.launcher.launch"]
    # A script with relative imports is a module of its package, here below src.
    package = project / "src/pkg/sub"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "train.py").write_text("import os\nfrom ..data import load\n")
    (package / "plain.py").write_text("import pkg.data\n")
    for launcher in ("torchrun", "accelerate", "deepspeed"):
        words = start("src/pkg/sub/train.py", f"--launcher={launcher}")
        assert words[-3:] == ["--module", "pkg.sub.train", "--a"]
    words = start("src/pkg/sub/train.py")
    assert words[2:4] == ["trnslurm.node.launcher", "--workers=2"]
    assert words[4:] == ["--", "-m", "pkg.sub.train", "--a"]
    for launcher in ("python", "srun"):
        words = start("src/pkg/sub/train.py", f"--launcher={launcher}")
        assert words == ["python", "-m", "pkg.sub.train", "--a"]
    assert start("src/pkg/sub/plain.py")[-2:] == ["src/pkg/sub/plain.py", "--a"]
    node = rendered(site, cli, "src/pkg/sub/plain.py", "--nodes", "2")["node.sh"]
    assert 'PYTHONPATH="$PWD:$PWD/src:$PYTHONPATH"' in node


def test_srun_starts_every_worker(site, cli, project) -> None:
    options = ("--launcher=srun", "--nodes", "2", "--workers", "8")
    script = rendered(site, cli, "./train.py", *options)["train.sbatch"]
    assert "#SBATCH --ntasks-per-node=8 " in script and "#SBATCH --cpus-per-task=12 " in script
    assert "srun --nodes=2 --ntasks-per-node=8 --cpus-per-task=12 " in script
    here = ("--cluster", "local", "-o", "here")
    assert cli("render", "./train.py", *options, *here).code == 0
    assert 'SLURM_JOB_ID="$MASTER_PORT" SLURM_STEP_ID=0 ' in Path("here/node.sh").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./no.py"], "no.py: no such file"),
        (["./configs"], "configs is a directory, not a script"),
        (
            ["./train.py", "--", "{microbatch}"],
            "argument '{microbatch}': unknown placeholder {microbatch} (did you mean "
            '"micro_batch"?); '
            "use --set places.microbatch=VALUE to define it, or {{microbatch}} for literal braces",
        ),
        (["./train.py", "3e-4"], "put -- before the arguments of the script, as in -- 3e-4"),
        (["./train.py", "a b", "--", "c"], "the arguments of the script, as in -- 'a b'"),
        (["toy", "tiny"], "toy tiny: to run a command, put it after --, as in -- toy tiny; to "),
        (["./train.py", "--lr", "1"], "put options of a custom script after -- ("),
        (
            ["./train.py", "--nodes", "3", "--set", "batch.global_batch=64",
             "--set", "batch.micro_batch=1", "--", "{accumulation}"],
            "8 of each step's 72 micro-batches would have weight zero, which batch.padding=refuse",
        ),
        (["./train.py", "--", "{x}"], "unknown placeholder {x}; known: accumulation, attempt, "),
        (["./train.py", "--set", "lr=1"], "unknown key lr; to fill in {lr} in the script's "
         "arguments, set places.lr"),
        (["./train.py", "--set", "places.lr=1"], "places.lr is set, but no argument has {lr}"),
        (["./train.py", "--set", "places.run=1", "--", "{run}"], "{run} is built in"),
        (["toy", "--set", "places.lr=1"], "places is set, but this recipe's job reads plan.json"),
        (["./train.py", "--", "{accumulation}"], "set it with --set batch.global_batch=N"),
        (["./train.py", "--", "{steps}"], "the arguments contain {steps}, which is not set"),
        (["toy", "--launcher=srun"], "reads plan.json: use trnslurm or torchrun;"),
        (["./train.py", "--set", "launcher_arguments=[--tee]"], "the launcher trnslurm has no "
         "options: set launcher to the program that the options are for, such as torchrun"),
        (["toy", "--", "--lr=1"], "arguments is set, but this recipe's job reads plan.json"),
        (["./train.py", "--set", "links=[data]"], "/project/data does not exist"),
        (["./train.py", "--set", "links=[../x]"], "must be a path inside the project"),
        (["./train.py", "--set", "checkpoints=/x"], "must be a path inside the project"),
        (["./train.py", "--set", "train.lr=1"], "--set train.lr=1: unknown key train.lr"),
        (["./train.py", "--cluster", "trn"], "choose another cluster, preset or device; "
         "if the script uses torch_xla, pass --set 'devices=[neuron]'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(site, cli, project, words, said) -> None:
    site.profile("trn")
    site.recipe()
    options = CPU if "--cluster" not in words else ()
    assert said in cli("render", *words[:1], *options, *TIME, *words[1:]).error


BATCH_SCRIPT = """#!/bin/bash -l
# from https://example.org

#SBATCH --nodes=2 --job-name=two
#SBATCH --time=1:00:00 --gres=gpu:4
#SBATCH --comment='a b $c' -o x
srun torchrun --nnodes 2 "scripts/other.py" --lr 1
"""


def test_a_batch_script_is_the_job(site, cli, project) -> None:
    """Its options size the job, its commands run once, and the profile adds what it lacks."""
    Path("job.sbatch").write_text(BATCH_SCRIPT)
    done = cli("render", "job.sbatch", *CPU, "-o", str(site.root / "out"), "--", "a b")
    assert done.code == 0, done.err
    assert "job.sbatch requests --nodes=2 --gres=gpu:4" in done.err
    assert "Left out --output=x: the run has its own log (trnslurm logs)" in done.err
    script = (site.root / "out/train.sbatch").read_text()
    lines = re.findall(r"^#SBATCH (.*?)(?: +#.*)?$", script, re.M)
    assert lines == [
        "--job-name=two-train", "--nodes=2", "--gres=gpu:4", '--comment="a b $c"',
        "--time=01:00:00", "--wait-all-nodes=1", "--open-mode=append",
        "--output=logs/train-%j.log", "--export=ALL", "--partition=compute",
        "--signal=B:USR1@300", "--requeue",
    ]  # fmt: skip
    command = command_of((site.root / "out/node.sh").read_text())
    assert command[-4:] == ["--given", "--", "./job.sbatch", "a b"]
    for words, said in (
        (("--launcher", "srun"), "is a batch script, which starts its own workers: omit"),
        (("--per", "node"), "omit --per"),
    ):
        assert said in cli("render", "job.sbatch", *CPU, *words).error
    assert "#SBATCH --nodes=1\n" in cli("render", "job.sbatch", *CPU, "--nodes", "1").out
    Path("job.sbatch").write_text(BATCH_SCRIPT.replace("--nodes=2", "--ntasks=8"))
    assert "8 leaves the number of nodes to Slurm" in cli("render", "job.sbatch", *CPU).err
    assert "#SBATCH --ntasks=8 " in cli("render", "job.sbatch", *CPU, "--nodes", "2").out


def test_a_batch_script_of_a_recipe_or_a_bundle(site, cli, project) -> None:
    assert cli("new", "mine", "--from", "./run.sh").code == 0
    assert cli("render", "mine", "--path", ".", *CPU, *TIME).code == 0
    Path("run.sh").write_text(BATCH_SCRIPT)
    assert (
        "run.sh: this is a batch script" in cli("render", "mine", "--path", ".", *CPU, *TIME).error
    )
    # sbatch reads no options after the first command, as in a script that writes batch scripts.
    Path("run.sh").write_text("cat <<END\n#SBATCH --nodes=2\nEND\n")
    assert "node.sh" in rendered(site, cli, "./run.sh")
    said = cli("submit", f"{site.root}/out/train.sbatch", *CPU).error
    assert said.endswith(f" belongs to a bundle: use trnslurm submit --rendered {site.root}/out")


def test_a_module_or_a_program_is_started(site, cli, project) -> None:
    def started(*words: str) -> list[str]:
        done = cli("render", *CPU, *TIME, "-o", str(site.root / "out"), "--force", *words)
        assert done.code == 0, done.err
        return command_of((site.root / "out/node.sh").read_text())

    ours = ["python", "-m", "trnslurm.node.launcher", "--workers=8"]
    assert started("-m", "widths.main", "--", "--lr", "1") == [
        *ours, "--", "-m", "widths.main", "--lr", "1"
    ]  # fmt: skip
    torchrun = started("--", "torchrun", "--nnodes=3", "--tee", "3", "-m", "widths.main", "{nodes}")
    assert torchrun[-5:] == ["--tee", "3", "--module", "widths.main", "3"]
    assert started("--", "axolotl", "fetch", "${HOME}") == ["axolotl", "fetch", "${HOME}"]
    program = started("--per", "worker", "--", "./run.sh", "a b")
    assert program == [*ours, "--program", "--", "./run.sh", "a b"]
    assert started("--per", "job", "./run.sh")[-4:] == ["--once", "--program", "--", "./run.sh"]
    mixed = started("--", "accelerate", "launch", "--mixed_precision", "bf16", "train.py")
    assert mixed[-4:] == ["--multi_gpu", "--mixed_precision", "bf16", "train.py"]
    done = cli("render", "--cluster", "local", "-o", str(site.root / "cpu"), "--",
               *("accelerate", "launch", "--mixed_precision", "bf16", "-m", "widths"))  # fmt: skip
    assert done.code == 0, done.err
    on_cpu = command_of((site.root / "cpu/node.sh").read_text())
    assert on_cpu[-2:] == ["--module", "widths"]
    assert not {"--mixed_precision", "--multi_gpu"} & {*on_cpu}
    for words, said in (
        (("-m", "a", "./train.py"), "-m a starts a module: omit ./train.py"),
        (
            ("axolotl", "train"),
            "axolotl train: to run a command, put it after --, as in -- axolotl train",
        ),
        (("--launcher=srun", "--", "torchrun", "--tee=3", "x.py"), "srun does not accept --tee=3"),
        (("--per=node", "--launcher=srun", "./train.py"), "omit --launcher"),
        ((), "Missing argument 'RECIPE'"),
    ):
        assert said in cli("render", *CPU, *words).error
    assert cli("submit", "trl", *CPU).error.endswith("-- trl sft --config sft.yaml")


def test_a_plan_is_for_what_submit_would_use(site, cli, project, monkeypatch) -> None:
    monkeypatch.setattr("trnslurm.submission.choice.slurm_hint", lambda: (None, False))
    batch = ("--set", "batch.global_batch=64", "--set", "batch.micro_batch=2", "--nodes", "2")
    planned = cli("plan", "./train.py", *batch)
    assert planned.err == ""
    assert planned.out.startswith("./train.py on local, 1 worker per node\n"), "no more is known"
    steps = cli("plan", "./train.py", *batch, "--set", "steps=7").out
    assert steps.startswith("./train.py on local, 1 worker per node, fp32, 7 steps\n")
    assert cli("new", "mine", "--from", "./train.py").code == 0
    assert cli("plan", "mine", "--path", ".", *batch).err == ""
    said = "unknown recipe 'mine'. To use the one in ./jobs, pass --path ."
    assert said in cli("plan", "mine", *batch).error
    no_time = cli("submit", "./train.py", *CPU).err.splitlines()[-1]
    assert no_time == "error: the duration of train is unknown: pass --time"


def test_what_a_script_is_told_shapes_its_graphs(site, cli, project) -> None:
    def key(*words: str) -> str:
        files = rendered(site, cli, "./train.py", *words)
        return files["graphs.json"]

    batch = ("--set", "batch.global_batch=64", "--set", "batch.micro_batch=2")
    first = key(*batch, "--", "--hidden", "64", "--out", "{checkpoints}")
    assert first != key(*batch, "--", "--hidden", "128", "--out", "{checkpoints}")
    assert first == key(*batch, "--set", "seed=3", "--", "--hidden", "64", "--out", "{checkpoints}")
    lr = [("--set", f"places.lr={value}") for value in ("1", "2")]
    free = ("--set", "graphs.free=[lr]")
    assert key(*lr[0], "--", "{lr}") != key(*lr[1], "--", "{lr}")
    assert key(*lr[0], *free, "--", "{lr}") == key(*lr[1], *free, "--", "{lr}")


def test_a_batch_and_steps_that_nobody_knows(site, cli, project) -> None:
    said = cli("plan", "./train.py", *CPU, "--nodes", "1,2", "--time", "90").out
    assert re.search(r"^ +2 +\d+ +1.5 +3.0 ", said, re.M), "workers, and hours by the limit"
    assert "Batch: decided by the script. To plan it, pass --set batch.global_batch=N" in said
    unlimited = cli("plan", *CPU, "--", "torchrun", "--nnodes", "2", "train.py").out
    assert "Hours: unknown. Pass --time to show" in unlimited
    assert json.loads(cli("plan", "./train.py", *CPU, "--json").out)["plans"][0]["units"] is None
    (project / "job.sbatch").write_text("#!/bin/bash\n#SBATCH -t 60 -N 2 --mem=9G\nsrun hostname\n")
    own = cli("plan", "./job.sbatch", *CPU, "--mem", "4G")
    assert "job.sbatch on " in own.out and "workers" not in own.out
    assert "Left out --mem=9G: overridden by the command line\n" in own.err
    known = ("--set", "batch.global_batch=64", "--set", "batch.micro_batch=2")
    assert "accumulation" in cli("plan", "./train.py", *CPU, *known).out
    told = json.loads(cli("plan", "./train.py", *CPU, *known, "--json").out)
    files = rendered(site, cli, "./train.py", *known)
    assert "#   steps            its own\n" in files["train.sbatch"]
    assert (told["plans"][0]["steps"], json.loads(files["plan.json"])["steps"]) == (None, None)
    files = rendered(site, cli, "./train.py")
    assert json.loads(files["plan.json"])["batch"] is None
    assert "# train on 1 x p4d.24xlarge" in files["train.sbatch"]
    assert "#   batch            the script's own\n" in files["train.sbatch"]
    assert re.search(r"\n#   on +1 +2 +3 .*\n#   W is +8 16 24 .*\n", files["train.sbatch"])


def test_a_script_that_is_no_python_is_refused(site, cli, project) -> None:
    (project / "train.py").write_text("def (:\n")
    assert "train.py:1: " in cli("render", "./train.py", *CPU, *TIME).error


def test_a_script_elsewhere_brings_its_own_directory(site, cli, project, tmp_path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else/go.py").write_text("")
    relative = os.path.relpath(tmp_path / "else/go.py", project)
    assert relative.startswith("../")
    for script in (str(tmp_path / "else/go.py"), relative):
        files = rendered(site, cli, script)
        taken = [name for name in files if name.startswith("code/project/")]
        assert taken == ["code/project/go.py"]


def test_each_worker_gets_its_own_rank(site, cli, project) -> None:
    words = ("./train.py", "--", "--local-rank={local_rank}")
    node = rendered(site, cli, *words)["node.sh"]
    assert " --fill-local-rank" in node and " train.py '--local-rank={local_rank}'\n" in node
    by_srun = rendered(site, cli, "./train.py", "--launcher", "srun", *words[1:])["node.sh"]
    assert '--local-rank="$SLURM_LOCALID"' in by_srun
    refused = cli("render", "./train.py", *CPU, *TIME, "--launcher", "torchrun", *words[1:]).error
    assert "{local_rank} differs for each worker, but torchrun starts the workers itself" in refused


def test_what_is_taken_along(tmp_path: Path) -> None:
    """As git would: what is ignored is left out, nearest rule first; secrets and caches always."""
    root, outside = tmp_path / "p", tmp_path / "big"
    outside.mkdir()
    for name, text in {
        "a.py": "", ".gitignore": "data/\n*.log\n/top.txt\nlib/*\n!lib/kept.py\n", ".env": "secret",
        "data/x.txt": "", "run.log": "", "top.txt": "", "sub/top.txt": "", "lib/kept.py": "",
        "lib/other.py": "", "sub/.gitignore": "!keep.log\n", "sub/keep.log": "", "sub/b.log": "",
        "runs/1/run.json": "", "runs/1/node.sh": "", "runs/1/work/train.py": "",
        "__pycache__/a.pyc": "", "venv/pyvenv.cfg": "", "venv/bin/python": "",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "same.py").symlink_to("a.py")
    (root / "store").symlink_to(outside)
    (root / "self").symlink_to("self")
    os.mkfifo(root / "pipe")
    files = project_files(root, "a.py", ["data"])
    taken = {name.removeprefix("code/project/") for name in files if "project/" in name}
    assert taken == {"a.py", "same.py", "sub/top.txt", "lib/kept.py", "sub/keep.log"}
    assert json.loads(files["code/project.json"]) == {
        "entry": "a.py",
        "links": {"data": str(root / "data"), "store": str(outside)},
        "left_out": [".env", "lib/other.py", "run.log", "self", "sub/b.log", "top.txt"],
    }


def test_what_git_keeps_though_it_is_ignored_is_taken_along(tmp_path: Path) -> None:
    for name in ("a.py", "data/kept.py", "data/new.bin", ".env"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("data/\n.env\n")
    git = ("git", "-C", str(tmp_path))
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-f", "a.py", "data/kept.py", ".env"], check=True)
    files = project_files(tmp_path, "a.py", [])
    taken = {name.removeprefix("code/project/") for name in files if "project/" in name}
    assert taken == {"a.py", "data/kept.py"}
    facts = json.loads(files["code/project.json"])
    assert facts["left_out"] == [".env"]
    assert facts["links"] == {"data/new.bin": str(tmp_path / "data/new.bin")}


def test_ignored_data_are_linked_to_though_nothing_names_them(tmp_path: Path) -> None:
    """A library may read them. Outputs are not data, whatever they are in."""
    for name in (
        "a.py", "train_data/x", "datasets/y", "metadata/z", "data_cache/z", "out/data/z",
        "src/data/more.bin", "weights/w.pt", "other/w.pt", "data/.gitkeep", "a.xyz", "b.xyz",
        *(f"data/{number}.png" for number in range(101)),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/model.yaml").write_text(
        "pretrained: weights/w.pt\nckpt_dir: other/w.pt\nfile_path: a.xyz\ndir: metadata\n"
    )
    (tmp_path / ".gitignore").write_text(
        "train_data/\ndatasets\nmeta*\n*.xyz\n*_cache/\nout/\n*.bin\nweights/\nother/\ndata/*.png\n"
    )
    files = project_files(tmp_path, "a.py", [])
    facts = json.loads(files["code/project.json"])
    assert [*facts["links"]] == ["datasets", "src/data/more.bin", "train_data", "weights/w.pt",
                                 "a.xyz", "data"]  # fmt: skip
    left_out = ["b.xyz", "data/.gitkeep", "data_cache", "metadata", "other", "out", "weights"]
    assert facts["left_out"] == left_out


def test_the_repository_of_a_project_below_it_says_what_is_ignored(tmp_path: Path) -> None:
    """Unless it ignores the whole project."""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*.bin\nscratch/\n/only.txt\n")
    for name in ("examples/a/x.py", "examples/a/x.bin", "examples/a/only.txt", "scratch/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "scratch/x.bin").write_text("")

    def taken(root: Path) -> set[str]:
        files = project_files(root, "x.py", [])
        return {name.removeprefix("code/project/") for name in files if "project/" in name}

    assert taken(tmp_path / "examples/a") == {"x.py", "only.txt"}
    assert taken(tmp_path / "scratch") == {"x.py", "x.bin"}


def test_a_large_project_is_copied_without_its_data(site, cli, project) -> None:
    """The largest are linked to, whole directories if they have no program; programs never are."""
    for name, mib in (("assets/a.png", 40), ("assets/deep/b.PNG", 2), ("src/c.npy", 30),
                      ("src/c.py", 0), ("small/d.npy", 3)):  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(b"")
        os.truncate(project / name, mib << 20)
    done = cli("submit", "./train.py", *CPU, *TIME, "--dry-run")
    assert "; links to assets, too large to copy; the script" in done.ok + done.err
    files = rendered(site, cli, "./train.py")
    assert f"ln -sfn {project}/assets work.new/assets" in files["train.sbatch"]
    assert {"code/project/src/c.py", "code/project/src/c.npy"} <= files.keys()
    assert not any("assets/" in name for name in files)

    os.truncate(project / "src/c.py", 65 << 20)
    said = cli("render", "./train.py", *CPU, *TIME).error
    assert f"{project} has more than 64 MiB, most of it in src" in said
    assert "--set 'links=[src]'" in said


def test_variables_that_the_job_lacks_are_named(
    site, fake_slurm, cli, project, monkeypatch
) -> None:
    (project / "train.py").write_text(
        "import os\nos.environ['HF_HOME']; os.getenv('DATA_DIR'); os.environ.get(\n'UNSET')\n"
        "os.environ['RANK'], os.environ['WANDB_API_KEY'], os.environ['IN_PROFILE']\n"
    )
    for name in for_libraries(os.environ):
        monkeypatch.delenv(name)
    names = ("HF_HOME", "DATA_DIR", "RANK", "WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN", "IN_PROFILE",
             "IN_YAML")  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "x")
    (project / "configs/base.yaml").write_text("a: ${oc.env:IN_YAML}\nb: ${oc.env:UNSET,3}\n")
    words = ("submit", "./train.py", *CPU, *TIME, "--set", "env.IN_PROFILE=y")
    said = cli(*words, "--dry-run")
    assert (
        "The job does not get this shell's variables unless you name them: "
        "--env DATA_DIR --env HF_HOME --env IN_YAML --env WANDB_MODE\n"
    ) in said.out + said.err
    monkeypatch.setenv("DATA_DIR", "it's $(here)")
    files = rendered(site, cli, "./train.py", "--env", "DATA_DIR", "--env", "HF_HOME")
    assert "export DATA_DIR='it'\"'\"'s $(here)'\nexport HF_HOME=x\n" in files["train.sbatch"]
    for name, why in (
        ("WANDB_API_KEY", "env.WANDB_API_KEY looks like a secret, which must not be in a run's"),
        ("UNSET", "--env UNSET: this shell does not export this variable"),
        ("A=1", "--env A=1: expected a name: to set a value, use --set env.NAME=VALUE"),
        ("RANK", "env.RANK: the scripts set RANK themselves and rely on it"),
        ("IN_PROFILE", "--env IN_PROFILE and --set env.IN_PROFILE=… contradict each other"),
    ):
        assert cli(*words, "--env", name).error.startswith(why)


def test_an_active_environment_that_the_job_does_not_take_is_named(
    site, fake_slurm, cli, project, tmp_path, monkeypatch
) -> None:
    active = tmp_path / "my env"
    (active / "bin").mkdir(parents=True)
    (active / "bin/python").symlink_to(sys.executable)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    words = ("submit", "./train.py", *CPU, *TIME, "--dry-run")
    told = (
        f"not the active environment's. To change that, pass --set python='{active}/bin/python'\n"
    )
    for environment, more, tells in (
        (active, (), True),
        (active, ("--set", f"python={active}/bin/python"), False),
        (active, ("--set", "activate=[true]"), False),
        ("", (), False),
    ):
        monkeypatch.setenv("VIRTUAL_ENV", str(environment))
        said = cli(*words, *more)
        assert (told in said.out + said.err) == tells


def test_hidden_files_that_git_tracks_are_copied(site, cli, project) -> None:
    for name in (".root", "a/.keep", ".pkg/x.py", ".new", ".env", ".github/x"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("")
    (project / ".gitignore").write_text(".pkg\n")
    for words in (["init", "-q"], ["add", "-f", ".root", "a", ".pkg", ".env", ".github"]):
        subprocess.run(["git", *words], check=True)
    names = rendered(site, cli, "./train.py")
    files = {name for name in names if "project" in name and "/." in name}
    assert files == {f"code/project/{name}" for name in (".root", "a/.keep", ".pkg/x.py")}


def test_ignored_files_are_named_before_hidden_ones(site, fake_slurm, cli, project) -> None:
    for name in ("a/.keep", ".b", ".c", "x.bin"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("")
    (project / ".gitignore").write_text("x.bin\n")
    said = cli("submit", "./train.py", *CPU, *TIME, "--dry-run")
    assert ", not x.bin, .b, .c and 1 more (.gitignore, or hidden)" in said.out + said.err


@pytest.mark.parametrize(
    ("source", "words", "tells"),
    [
        ("from lightning import Trainer\nTrainer(devices=1)\n", (), ""),
        ("from lightning import Trainer\nTrainer(num_nodes=1)\n", (), "remove the setting"),
        ("from lightning import Trainer\n# num_nodes=1\nTrainer(num_nodes=a.nodes)\n", (), ""),
        ("from lightning import Trainer\nTrainer(num_nodes=1)\n", ("--num-nodes=2",), ""),
        ("from transformers import Trainer\nTrainer(num_nodes=1)\n", (), ""),
        ("from lightning import Fabric\nFabric(num_nodes=1)\n", (), ""),
    ],
)
def test_a_lightning_trainer_that_is_told_of_one_node(
    site, fake_slurm, cli, project, source: str, words: tuple[str, ...], tells: str
) -> None:
    (project / "train.py").write_text(source)
    submit = ("submit", "./train.py", *CPU, *TIME, "--dry-run", "--nodes")
    told = "sets num_nodes to 1, so Lightning's Trainer would train separately on each node: "
    for nodes in ("1", "2"):
        said = cli(*submit, nodes, "--", *words)
        assert said.code == 0, said.err
        assert (f"train.py {told}{tells}" in said.out) == (bool(tells) and nodes == "2")


def test_the_settings_that_tell_a_lightning_trainer_of_one_node(
    site, fake_slurm, cli, project
) -> None:
    (project / "configs/base.yaml").write_text("trainer:\n  num_nodes: 1\n")
    submit = ("submit", "./train.py", *CPU, *TIME, "--dry-run", "--nodes", "2")
    (project / "tests").mkdir()
    (project / "tests/test_it.py").write_text("import lightning\nTrainer(num_nodes=1)\n")
    for source, word in (
        ("from lightning.pytorch.cli import LightningCLI\n", "--trainer.num_nodes=2"),
        ("import lightning\n@hydra.main()\ndef main(): ...\n", "trainer.num_nodes=2"),
    ):
        (project / "train.py").write_text(source)
        assert f"node: add {word} to the arguments, or remove" in cli(*submit).out
        assert "configs/base.yaml sets" not in cli(*submit, "--", word).out
    (project / "configs/base.yaml").write_text("lr: 1\n")
    for source, word in (
        ("import lightning\n@hydra.main()\ndef f(c): c.get('num_nodes', 1)\n", "++num_nodes=2"),
        ("import lightning\np.add_argument('--num_nodes', default=1)\n", "--num_nodes=2"),
    ):
        (project / "train.py").write_text(source)
        assert "train.py sets num_nodes to 1, so Light" in cli(*submit).out
        assert f"node: add {word} to the arguments, or remove" in cli(*submit).out


def test_the_argument_by_which_a_script_continues_is_added(site, fake_slurm, cli, project) -> None:
    """Its option is dropped without a checkpoint. What the user passes counts."""
    source = "argparse.ArgumentParser().add_argument('--resume')\n"
    (project / "train.py").write_text(source)
    submit = ("submit", "./train.py", *CPU, *TIME)
    said = cli(*submit, "--dry-run").err
    assert "Added --resume {resume}, so that the script resumes from its checkpoint\n" in said
    assert "Added" not in cli(*submit, "--dry-run", "--", "--resume", "x.pt").err
    files = rendered(site, cli, "./train.py", "--launcher", "python", "--", "--lr", "1")
    assert "TRNSLURM_RESUMES=added\n" in files["train.sbatch"]
    node = files["node.sh"]
    assert command_of(node) == ["python", "train.py", "--lr", "1"]
    later = command_of(node, TRNSLURM_RESUME="@a=1.ckpt@")
    assert later == ["python", "train.py", "--lr", "1", "--resume", "@a=1.ckpt@"]
    assert "Added --resume {resume}" in cli("submit", "-m", "train", *submit[2:], "--dry-run").err
    (project / "train.py").write_text("@hydra.main()\ndef main(cfg): f(cfg.ckpt_path)\n")
    for words in ((), ("++ckpt_path={resume}",)):
        node = rendered(site, cli, "./train.py", "--launcher", "python", "--", *words)["node.sh"]
        later = command_of(node, TRNSLURM_RESUME="@a=1.ckpt@")
        assert later == ["python", "train.py", "++ckpt_path='@a=1.ckpt@'"]


@pytest.mark.parametrize(
    ("words", "sets"),
    [
        (("--nodes", "2"), True),
        (("--nodes", "1"), False),
        (("--nodes", "2", "--per", "job"), False),
    ],
)
def test_lightning_is_told_of_the_nodes(site, cli, project, words, sets: bool) -> None:
    """By its own variables. Nothing on other nodes would join a script of the first node."""
    node = rendered(site, cli, "./train.py", *words)["node.sh"]
    for name in ("PL_TRAINER_NUM_NODES=2", "LT_NUM_NODES=2"):
        assert (name in node) == sets
    assert "JSONARGPARSE" not in node
    (project / "train.py").write_text("from lightning.pytorch.cli import LightningCLI\n")
    node = rendered(site, cli, "./train.py", *words)["node.sh"]
    for name in ("JSONARGPARSE_DEFAULT_ENV=true", "PL_FIT__TRAINER__NUM_NODES=2"):
        assert (name in node) == sets


def test_a_script_that_takes_its_ranks_from_mpi(site, fake_slurm, cli, project) -> None:
    submit = ("submit", "./train.py", *CPU, *TIME, "--dry-run", "--nodes")
    told = "mpi4py sees a world of one process in each worker"
    assert told not in cli(*submit, "2").out
    (project / "train.py").write_text("try:\n    from mpi4py import MPI\nexcept ImportError: ...\n")
    assert told in cli(*submit, "2").out
    for words in (["1", "--workers", "1"], ["2", "--set", "slurm.srun=[--mpi=pmi2]"]):
        assert told not in cli(*submit, *words).out


NCCL = 'dist.init_process_group(backend="nccl")'
SET = "torch.cuda.set_device(rank)"
MAIN = "def main():\n    args = parse()\n    for x in args: print(x)\n    {}\n\n"
CALLED = "if __name__ == '__main__':\n    main()\n"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (f"import torch\n{SET}\n", 2),
        (f"{MAIN.format(SET)}{CALLED}", 4),
        (f"@record\n{MAIN.format(NCCL)}{CALLED}", 5),
        # It may not be reached, or the script asks first.
        (MAIN.format(SET), 0),
        (f"{MAIN.format(SET)}{CALLED}x = torch.cuda.is_available()\n", 0),
        (f"if cuda: {SET}\n", 0),
        (f"if cpu: sys.exit(train())\n{SET}\n", 0),
        (f"try:\n    {SET}\nexcept Exception: pass\n", 0),
        (f"cuda and {SET}\n", 0),
        (f"@skipped\n{MAIN.format(SET)}{CALLED}", 0),
        ("torch.cuda.set_device(-1); dist.init_process_group('gloo')\n", 0),
    ],
)
def test_a_script_that_needs_a_gpu_where_there_is_none(
    site, fake_slurm, cli, project, source: str, line: int
) -> None:
    (project / "train.py").write_text(source)
    words = ("./train.py", "--cluster", "pc", "--set", "devices=[neuron]", *TIME)
    said = cli("submit", *words, "--dry-run")
    warned = "needs a GPU, but the nodes (trn1.32xlarge) have none" in said.err
    assert said.code == 0 and warned is bool(line)
    assert (f"train.py, line {line}: " in said.err) is bool(line)
    with_gpus = cli("submit", "./train.py", *CPU, *TIME, "--dry-run")
    assert with_gpus.code == 0 and "needs a GPU" not in with_gpus.err


def test_what_a_script_imports_says_that_it_runs_on_trainium(
    site, fake_slurm, cli, project
) -> None:
    site.profile("trn")
    (module := project / "src/own/train.py").parent.mkdir(parents=True)
    sources = (
        ("import torch\n", False),
        ("try:\n  from torch_xla import x\nexcept: x\n", True),
        ("import torch_xla_fake\n# import torch_xla\n", False),
    )
    for file, words in ((project / "train.py", ("./train.py",)), (module, ("-m", "own.train"))):
        for source, takes in sources:
            file.write_text(source)
            done = cli("submit", "--dry-run", "--cluster", "trn", *TIME, *words)
            assert (done.code == 0) is takes, done


def test_on_torchneuron_a_script_compiles_while_it_trains(cli, project, tmp_path) -> None:
    words = ("./train.py", "--cluster", "trn2", *TIME)
    done = cli("render", *words, "-o", tmp_path / "out")
    assert done.code == 0, done
    assert not (tmp_path / "out/precompile.sbatch").exists()
    node = (tmp_path / "out/node.sh").read_text()
    assert 'export TORCH_NEURONX_NEFF_CACHE_DIR="$TRNSLURM_RUN_DIR/compiled"' in node
    refused = cli("render", *words, "--set", "precompile=auto")
    assert refused.code == 1 and "set precompile to never" in refused.error


def test_programs_of_the_project_stay_programs(site, fake_slurm, cli, project) -> None:
    (project / "prog").write_bytes(b"\x7fELF...")
    assert cli("submit", "./run.sh", *CPU, *TIME).code == 0
    run = site.run()
    modes = {
        f.name: f.stat().st_mode & 0o777 for f in (run.code / "project").glob("*") if f.is_file()
    }
    assert modes == {"prog": 0o700, "run.sh": 0o700, "train.py": 0o600}


def test_the_working_directory(site, fake_slurm, cli, project) -> None:
    """A copy of the project, made once; a link where the project has data."""
    (project / "data").mkdir()
    (project / "it's").mkdir()
    (project / "it's/deep data").mkdir()
    links = ("--set", 'links=[data, "it\'s/deep data"]')
    assert cli("submit", "./train.py", *CPU, *TIME, *links).code == 0
    run = site.run()
    script = (run.path / "train.sbatch").read_text()
    part = script[script.index("if [ ! -e work ]") :].partition("\nfi\n")[0] + "\nfi\n"
    for _ in range(2):
        subprocess.run(["bash", "-euc", part], cwd=run.path, check=True, timeout=600)
        (run.path / "work/train.py").write_text("changed")
    assert (run.path / "work/data").resolve() == project / "data"
    assert (run.path / "work/it's/deep data").resolve() == project / "it's/deep data"
    assert (run.path / "work/train.py").read_text() == "changed"
    assert (run.code / "project/train.py").read_text() == "import widths\n"
    assert shlex.split(run.record().command[-1])  # the whole command is on record


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_texts_arrive_as_they_are(site, project, what: str, tmp_path) -> None:
    """As argument, option of a launcher, directory, link and name of a script; or are refused."""
    text = HOSTILE[what]
    given: dict[str, Any] = {"arguments": ["{own}", text, f"--x={text}{{run}}{text}"]}
    given |= {"places": {"own": text}}
    options = {"launcher": "torchrun", "launcher_arguments": [text]}
    tries = [given, options, {"checkpoints": text}]
    if what in FILE_NAMES:
        (project / text).write_text("")
        (project / f"{text}.dir").mkdir()
        tries += [{"entry": text, "launcher": "script"}, {"links": [f"{text}.dir"]}]
    accepted: dict[str, Any] = {}
    templates = Workspace.discover([str(site.root)]).template_dirs()
    for fields in tries:
        tree = {"project": str(project), "entry": "train.py", "devices": ["cuda"], **fields}
        site.recipe(yaml.safe_dump(tree | {"precompile": "never"}), name="own")
        site.profile(instance_type="p4d.24xlarge")
        try:
            limit = {"slurm.time_min": ("--time", 60)}
            config = resolve(Workspace.discover(), "own", cluster="pc", options=limit)
            bundle = render_job(make_spec(config, 1), templates)
        except TrnslurmError as error:
            assert len(str(error).splitlines()) == 1
            continue
        accepted |= fields
        home = tmp_path / f"run{len(accepted)}"
        home.mkdir()
        bundle.write(home)
        script = (home / "train.sbatch").read_bytes().decode()
        part = script[script.index("export TRNSLURM_CHECKPOINTS") :].partition("\nfi\n")[0]
        checkpoints = subprocess.run(
            ["bash", "-euc", f"{part}\nfi\nprintf %s \"$TRNSLURM_CHECKPOINTS\""], cwd=home,
            check=True, capture_output=True, timeout=600,
        ).stdout.decode()  # fmt: skip
        named = f"work/{text}" if fields.get("checkpoints") else "checkpoints"
        assert checkpoints == f"{home}/{named}"
        assert saves_in(RunFiles(home)) == Path(checkpoints)
        words = command_of((home / "node.sh").read_bytes().decode())
        for word in fields.get("launcher_arguments", []):
            assert word in words
        if "arguments" in fields:
            assert words[-3:-1] == [text, text]
            assert words[-1].startswith("--x=") and words[-1].count("/runs/a b") == 1
        for name in fields.get("links", []):
            assert (home / "work" / name).resolve() == project / name
        assert not list(tmp_path.rglob(MARK))
    assert accepted or what in ("NUL", "surrogate", "blank")


def test_arguments_of_a_first_and_a_later_start(site, cli, project) -> None:
    """Each in its place; what becomes empty is left out, with an option before it."""
    arguments = (
        "a", "--init={first:scratch}{later:resume}", "--from", "{later:last one}", "--lr", "1",
        "--load={first:no $HOME}{resume}", "--only={first:x}", "-r", "{resume}", "{{later:x}}",
        "{first:}", '{"first": 1}', "z",
    )  # fmt: skip
    files = rendered(site, cli, "./train.py", "--launcher", "python", "--", *arguments)
    assert "export TRNSLURM_RESUMES=told\n" in files["train.sbatch"]
    first = command_of(files["node.sh"])
    assert first == [
        "python", "train.py", "a", "--init=scratch", "--lr", "1", "--load=no $HOME", "--only=x",
        "{later:x}", '{"first": 1}', "z",
    ]  # fmt: skip
    later = command_of(files["node.sh"], TRNSLURM_RESUME="@resume@")  # as workers start ahead
    assert later == [
        "python", "train.py", "a", "--init=resume", "--from", "last one", "--lr", "1",
        "--load=@resume@", "-r", "@resume@", "{later:x}", '{"first": 1}', "z",
    ]  # fmt: skip
    only = rendered(site, cli, "./train.py", "--launcher", "python", "--", "--new", "{first:1}")
    assert command_of(only["node.sh"])[2:] == ["--new", "1"]
    assert command_of(only["node.sh"], TRNSLURM_RESUME="x")[2:] == []


@pytest.mark.parametrize(
    ("words", "takes"),
    [
        ("--resume_from_checkpoint latest", True),
        ("--resume=latest", True),
        ("trainer.ckpt_path=last", True),
        ("--auto_resume", True),
        ("--resume out/last.ckpt", False),
        ("--last latest", False),
        ("--resume --name last", False),
    ],
)
def test_a_script_may_find_its_newest_checkpoint(site, cli, project, words, takes) -> None:
    files = rendered(site, cli, "./train.py", "--", *words.split())
    assert ("TRNSLURM_RESUMES=told" in files["train.sbatch"]) == takes


def test_ignored_data_that_an_argument_names_is_linked(site, cli, project) -> None:
    (project / ".gitignore").write_text("data\nout\nbig\nassets/hf/*\n*.cfg\n")
    for name in ("data/train/a.bin", "data/b.bin", "out/x", "big/c.bin", "assets/hf/q/t.json",
                 "part/a.bin", "part/b.cfg", "c.cfg"):  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    words = ("--train_data_dir", "./data/train/", "--output_data", "out", "data.path=big")
    words += ("--hf_assets_path", "assets/hf/q", "--tokenizer", "part")
    said = cli("submit", "./train.py", *CPU, "--dry-run", *TIME, "--", *words)
    assert (
        ", not c.cfg, out (.gitignore, or hidden); links to assets/hf/q, big, data, part/b.cfg;"
        in said.out
    )
    files = rendered(site, cli, "./train.py", "--", *words)
    assert f"ln -sfn {project}/data work.new/data" in files["train.sbatch"]
    (project / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --time=9 # --data out\n# export TEST_DATA=out\n"
        "export DATA_DIR=$PWD/big\nsrun python train.py --save 'it\\'s'\\\n  --input=data/train\n"
    )
    with (project / "train.py").open("a") as file:
        file.write("\nroot = './data/'\n")
    said = cli("submit", "./train.py", *CPU, "--dry-run", *TIME)
    assert "links to data;" in said.out
    for name in (".venv/pyvenv.cfg", ".venv/bin/torchrun", "other/pyvenv.cfg"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    with (project / "job.sbatch").open("a") as file:
        file.write("srun ./.venv/bin/torchrun train.py\n")
    said = cli("submit", "./job.sbatch", *CPU, "--dry-run")
    assert "links to .venv, big, data;" in said.out and " more (.git" in said.out


@pytest.mark.parametrize(
    ("words", "links", "left_out"),
    [
        ("", "data tmp/bpe", ["tmp"]),
        ("--config a.json", "data tmp/bpe", ["tmp"]),
        ("-c tmp/b.yaml", "../data data tmp/bpe", ["tmp/big.json"]),
        ("run.file=tmp/b.yaml", "../data data tmp/bpe", ["tmp/big.json"]),
        ("--train_data tmp/b.yaml", "data tmp/b.yaml tmp/bpe", ["tmp"]),
        ("../data/", "../data data tmp/bpe", ["tmp"]),
        ("--output ../data", "data tmp/bpe", ["tmp"]),
        ("--data ../../data", "data tmp/bpe", ["tmp"]),
        ("--data ../absent", "data tmp/bpe", ["tmp"]),
    ],
)
def test_settings_say_what_is_read(tmp_path: Path, words: str, links: str, left_out) -> None:
    """They are copied though git ignores them; data beside the project are linked to."""
    root = tmp_path / "some/project"
    for name, text in {
        "a.py": "", ".gitignore": "data\ntmp\n", "data/train/x": "", "../data/y": "",
        "a.json": '{"location": "data"}', "tmp/big.json": "", "../../data/z": "",
        "tmp/bpe": "", "c.yaml": "a:\n  tokenizer_path: './tmp/bpe' # x\n  out_data: tmp/b.yaml\n",
        "tmp/b.yaml": "data:\n  root: ../data/y\n  dirs: [data/train]\n  s3: s3://data/x\n",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    files = project_files(root, "a.py", [], words.split())
    facts = json.loads(files["code/project.json"])
    assert ([*facts["links"]], facts["left_out"]) == (links.split(), left_out)
    assert ("code/project/tmp/b.yaml" in files) == ("tmp" not in left_out)
    assert facts["links"].get("../data") in (None, str(root.parent / "data"))


def test_what_is_above_the_project(site, cli, project) -> None:
    """An argument gets its whole path; what a file names is told."""
    (project / "deep/er").mkdir(parents=True)
    source = 'open(join(here, "..", "..", "train.py")); open("../../none")'
    (project / "deep/er/x.py").write_text(source)
    os.chdir(project / "deep/er")
    words = ("--data=../../train.py", "../..", "../../none")
    said = cli("submit", "./x.py", *CPU, *TIME, "--dry-run", "--", *words)
    assert f"Using {project}/train.py for ../../train.py, which is above the project" in said.err
    assert (
        "x.py names ../../train.py, which is above the project and missing" in said.out + said.err
    )
    node = rendered(site, cli, "./x.py", "--", *words)["node.sh"]
    assert command_of(node)[-3:] == [f"--data={project}/train.py", f"{project}", "../../none"]


def test_a_script_continues_from_what_its_library_saved(site, fake_slurm, cli, project) -> None:
    """Nothing reported it, and the arguments did not ask for it."""
    script = project / "train.py"
    script.write_text(
        f"{script.read_text()}\nHfArgumentParser(TrainingArguments)\n"
        "trainer.train(resume_from_checkpoint=a.resume_from_checkpoint)\n"
    )
    (project / "events.json").write_text('{"a": 1}\n{"a": 2}\n')  # lines: no JSON as a whole
    assert cli("submit", "./train.py", *CPU, *TIME, "--", "--a=load").code == 0
    run, resume = site.run(), "trnslurm resume {}"
    (run.code / "project").rename(run.path / "work")
    shutil.copytree(run.path / "work", run.code / "project")
    checkpoint = run.path / "work/out/checkpoint-9"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{\n}\n")
    os.utime(checkpoint / "trainer_state.json", 2 * (time.time() - 3 * 3600,))
    write_attempt(run, "train", 1, state="FAILED", cause="crash", exit_code=1)
    fake_slurm.queue("1001|FAILED|NonZeroExitCode|x|node-1")
    resume = f"trnslurm resume {run.name}"
    words = "-- --resume_from_checkpoint {resume}"
    said = cli("status", run.name).out
    assert "saved: checkpoint-9 (Trainer), 3 h ago; the script does not load it\n" in said
    assert f"`{resume} --force` if the script finds work/out/checkpoint-9 itself; other" in said
    assert f"pass it with the script's own option, then {resume} {words}\n" in said
    assert newest_checkpoint(run) is None
    copy = run.code / "project/train.py"
    (copy.parent / "other.py").write_text("add_argument('--resume')")
    for source, option in (
        ("from other import options", "--resume"),
        ("LightningCLI(Model, run=False)", ""),
        ("HfArgumentParser(TrainingArguments); trainer.train()", ""),
        ("add_argument('-r', '--auto-resume'); add_argument('--load_model')", "--auto-resume"),
        ("ArgumentParser().add_argument('--load-model')", "--load-model"),
        ("ArgumentParser(); a('--resume', action='store_true'); a('--load')", "--load"),
        ("import hydra, argparse\n@hydra.main()\nargparse.ArgumentParser()", ""),
        (
            "argv\n@hydra.main()\nif cfg.ckpt.resume_from: f(cfg.ckpt.resume_from)",
            "++ckpt.resume_from=",
        ),
        (copy.read_text(), "--resume_from_checkpoint"),
    ):
        copy.chmod(0o644)
        copy.write_text(source)
        said = cli("status", run.name).out
        given = option or "OPTION"
        given += "" if given.endswith("=") else " "
        assert f"then {resume} -- {given}{{resume}}\n" in said
        assert ("(if the script has none, call trnslurm.saved() in it)" in said) == (not option)
    (copy.parent / "other.py").unlink()
    source, flag = copy.read_text(), f"{resume} --force -- --resume"
    copy.write_text("ArgumentParser().add_argument('--resume', help='on', action='store_true')")
    assert f"then {flag}\n" in cli("status", run.name).out
    copy.write_text(source)
    refused = cli("resume", run.name).error
    assert "might overwrite work/out/checkpoint-9 in its directory. To pass these " in refused
    done = cli("resume", run.name, *words.replace("--resume_from", "--r").split())
    assert done.code == 0
    assert f"continues after step 9 from {checkpoint} (Trainer)" in done.err
    node = (run.path / "node.sh").read_text()
    assert command_of(node)[-1] == "--a=load"
    assert command_of(node, TRNSLURM_RESUME="x")[-2:] == ["--r_checkpoint", "x"]
    assert newest_checkpoint(run) == checkpoint
    assert "saved: checkpoint-9 (Trainer), 3 h ago\n" in cli("status", run.name).out
    fake_slurm.queue("1002|FAILED|NonZeroExitCode|x|node-1")
    assert cli("resume", run.name, "x").error.count(
        "put -- before the arguments of the script, as in -- x"
    )
    assert cli("resume", run.name).code == 0


def test_a_recipe_is_made_of_what_was_given(site, cli, project) -> None:
    """It renders what the script itself renders, whatever its arguments are."""
    arguments = ("--", "--lr", "1e-4", "{seed}", "yes", "a: b #c", "", "{x: 1}", 'q"\\', "-", "ünï")
    done = cli("new", "mine", "--from", "scripts/other.py", "--launcher", "python", *arguments)
    assert done.out.startswith("Wrote jobs/mine/recipe.yaml. ")
    options = ("--launcher", "python", "--name", "mine")
    of_script = rendered(site, cli, "scripts/other.py", *options, *arguments)
    of_recipe = rendered(site, cli, "mine", "--path", ".")
    del of_script["code/project.json"], of_recipe["code/project.json"]
    assert command_of(of_recipe["node.sh"]) == command_of(of_script["node.sh"])
    assert of_recipe["train.sbatch"].splitlines()[2:] == of_script["train.sbatch"].splitlines()[2:]
    assert "jobs/mine/recipe.yaml already exists" in cli("new", "mine", "--from", "train.py").error
    assert cli("new", "mine", "--from", "train.py", "--force").code == 0
    assert cli("show", "mine", "--path", ".", *CPU).code == 0


def test_a_recipe_is_made_of_another(site, cli, project) -> None:
    """The copy plans and renders the same, with its own code."""
    assert cli("new", "mine", "--from", "gpt2_zero1").out.startswith("Wrote jobs/mine/. ")
    words = ("--preset", "tiny", *CPU)
    planned = cli("plan", "gpt2_zero1", *words).out
    assert cli("plan", "mine", "--path", ".", *words).out == planned.replace("gpt2_zero1", "mine")
    assert "code/jobs/mine/train.py" in rendered(
        site, cli, "mine", "--preset", "tiny", "--path", "."
    )
    assert "jobs/mine already exists" in cli("new", "mine", "--from", "gpt2_zero1").error
    assert cli("new", "other", "--from", "gpt2_zero1", "--launcher", "srun").code == 2
    assert cli("new", "mine", "--from", "gpt2_zero1", "--force").code == 0


def test_a_script_that_tells_of_no_checkpoint_does_not_begin_anew(
    site, fake_slurm, cli, project
) -> None:
    """{resume} would be left out, and what it has saved be written over."""
    words = ("--", "--out", "{checkpoints}", "--resume", "{resume}")
    assert cli("submit", "./train.py", *CPU, *TIME, *words).code == 0
    run = site.run()
    fake_slurm.queue("1001|TIMEOUT|TimeLimit|x|node-1")
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / "ckpt_40.pt").touch()
    said = cli("resume", run.name).error
    assert f"{run.name} has not reported a checkpoint, so it would start at step 0" in said
    assert len(fake_slurm.calls("sbatch")) == 1
    saved = {"step": 40, "path": str(run.checkpoints / "ckpt_40.pt")}
    run.saved_file.write_text(json.dumps(saved))
    assert cli("resume", run.name).code == 0
    assert len(fake_slurm.calls("sbatch")) == 2


def torch_file(pickled: bytes = b"") -> bytes:
    """A file as torch.save writes it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    return file.getvalue()


TORCH_FILE = torch_file()
# What a script left in work/ -> the path that is named; nothing: it is no whole checkpoint.
LEFT = {
    "Trainer": ({"out/checkpoint-9/trainer_state.json": b"{}", "out/trainer_state.json": b"{}"},
                "out/checkpoint-9"),
    "Trainer, while it saved": ({"out/checkpoint-9/optimizer.pt.tmp": TORCH_FILE}, ""),
    "Lightning": ({"logs/version_0/last.ckpt": TORCH_FILE}, "logs/version_0/last.ckpt"),
    "nanoGPT": ({"out/ckpt.pt": TORCH_FILE}, "out/ckpt.pt"),
    "half a file": ({"out/ckpt.pt": TORCH_FILE[:10]}, ""),
    "timm": ({"output/a/last.pth.tar": TORCH_FILE}, "output/a/last.pth.tar"),
    "before torch 1.6": ({"model_12.pt": b"\x80\x02"}, "model_12.pt"),
    "accelerate": ({"step_40/random_states_0.pkl": b"\x80", "step_40/model.safetensors": b"x"},
                   "step_40"),
    "torch.distributed.checkpoint": ({"o/step-7/.metadata": b"\x80"}, "o/step-7"),
    "DeepSpeed": ({"out/latest": b"global_step5\n", "out/global_step5/mp_rank_00": b""},
                  "out/global_step5"),
    "DeepSpeed, elsewhere": ({"out/latest": b"../../../..", "out/x": b""}, ""),
    "Megatron": ({"c/iter_0000030/x.pt": TORCH_FILE[:9],
                  "c/latest_checkpointed_iteration.txt": b"30"}, "c/iter_0000030"),
    "data": ({"data/train.pt.lock": b"x", "data/rows.bin": b"x", "wandb/last.ckpt": b"x"}, ""),
    "its own": ({"base.ckpt": b"given"}, ""),
    "its own, trained": ({"base.ckpt": b"taken"}, "base.ckpt"),
    "a terminal's": ({"last\x1b[2J.ckpt": b"x"}, "last\\x1b[2J.ckpt"),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_a_script_does_not_begin_over_its_checkpoints(
    site, fake_slurm, cli, project, what, tmp_path
) -> None:
    Path("base.ckpt").write_bytes(b"given")
    assert cli("submit", "./train.py", *CPU, *TIME, "--", "--a").code == 0
    run, (files, named) = site.run(), LEFT[what]
    command = ("trnslurm", "submit", "./train.py", "--", "--a")
    run.write_record(replace(run.record(), command=command))
    (run.code / "project").rename(run.path / "work")
    shutil.copytree(run.path / "work", run.code / "project")
    (run.path / "work/linked").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "last.ckpt").write_bytes(TORCH_FILE)
    (run.path / "work/best.ckpt").symlink_to(tmp_path / "last.ckpt")
    for name, content in files.items():
        file = run.path / "work" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    write_attempt(run, "train", 1, state="FAILED", cause="crash", exit_code=1)
    fake_slurm.queue("1001|FAILED|NonZeroExitCode|x|node-1")
    said, done = cli("status", run.name).out, cli("resume", run.name)
    if not named:
        assert done.code == 0
        assert f"next: trnslurm resume {run.name}\n" in said
        return
    resume, path = f"trnslurm resume {run.name} --force", f"work/{named}"
    assert f"next: `{resume}` if the script finds {path} itself; otherwise " in said
    assert "; otherwise pass it to the script, and call trnslurm.saved() in it, then trn" in said
    assert "saved() in it, then trnslurm submit ./train.py -- --a\n" in said
    assert f"might overwrite {path} in its directory. If the script finds these " in done.error
    assert (
        f"{resume}. If not, submit the script again, and pass {run.path}/{path} with" in done.error
    )
    given = f"pass {run.path}/{path} to the script with its own option, after --"
    assert cli("submit", "./train.py", *CPU, *TIME, "--from", run.name).error.endswith(given)
    assert len(fake_slurm.calls("sbatch")) == 1
    assert cli("resume", run.name, "--force").err.endswith(f"continue from {run.path}/{path}\n")


def test_words_of_a_resume_take_the_place_of_those_before(site, fake_slurm, cli, project) -> None:
    assert cli("submit", "./train.py", *CPU, *TIME, "--", "--a").code == 0
    run = site.run()
    write_attempt(run, "train", 1, state="FAILED", cause="crash", exit_code=1)

    def resumed(*words: str) -> str:
        fake_slurm.queue(f"{run.record().jobs['train']}|FAILED|NonZeroExitCode|x|node-1")
        assert cli("resume", run.name, "--force", *words).code == 0
        [line] = re.findall(r"train\.py (.*)", (run.path / "node.sh").read_text())
        return line

    assert resumed("--", "--wrong", "{seed}") == "--a --wrong 1234"
    assert resumed("--", "--right") == "--a --right"
    assert resumed() == "--a --right"
    assert resumed("--", "") == "--a"
    resumed("--set", "env.MY_FLAG=a b", "--set", "slurm.account=other", "--set", "slurm.time_min=7")
    job = (run.path / "train.sbatch").read_text()
    assert "#SBATCH --account=other " in job and "#SBATCH --time=00:07:00 " in job
    assert "export MY_FLAG='a b'\n" in job
    fake_slurm.queue(f"{run.record().jobs['train']}|FAILED|NonZeroExitCode|x|node-1")
    refused = cli("resume", run.name, "--force", "--set", "seed=5").error
    assert "--set seed=5: only slurm.max_node_hours" in refused and "env.NAME can change" in refused


def test_resume_says_where_a_script_may_continue(site, fake_slurm, cli, project) -> None:
    """In {checkpoints}, or in the directory of the key checkpoints; not if that is empty."""
    for words, place in (
        (("--", "--out", "{checkpoints}"), "checkpoints"),
        (("--set", "checkpoints=out"), "work/out"),
    ):
        assert cli("submit", "./train.py", *CPU, *TIME, *words).code == 0
        run = site.runs()[-1]
        fake_slurm.queue(f"{run.record().jobs['train']}|FAILED|NonZeroExitCode|x|node-1")
        (run.path / place).mkdir(parents=True, exist_ok=True)
        again = f"{run.name} has no checkpoint, so it starts from the beginning\n"
        assert cli("resume", run.name).err == again
        fake_slurm.queue(f"{run.record().jobs['train']}|FAILED|NonZeroExitCode|x|node-1")
        (run.path / place / "newest.pt").touch()
        told = f"{run.name} starts again, and its script may continue from {run.path / place}\n"
        assert cli("resume", run.name).err == told


def test_a_batch_script_in_python_has_its_own_nodes(site, project) -> None:
    Path("job.sbatch").write_text(BATCH_SCRIPT)
    assert [options_of("job.sbatch", nodes, {}).nodes for nodes in (1, 3)] == [2, 3]
    assert options_of("job.sbatch", 1, {}).name == "two"


def test_a_part_of_a_node(site, cli, project) -> None:
    """Only what was asked for is taken, with a worker per GPU."""

    def lines(*words: str) -> list[str]:
        done = cli("render", "./train.py", *CPU, *TIME, *words)
        assert done.code == 0, done.err
        return re.findall(r"^#SBATCH (--(?:cpus|gpus|mem|excl)\S*)", done.out, re.M)

    assert lines() == ["--cpus-per-task=96", "--gpus-per-node=8", "--exclusive"]
    assert lines("--gpus", "2") == ["--cpus-per-task=24", "--gpus-per-node=2"]
    claims = replace(catalog()["p4d.24xlarge"], device=XLA_CPU)  # as in a sandbox
    assert _cpus_of_node(Slurm(gpus_per_node=2, exclusive=False), claims)[0] == 24
    assert lines("--gpus", "1g.5gb:3", "--cpus", "4", "--mem", "64G") == [
        "--cpus-per-task=4", "--mem=65536", "--gpus-per-node=1g.5gb:3"
    ]  # fmt: skip
    assert "--workers=2" in rendered(site, cli, "./train.py", "--gpus", "2")["node.sh"]
    assert (
        "--workers=1"
        in rendered(site, cli, "./train.py", "--gpus", "2", "--workers", "1")["node.sh"]
    )
    of_the_profile = ("--set", "slurm.gpus_per_node=2", "--set", "slurm.exclusive=false")
    assert "--workers=2" in rendered(site, cli, "./train.py", *of_the_profile)["node.sh"]
    for words, said in (
        (
            ("--gpus", "all"),
            "--gpus all: expected a number, or a type and a number, such as a100:2",
        ),
        (("--mem", "much"), "--mem much: expected a number with K, M, G or T, such as 64G"),
        (("--cpus", "0"), "--cpus 0: must be at least 1"),
        (("--gpus", "2", "--set", "slurm.exclusive=true"), "contradict each other"),
    ):
        assert said in cli("render", "./train.py", *CPU, *TIME, *words).error


def test_a_job_for_each_checkpoint_of_a_run(site, fake_slurm, cli, project) -> None:
    """Nothing is queued: its bundle waits in the run's directory."""
    slurm = (*CPU, *TIME)
    assert cli("submit", "./train.py", *slurm, "--", "--out", "{checkpoints}").code == 0
    run = site.run()
    queued = fake_slurm.calls("sbatch")
    follows = ("--each-checkpoint-of", run.name, "--every", "10")
    words = (*slurm, "--name", "eval", *follows, "--", "--model={checkpoint}", "--at", "{step}")
    assert (
        "eval runs for each checkpoint, 0 jobs so far\n" in cli("submit", "./train.py", *words).out
    )
    assert fake_slurm.calls("sbatch") == queued
    script = (run.follow / "eval/train.sbatch").read_text()
    assert "TRNSLURM_FOLLOWED=$(readlink -f followed/checkpoint)\n" in script
    node = (run.follow / "eval/node.sh").read_text()
    assert '--model="$TRNSLURM_FOLLOWED"' in node and '"$TRNSLURM_FOLLOWED_STEP"' in node
    rule = {"every": 10, "at_most": 1, "metric": "", "highest": False, "patience": 0}
    assert json.loads((run.follow / "eval/rule.json").read_text()) == rule
    assert [f["runs"] for f in json.loads(cli("status", run.name, "--json").out)["followers"]] == [
        0
    ]
    said = cli("submit", "./train.py", *words).err
    assert (
        f"{run.name} already has a job named eval for its checkpoints: choose another --name"
        in said
    )

    group = trnslurm.each_checkpoint(
        str(run.path), "./train.py", cluster="pc", name="other", time=60, arguments=["{step}"],
        settings={"device": "cuda", "instance_type": "p4d.24xlarge"}, highest="f1", patience=3,
    )  # fmt: skip
    rule = json.loads((run.follow / "other/rule.json").read_text())
    assert (rule["metric"], rule["highest"], rule["patience"]) == ("f1", True, 3)
    assert group == f"{run.name}.other"
    assert fake_slurm.calls("sbatch") == queued

    def refused(*options: str, place: str = "{step}") -> str:
        return str(cli("submit", "./train.py", *options, "--", place).err)

    assert "unknown placeholder {checkpoint}" in refused(*slurm, place="{checkpoint}")
    assert "--every requires --each-checkpoint-of" in refused(*slurm, "--every", "3")
    assert "--patience requires --lowest METRIC or" in refused(*slurm, *follows, "--patience", "3")
    both = ("--lowest", "loss", "--highest", "f1")
    assert "name one metric, and one of the two" in refused(*slurm, *follows, *both)
    assert "require --halving or --each-checkpoint-of" in refused(*slurm, *both)
    assert "--sweep" in refused(*slurm, *follows, "--sweep", "seed=1,2")
    assert "requires Slurm jobs" in refused("--cluster", "local", *follows)
    recipe = cli("submit", "gpt2_zero1", "--preset", "tiny", *slurm, *follows).err
    assert "the recipe gpt2_zero1 does not accept {checkpoint}" in recipe
    assert "no run 'nothing'" in refused(*slurm, "--each-checkpoint-of", "nothing")


def test_a_checkpoint_that_is_followed_as_a_hugging_face_folder(
    site, fake_slurm, cli, project
) -> None:
    """Only where a word has {export}, and only of a run with an export.py."""
    slurm = (*CPU, *TIME)
    assert cli("submit", "gpt2_zero1", "--preset", "tiny", *slurm).code == 0
    run = site.run()

    def bundle(name: str, *words: str) -> tuple[str, str]:
        follows = ("--each-checkpoint-of", run.name, "--name", name)
        done = cli("submit", "./train.py", *slurm, *follows, *words)
        assert done.code == 0, done.err
        place = run.follow / name
        return (place / "train.sbatch").read_text(), (place / "node.sh").read_text()

    script, node = bundle("eval", "--", "--model", "{export}/", "{checkpoint}")
    assert '--model "$TRNSLURM_EXPORT"/ "$TRNSLURM_FOLLOWED"' in node
    export = 'export TRNSLURM_EXPORT="$PWD/exported/step-$TRNSLURM_FOLLOWED_STEP"  # '
    at = [script.index(text) for text in (export, "/export.py ", "\nexec ")]
    assert at == sorted(at)
    assert '/run/code" "$TRNSLURM_PYTHON" \\\n    followed/run/code/jobs/*/export.py ' in script
    assert subprocess.run(
        ["shellcheck", "--exclude=SC1091,SC2016", run.follow / "eval/train.sbatch"],
        check=False, stdout=subprocess.DEVNULL, timeout=600,
    ).returncode == 0  # fmt: skip
    assert "EXPORT=" not in bundle("none", "--", "{checkpoint}", "{{export}}")[0]
    serves = "roles.vllm.command=[python, train.py, '{export}', --port, '{port}']"
    assert export in bundle("served", "--set", serves, "--", "{vllm.url}")[0]
    image = ("--set", "container.image=/images/a.sqsh", "--set", "container.python=/own/python")
    script, _ = bundle("inside", *image, "--", "{export}")
    assert 'srun --nodes=1 --ntasks=1 --cpu-bind=none "${TRNSLURM_INSIDE[@]}" env USE_' in script
    assert '/run/code" /own/python \\\n    followed/run/code/jobs/*/export.py ' in script

    def refused(of: str) -> str:
        words = (*slurm, "--each-checkpoint-of", of, "--name", "other", "--", "{export}")
        done = cli("submit", "./train.py", *words)
        assert done.code == 1
        return str(done.error)

    assert "placeholder {export}" in cli("submit", "./train.py", *slurm, "--", "{export}").error
    (run.code / "jobs/gpt2_zero1/export.py").unlink()
    assert refused(run.name) == (
        f"{{export}}: gpt2_zero1 has no export.py, so the checkpoints of {run.name} cannot be "
        "exported: use {checkpoint}"
    )
    assert cli("submit", "./train.py", *slurm, "--name", "custom").code == 0
    own = next(each.name for each in run.path.parent.iterdir() if each.name.endswith("-custom"))
    assert refused(own) == (
        f"{{export}}: {own} runs a custom script, which saves in its own format: use "
        "{checkpoint}, which is a Hugging Face folder if the script saves one"
    )
    assert not (run.follow / "other").exists()


def test_a_batch_script_without_a_time_limit(site, fake_slurm, cli, project) -> None:
    """It has the partition's, as by sbatch, which is not 0 node-hours."""
    Path("job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun hostname\n")
    done = cli("submit", "job.sbatch", *CPU, "--dry-run")
    assert done.code == 0, done.err
    assert re.search(
        "^job on 2 x .*: the partition sets its time limit$", done.err + done.out, re.M
    )
