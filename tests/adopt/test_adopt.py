"""The command that adopt reads from a batch script, and the lines that it does not understand."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest

from trnslurm.adopt.adopt import adopt
from trnslurm.errors import ConfigError

HOME = {"HOME": "/home/ada", "USER": "ada", "SCRATCH": "/scratch/ada", "MODULESHOME": "modules"}
HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:8 --time=60\n"
SIZE = "--nodes 2 --gpus 8 --time 60"
ADDRESS = """
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head=${nodes[0]}
export MASTER_ADDR=$(srun --nodes=1 -w "$head" hostname --ip-address) MASTER_PORT=29500
echo $MASTER_ADDR; nvidia-smi | head -3
"""
TORCHRUN = "torchrun --nnodes $SLURM_NNODES --nproc_per_node=8 --rdzv_endpoint $MASTER_ADDR:1"


def adopted(text: str, *arguments: str, head: str = HEAD):
    Path("job.sbatch").write_text(head + text)
    return adopt(Path("job.sbatch"), arguments, HOME)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "modules/init/bash"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{ADDRESS}srun {TORCHRUN} train.py --lr 1",
         "--workers 8 -- torchrun train.py --lr 1"),
        ("export NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=0,1\nLR=1e-4\nARGS=\"--lr $LR --name 'x'\"\n"
         "srun python -u train.py $ARGS --dir runs/$SLURM_JOB_ID",
         "--per node --set env.NCCL_DEBUG=INFO -- python -u train.py --lr 1e-4 --name "
         "''\"'\"'x'\"'\"'' --dir 'runs/{run_id}'"),
        ("srun --ntasks-per-node=8 python train.py",
         "--launcher srun --workers 8 -- python train.py"),
        ("module load cuda/12\nsource ~/venv/bin/activate\ncd $SLURM_SUBMIT_DIR\n"
         "srun --cpu-bind=none bash -c \"torchrun --nnodes 2 --node_rank \\$SLURM_PROCID train.py\""
         " | tee x",
         "--workers 1 --set 'activate=[source modules/init/bash, module load cuda/12, "
         "source ~/venv/bin/activate]' "
         "--set python=/home/ada/venv/bin/python -- torchrun train.py"),
        ("WORDS=(train.py --lr 1)\nWORDS+=(--data $SCRATCH/x)\n"
         "OMP_NUM_THREADS=4 srun accelerate launch --num_machines $SLURM_NNODES "
         "--num_processes 16 \"${WORDS[@]}\"",
         "--set env.OMP_NUM_THREADS=4 --workers 8 -- accelerate launch train.py --lr 1 "
         "--data \"${SCRATCH}\"/x"),
        ("N=${N:-3}; if [ $N -gt 2 ]; then M=big; else M=small; fi\n"
         "srun torchrun --nnodes=2 train.py $M ${1:-no}",
         "--workers 1 -- torchrun train.py big no"),
        ("A=0; X=\"\"; [ $A = 1 ] && export B=1\n[ -n \"$X\" ] && A=9 || A=2\n"
         "if [ -n \"${SLURM_JOB_ID:-}\" ]; then C=1; fi\n"
         "true || python other.py\nsrun python train.py $A $C",
         "--per node -- python train.py 2 1"),
        ("srun /sw/env/bin/torchrun --nnodes=2 --nproc_per_node=4 train.py",
         "--workers 4 --set python=/sw/env/bin/python -- /sw/env/bin/torchrun train.py"),
    ],
)  # fmt: skip
def test_the_command(text: str, line: str) -> None:
    found = adopted(text)
    assert [(line.number, line.text, line.becomes) for line in found.unclear] == []
    assert found.line == f"trnslurm submit {SIZE} {line}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "python prepare.py\nsrun python train.py",
            "a command before the one that trains",
        ),
        (
            "srun torchrun --nnodes 2 a.py\nsrun torchrun --nnodes 2 b.py",
            "a second command, after that of line 3",
        ),
        ("for i in 1 2; do srun torchrun train.py $i; done", "a condition, loop or function"),
        (
            "X=1\nwhile read a; do X=$a; done < f\nsrun python train.py $X",
            "X is known only in the job",
        ),
        (
            "srun --ntasks-per-node=8 torchrun train.py",
            "8 tasks on a node would start torchrun 8 times",
        ),
        ("srun -N1 torchrun train.py", "srun --nodes=1 runs on a part of the nodes"),
        ("srun --multi-prog x.conf", "srun: --multi-prog changes what runs where"),
        ("cp -r data $TMPDIR\nsrun torchrun train.py", "a command that trnslurm does not know"),
        ("cat << EOF > c.json\n{}\nEOF\nsrun torchrun train.py", "a here-document"),
        ("srun torchrun train.py", "each node would train alone"),
        ("torchrun --nnodes 2 train.py", "without srun it runs on the first node only"),
        ("module load pytorch\nsrun python train.py", "may bring the Python"),
        ("eval $(x)\nsrun python train.py", "what eval runs is known only in the job"),
        ("cd src\nsrun python train.py ../data", "names files above its directory"),
        ("./prepare.sh\npython train.py", "without srun"),
        ("source /x/setup.sh\nsrun python train.py", "may bring the Python"),
        ("grep x y && A=1\nsrun python train.py $A", "only the job knows whether it runs"),
        ("exit 0\nsrun python train.py", "the script ends here"),
        ("case $A in\na) B=1;;\nb) B=2;;\nesac\nsrun python train.py $B", "B is known only"),
        ("srun --gpus-per-task=1 --ntasks-per-node=8 python train.py", "would see one GPU"),
        ("python setup.py develop\nsrun python train.py", "a command before the one that trains"),
        ("export API_KEY=$(cat key)\nsrun torchrun train.py", "a secret: keep it in a file"),
        ("export PYTHONPATH=/other\nsrun torchrun train.py", "the job has a PYTHONPATH of its own"),
        ("srun pip install x", "no command that trains"),
        ("mpirun -np 16 python train.py", "a command that trnslurm does not know"),
    ],
)
def test_what_is_not_understood(text: str, why: str) -> None:
    assert any(why in line.becomes for line in adopted(text).unclear)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("-N 2 -n 16 --gres=gpu:8 -c 4 --mem=0 --exclusive",
         "--nodes 2 --set slurm.gpus_per_node=8 --set slurm.cpus_per_task=32 "
         "--set slurm.mem_per_node_mib=0 --set slurm.exclusive=true --launcher srun --workers 8"),
        ("-N 1 -c 8 --mem=32G -p gpu -J a/b --mail-type=END -o log",
         "--nodes 1 --cpus 8 --mem 32G --set slurm.partition=gpu --name a-b "
         "--sbatch=--mail-type=END --per node"),
        ("-N 1 --array=0-3%2 -t 1:00", "--nodes 1 --sweep places.task=0,1,2,3 --at-most 2 "
                                       "--time 1:00 --set slurm.exclusive=false --per node"),
    ],
)  # fmt: skip
def test_the_size_of_the_job(options: str, line: str) -> None:
    task = " $SLURM_ARRAY_TASK_ID" if "array" in options else ""
    found = adopted(f"srun python train.py{task}", head=f"#!/bin/bash\n#SBATCH {options}\n")
    words = "python train.py '{task}'" if task else "python train.py"
    assert found.line == f"trnslurm submit {line} -- {words}"


def test_a_recipe_is_written(site, cli, stable) -> None:
    Path("train.py").touch()
    Path("job.sbatch").write_text(
        HEAD + "export A=1\nsrun torchrun --nnodes 2 train.py --lr 1e-4\ncp a b\n"
    )
    done = cli("adopt", "job.sbatch", "--recipe", "mine")
    assert done.code == 0
    command = re.findall(r"then: trnslurm (.*)", done.err)[0].split()
    shown = cli("render", *command[1:], "--cluster", "p4d").out
    assert "train.py --lr 1e-4" in shown and "export A=1" in shown
    assert "#SBATCH --nodes=2" in shown and "#SBATCH --time=01:00:00" in shown
    assert cli("adopt", "job.sbatch", "--recipe", "mine").error.endswith("or pass --force")
    stable.json("adopt", json.loads(cli("adopt", "job.sbatch", "--json").out))
    Path("job.sbatch").write_text(HEAD + "srun torchrun --nnodes 2 train.py\nfoo\n")
    refused = cli("adopt", "job.sbatch", "--recipe", "other").error
    assert refused.endswith("lines 4 were not understood: --force writes the recipe without them")


def test_what_a_recipe_cannot_have_is_in_the_command(site, cli) -> None:
    Path("job.sbatch").write_text(HEAD + "source /x/venv/bin/activate\nsrun python train.py\n")
    Path("train.py").touch()
    done = cli("adopt", "job.sbatch", "--recipe", "mine")
    [command] = re.findall(r"then: trnslurm (.*)", done.err)
    words = (
        "--set",
        "activate=[source /x/venv/bin/activate]",
        "--set",
        "python=/x/venv/bin/python",
    )
    assert shlex.split(command)[-4:] == [*words]
    shown = cli("render", *shlex.split(command)[1:], "--cluster", "p4d")
    assert shown.code == 0 and "export TRNSLURM_PYTHON=/x/venv/bin/python" in shown.out


@pytest.mark.parametrize(
    "text",
    ["A=aa\n" + "A=$A$A\n" * 50, "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 30,
     "A=99999\n" + "A=$((A*A))\n" * 40, "if [ 1 = 1 ]; then " * 50 + "echo\n" + "; fi" * 50,
     "A=$((" + "(" * 500 + "1" + ")" * 500 + "))", "A=" + "${A:-" * 2000 + "x" + "}" * 2000,
     "source /a\0b/bin/activate", f"source {'a' * 5000}/bin/activate", 'source "x', "case x in",
     "python -c \"print('\\d', 1if 1else 2)\"", "a" * 200_000, "cat <<", "$(", "))))", "[[ a"],
)  # fmt: skip
def test_any_text_is_read_within_a_budget(text: str) -> None:
    """At worst with one clear error."""
    with suppress(ConfigError):
        assert adopted(f"{text}\nsrun python train.py $A").lines


def test_options_beside_ours(site, cli) -> None:
    Path("train.py").touch()
    Path("job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --qos=high\n")
    words = ("--cluster", "p4d", "--nodes", "2", "--time", "60", "--diff", "job.sbatch")
    done = cli("render", "./train.py", *words)
    lines = done.out.splitlines()
    assert done.code == 1 and "  --nodes=2" in lines
    assert [line.split()[:2] for line in lines if "qos" in line] == [["-", "--qos=high"]]
    assert any(line.startswith("+ --exclusive ") for line in lines)
