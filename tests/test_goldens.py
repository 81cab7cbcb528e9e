"""The rendered scripts for the clusters that matter; `make goldens` rewrites them.

Six bundles are kept whole. Of each other one, the difference to the nearest of these is kept: so a
review shows what an option changes, and a changed line of a template once.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trnslurm.config.load import resolve
from trnslurm.config.search import Workspace, packaged_root
from trnslurm.contract.rundir import INGREDIENTS
from trnslurm.plan.data import Own, make_data_job
from trnslurm.plan.spec import make_spec
from trnslurm.render.array import render_array
from trnslurm.render.bundle import Bundle, diff, read_bundle
from trnslurm.render.job import render_data_job, render_job

from .processes import run_process

ROOT = Path(__file__).parent.parent
GOLDENS = Path(__file__).parent / "goldens"

TRN1 = "trn1-2-nodes"
BERT = "bert-phase1-2-nodes"
LLAMA = "llama-fsdp-p4de-2-nodes"
LOCAL = "local-2-nodes"
OWN = "own-accelerate-p4d-2-nodes"
ARRAY = "trn1-array.sbatch"
# Name -> recipe, nodes, cluster, preset; the bundle to compare with, or None: kept whole; --set.
CASES: dict[str, tuple[str, str | None, list[str]]] = {
    "trn1-1-node": ("gpt2_zero1 1 trn1 xl", TRN1, []),
    TRN1: ("gpt2_zero1 2 trn1 xl", None, []),
    "trn1-3-nodes": ("gpt2_zero1 3 trn1 xl", TRN1, []),
    "trn1-16-nodes": ("gpt2_zero1 16 trn1 xl", TRN1, []),
    "trn1n-2-nodes": (
        "gpt2_zero1 2 trn1 xl",
        TRN1,
        ["instance_type=trn1n.32xlarge", "slurm.time_min=2880"],
    ),
    "trn2-2-nodes": ("gpt2_zero1 2 trn2 xl", TRN1, ["slurm.time_min=2880"]),
    # It may lose a node, and has caps.
    "p4d-2-nodes": (
        "gpt2_zero1 2 p4d xl",
        TRN1,
        [
            "slurm.time_min=2880",
            "slurm.spares=1",
            "slurm.expedite=true",
            "slurm.gpu_type=a100",
            "slurm.mem_per_node_mib=0",
            "slurm.max_cost=500",
            "slurm.max_attempts=20",
        ],
    ),
    LOCAL: ("gpt2_zero1 2 local tiny", None, []),
    # Every option of a profile at once, with values that need quoting.
    "every-option": (
        "gpt2_zero1 2 trn1 xl",
        TRN1,
        [
            "slurm.account=ml team",
            "slurm.qos=high",
            "slurm.constraint=[rack1|rack2]",
            "slurm.reservation=august",
            "slurm.exclusive=false",
            "slurm.requeue=false",
            "slurm.cpus_per_task=64",
            'slurm.sbatch=["--comment=it\'s a $(test) #1", "--mail-type=FAIL,END"]',
            'slurm.srun=["--mpi=none", "--network=it\'s $(test)"]',
            "activate=[module load efa, source /opt/env/bin/activate]",
            "group_readable=true",
            "compile_layout=per-host",
            "compile_trust=[ada, ml-builds]",
            "stage_python=/local/it's scratch",
            'notify.command=jq -r .text | mail -s "it\'s $TRNSLURM_EVENT" ada',
            "notify.webhook=~/it's a secret",
            "notify.events=[start, failure]",
            'env.GREETING=it\'s $HOME; `true` "x"',
        ],
    ),
    # In a container: by each runtime, for each kind of device.
    "trn1-podman-2-nodes": (
        "gpt2_zero1 2 trn1 xl",
        TRN1,
        ["container.runtime=podman", "container.image=ecr.aws/neuron/train:2.31", "slurm.spares=1"],
    ),
    "local-apptainer-2-nodes": (
        "gpt2_zero1 2 local tiny",
        LOCAL,
        ["container.runtime=apptainer", "container.image=~/it's.sif"],
    ),
    "bert-phase1-1-node": ("bert_pretrain 1 trn1 phase1", BERT, []),
    BERT: ("bert_pretrain 2 trn1 phase1", None, []),
    "bert-phase1-16-nodes": ("bert_pretrain 16 trn1 phase1", BERT, []),
    "bert-phase2-2-nodes": (
        "bert_pretrain 2 trn1 phase2",
        BERT,
        ["train.init_from=/shared/runs/phase1/checkpoints/step-00028125"],
    ),
    # One worker, as its tutorial begins; all of two nodes; this machine.
    "sentiment-1-worker-trn1": ("bert_sentiment 1 trn1 tweets", BERT, ["workers_per_node=1"]),
    "sentiment-fixed-2-nodes": ("bert_sentiment 2 trn1 tweets_fixed", BERT, []),
    "sentiment-tiny-local-2-nodes": ("bert_sentiment 2 local tiny", LOCAL, []),
    # On the small instance with the tutorial's two workers.
    "mrpc-2-workers-trn1.2xlarge": (
        "bert_mrpc 1 trn1 mrpc",
        BERT,
        ["instance_type=trn1.2xlarge", "workers_per_node=2"],
    ),
    "mrpc-rte-2-nodes": ("bert_mrpc 2 trn1 rte", BERT, []),
    "mrpc-tiny-local-2-nodes": ("bert_mrpc 2 local tiny", LOCAL, []),
    # With a published model by its name.
    "ner-roberta-2-nodes": ("bert_ner 2 trn1 conll2003_fixed", BERT, ["model.name=roberta-base"]),
    # GPUs over EFA, each strategy's own file next to plan.json.
    LLAMA: ("llama3_clm 2 p4de fsdp", None, []),
    # 40 samples on 16 GPUs: three units for each, eight of weight zero.
    "llama-deepspeed-p5-2-nodes": (
        "llama3_clm 2 p5 deepspeed",
        LLAMA,
        ["batch.mode=fixed", "batch.global_batch=40", "slurm.time_min=2880"],
    ),
    "llama-fsdp-p5en-2-nodes": ("llama3_clm 2 p5en fsdp", LLAMA, ["slurm.time_min=2880"]),
    "llama-xla-fsdp-p4de-2-nodes": ("llama3_clm 2 p4de xla_fsdp", LLAMA, ["device=xla-cuda"]),
    "llama-xla-fsdp-trn1-2-nodes": ("llama3_clm 2 trn1 xla_fsdp", LLAMA, ["slurm.time_min=2880"]),
    "llama-tensor-trn1-2-nodes": ("llama3_clm 2 trn1 trn1", LLAMA, []),
    "llama-tiny-local-2-nodes": ("llama3_clm 2 local tiny", LOCAL, []),
    # A custom script: GPUs over EFA by each launcher; this machine.
    OWN: ("own 2 p4d -", None, ["slurm.time_min=60"]),
    "own-deepspeed-p4d-2-nodes": ("own 2 p4d deepspeed", OWN, ["slurm.time_min=60"]),
    "own-srun-p4d-2-nodes": ("own 2 p4d srun", OWN, ["slurm.time_min=60"]),
    "own-script-p4d-2-nodes": ("own 2 p4d script", OWN, ["slurm.time_min=60"]),
    # Servers beside it, one role after the other, with spares of all.
    "own-roles-p4d-2-nodes": (
        "own 2 p4d -",
        OWN,
        [
            "slurm.time_min=60",
            "slurm.spares=1",
            "roles.rollout.nodes=2",
            "roles.rollout.spares=1",
            "slurm.max_nodes=8",
            'roles.rollout.command=[serve, --at, "{host}:{port}", "{reward.url}", "it\'s $x"]',
            "roles.rollout.ready=http://{host}:{port}/health",
            "roles.reward.command=[python, train.py, --role]",
            "arguments=[--servers, '{rollout.urls}']",
        ],
    ),
    # A stage of a pipeline: it takes a checkpoint and a number of other runs, and makes results.
    "own-stage-p4d-2-nodes": (
        "own 2 p4d torchrun",
        OWN,
        [
            "slurm.time_min=60",
            "inputs.prepare=/fsx/runs/20261130-nightly-prepare",
            "inputs.train=/fsx/runs/20261130-nightly-train",
            'arguments=["{prepare.out}", "--model={train.checkpoint}", "{train.loss}", "{out}"]',
            "starts_if=train.loss < 2.5",
        ],
    ),
    # A server in another partition, which has nothing of what is set for the training's nodes.
    "own-role-apart-p4d-2-nodes": (
        "own 2 p4d -",
        OWN,
        [
            "slurm.time_min=60",
            "slurm.mem_per_node_mib=0",
            "container.image=nvcr.io#nvidia/pytorch:25.10-py3",
            "roles.rollout.command=[serve, '{port}']",
            "roles.reward.partition=cpu",
            "roles.reward.sbatch=[--qos=it's $x]",
            "roles.reward.command=[python, train.py, '{port}']",
        ],
    ),
    "own-roles-local-1-node": (
        "own 1 local torchrun",
        LOCAL,
        ['roles.reward.command=[./run.sh, "{port}"]', "profile.at=100"],
    ),
    # Instances of one UltraServer.
    "own-p6e-2-nodes": (
        "own 2 p4d -",
        OWN,
        [
            "instance_type=p6e-gb200.36xlarge",
            "slurm.time_min=60",
            "slurm.sbatch=[--segment=2]",
        ],
    ),
    "own-local-2-nodes": ("own 2 local torchrun", LOCAL, ["profile.at=100"]),
    "own-pyxis-p4d-2-nodes": (
        "own 2 p4d -",
        OWN,
        [
            "slurm.time_min=60",
            "checkpoints=",
            "container.image=nvcr.io#nvidia/pytorch:25.10-py3",
            "container.mounts=[/fsx/it's, '~/.cache:/root/.cache:ro']",
            "container.workdir=/workspace/it's",
            "container.python=/opt/conda/bin/python3",
        ],
    ),
}

# The preparation of data as a job: cluster, preset, what the command line says beside the recipe.
DATA_CASES = {
    "trn1-data": ("trn1", "xl", Own(options=(r"--document-start=^ = [^=].* = $",))),
}

NEAREST = {name: like for name, (_, like, _) in CASES.items() if like}
WHOLE = [name for name in [*CASES, *DATA_CASES] if name not in NEAREST]

# A file that `source` names is not here, and a dollar in a single-quoted value is meant.
DATA_NOT_CODE = ("--exclude=SC1091,SC2016",)


@functools.cache
def rendered(name: str) -> Bundle:
    workspace = Workspace(
        roots=(ROOT / "tests/project", packaged_root()), cluster=None, cluster_source=""
    )
    if name in DATA_CASES:
        cluster, preset, own = DATA_CASES[name]
        config = resolve(workspace, "gpt2_zero1", cluster=cluster, preset=preset)
        return render_data_job(make_data_job(config, own), workspace.template_dirs())
    words, _, settings = CASES[name]
    recipe, nodes, cluster, preset = words.split()
    chosen = None if preset == "-" else preset
    config = resolve(workspace, recipe, cluster=cluster, preset=chosen, settings=settings)
    return render_job(make_spec(config, int(nodes)), workspace.template_dirs())


def reviewed_part(bundle: Bundle) -> Bundle:
    """What a person reviews: everything but the snapshot of the code, and its checksums."""
    parts = ("code/", "logs/", "state/")
    files = {n: d for n, d in bundle.files.items() if not n.startswith(parts)}
    if INGREDIENTS in files:
        ingredients = json.loads(files[INGREDIENTS])
        ingredients["source"] = sorted(ingredients["source"])
        files[INGREDIENTS] = f"{json.dumps(ingredients, indent=2)}\n".encode()
    return Bundle(files=files)


def difference(name: str) -> bytes:
    """What of a bundle is other than in the nearest whole one, file by file.

    Without line numbers: a line that is added to all bundles changes no difference.
    """
    old, new = (reviewed_part(rendered(each)).files for each in (NEAREST[name], name))
    lines: list[str] = []
    for file in sorted(old.keys() | new.keys()):
        before, after = (files.get(file, b"").decode().splitlines() for files in (old, new))
        found = [*difflib.unified_diff(before, after, lineterm="", n=1)][2:]
        if found:
            lines += [f"=== {file}", *("@@" if line.startswith("@@ ") else line for line in found)]
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.mark.parametrize("name", WHOLE)
def test_rendered_files_are_the_reviewed_ones(name: str, request: pytest.FixtureRequest) -> None:
    new = reviewed_part(rendered(name))
    directory = GOLDENS / name
    if request.config.getoption("--update-goldens"):
        for old in directory.glob("*"):
            old.unlink()
        directory.mkdir(parents=True, exist_ok=True)
        new.write(directory)
    files = {f.name: f.read_bytes() for f in directory.glob("*") if f.is_file()}
    changes = list(diff(Bundle(files=files), new))
    assert files == dict(new.files), "\n".join(["run `make goldens` and review:", *changes])


@pytest.mark.parametrize("name", NEAREST)
def test_differences_are_the_reviewed_ones(name: str, request: pytest.FixtureRequest) -> None:
    file = GOLDENS / f"{name}.diff"
    if request.config.getoption("--update-goldens"):
        file.write_bytes(difference(name))
    assert file.read_bytes() == difference(name), "run `make goldens` and review"


def test_the_script_of_an_array(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    file, script = GOLDENS / ARRAY, rendered(TRN1).files["train.sbatch"]
    array = render_array(script, "gpt2_zero1", "train", tasks=4, at_most=2)
    if request.config.getoption("--update-goldens"):
        file.write_bytes(array)
    assert file.read_bytes() == array, "run `make goldens` and review"
    (tmp_path / ARRAY).write_bytes(array)
    assert run_process(["shellcheck", ARRAY], cwd=tmp_path).out == ""


@pytest.mark.parametrize("name", ["own-roles-p4d-2-nodes", "own-stage-p4d-2-nodes", TRN1])
def test_a_written_bundle_is_read_back_whole(name: str, tmp_path: Path) -> None:
    bundle = rendered(name)
    bundle.write(tmp_path)
    assert read_bundle(tmp_path).files == bundle.files


def test_every_golden_has_its_case() -> None:
    names = [*WHOLE, *(f"{name}.diff" for name in NEAREST), ARRAY]
    assert sorted(path.name for path in GOLDENS.iterdir()) == sorted(names)
    assert len(WHOLE) == 6


@pytest.mark.parametrize("name", [*CASES, *DATA_CASES])
def test_scripts_are_clean_shell(name: str, tmp_path: Path) -> None:
    scripts = [f for f in rendered(name).files if f.endswith((".sh", ".sbatch"))]
    scripts = [file for file in scripts if not file.startswith("code/")]
    assert len(scripts) >= 2
    for script in scripts:
        (tmp_path / script).parent.mkdir(exist_ok=True)
        (tmp_path / script).write_bytes(rendered(name).files[script])
        subprocess.run(["bash", "-n", script], cwd=tmp_path, check=True, timeout=600)
    done = run_process(["shellcheck", *DATA_NOT_CODE, *scripts], cwd=tmp_path)
    assert done.code == 0, done.out


def test_a_batch_script_is_one_page() -> None:
    for phase in ("precompile", "train"):
        lines = rendered("trn1-2-nodes").files[f"{phase}.sbatch"].decode().splitlines()
        assert len(lines) <= 132
        assert lines[-1].endswith(f"bash node.sh {phase}")


def test_shellcheck_sees_an_unquoted_value(tmp_path: Path) -> None:
    """The check above is worth something: it refuses a script that was quoted badly."""
    script = tmp_path / "bad.sh"
    script.write_text("#!/bin/bash\ncd $1\n")
    done = subprocess.run(
        ["shellcheck", str(script)], capture_output=True, timeout=600, check=False
    )
    assert done.returncode != 0


def test_same_bytes_in_two_processes_and_directories(tmp_path: Path) -> None:
    sums = []
    for seed in ("1", "2"):
        where = tmp_path / seed
        where.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "trnslurm", "render", "gpt2_zero1", "--nodes", "2"]
        command += ["--cluster", "trn1", "-o", "bundle"]
        subprocess.run(
            command, cwd=where, env=environment, check=True, timeout=600, stdout=subprocess.DEVNULL
        )
        files = sorted(f for f in (where / "bundle").rglob("*") if f.is_file())
        assert len(files) > 10
        sums.append(
            {str(f.relative_to(where)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
        )
    assert sums[0] == sums[1]


def test_nothing_of_this_machine_or_user_is_in_the_bytes() -> None:
    words = "|".join(map(re.escape, (os.uname().nodename, str(Path.home()), str(ROOT))))
    for name, data in reviewed_part(rendered("trn1-2-nodes")).files.items():
        assert not re.search(rf"(?<!\w)({words})(?!\w)", data.decode()), name


def test_values_reach_the_shell_unchanged() -> None:
    """The environment block of the hardest case, run by a real shell."""
    script = rendered("every-option").files["train.sbatch"].decode()
    line = next(li for li in script.splitlines() if li.startswith("export GREETING="))
    done = run_process(["bash", "-c", f'{line}\nprintf %s "$GREETING"'])
    assert done.ok == 'it\'s $HOME; `true` "x"'
