"""The command that adopt reads from a batch script, and the lines that it does not understand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
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
    Path("modules/init").mkdir(parents=True, exist_ok=True)
    Path("modules/init/bash").touch()
    return adopt(Path("job.sbatch"), arguments, HOME)


def rendered(cli, line: str):
    """Give a printed command, with the values of this shell, to render."""
    Path("train.py").touch()
    show = subprocess.run(["bash", "-c", f"printf '%s\\0' {line.partition(' submit ')[2]}"],
                          env=HOME, capture_output=True, check=True).stdout.decode()  # fmt: skip
    return cli("render", "--cluster", "p4d", *show.split("\0")[:-1])


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{ADDRESS}srun {TORCHRUN} train.py --lr 1",
         "--workers 8 -- torchrun train.py --lr 1"),
        ("export NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\nLR=1e-4\n"
         "ARGS=\"--lr $LR --name 'x'\"\nsrun python -u train.py $ARGS --dir runs/$SLURM_JOB_ID",
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
def test_the_command(text: str, line: str, site, cli) -> None:
    found = adopted(text)
    assert rendered(cli, found.line).code == 0
    assert [(line.number, line.text, line.becomes) for line in found.unclear] == []
    assert found.line == f"trnslurm submit {SIZE} {line}"


FULL = (
    "#!/bin/bash\n#SBATCH -J fit -A lab -p gpu -N 2 --ntasks-per-node=1 --gpus-per-node=4 -c 8\n"
    "#SBATCH -t 60\n"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Values: arguments, expansions, arithmetic and what commands print.
        ('args="${@}"\nsrun python train.py ${args} --n ${#} \\', "train.py a b c --n 2"),
        ('shift\nsrun python train.py "$@" ${1:+y}', "train.py 'b c' y"),
        ("set -- -x 1\nsrun python train.py $*", "train.py -x 1"),
        ("P=/d/cfg.v2.yaml\nsrun python train.py ${P##*/} ${P%.*} ${P/cfg/run} ${P:0:2} ${P^^}",
         "train.py cfg.v2.yaml /d/cfg.v2 /d/run.v2.yaml /d /D/CFG.V2.YAML"),
        ("A=(x 'y z')\nA+=(w)\nT=\"${A[*]}\"\n"
         "srun python train.py ${A[0]} ${#A[@]} \"$T\" \"${A[@]:1}\"",
         "train.py x 3 'x y z w' 'y z' w"),
        ("N=$(expr ${SLURM_NNODES} \\* 4)\nM=$(echo \"$N*2\" | bc)\nsrun python train.py $N $M "
         "$(basename /a/b.txt .txt) $((N > 4 && M != 3))", "train.py 8 16 b 1"),
        ("N=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)\nG=`nvidia-smi -L | wc -l`\n"
         "srun python train.py $((N * G))", "train.py 8"),
        ("hosts=($(scontrol show hostnames))\nmapfile -t more < <(scontrol show hostnames)\n"
         "srun python train.py ${#hosts[@]} ${#more[@]}", "train.py 2 2"),
        ("srun python train.py a=[1,2] b=[0]*3 c?", "train.py 'a=[1,2]' 'b=[0]*3' 'c?'"),
        # Slurm's variables, as far as the options set them.
        ("srun python train.py $SLURM_JOB_ACCOUNT $SLURM_JOB_NAME $SLURM_JOB_PARTITION "
         "$SLURM_CPUS_PER_TASK $SLURM_NTASKS $SLURM_TASKS_PER_NODE ${SLURM_GPUS:-none}",
         "train.py lab fit gpu 8 2 '1(x2)' none"),
        # Conditions, cases, loops and functions.
        ("K=b\ncase $K in\n  a) X=1 ;;\n  b|c*) X=2\n    ;;\n  *) exit 1 ;;\nesac\n"
         "srun python train.py $X", "train.py 2"),
        ("for s in 42; do\n  srun python train.py --seed $s >> out_$(date +%s).log\ndone",
         "train.py --seed 42"),
        ("for s in 1 2; do A=\"$A -s $s\"; done\nsrun python train.py $A", "train.py -s 1 -s 2"),
        ("fit() {\n  local lr=$1\n  srun python train.py --lr $lr $2\n}\nfit 3 x",
         "train.py --lr 3 x"),
        ("if [[ $SLURM_NNODES == 1 || -z $HOME ]]; then python train.py; "
         "elif (( SLURM_NNODES > 1 )); then srun python train.py m; fi", "train.py m"),
        ("CMD='python train.py --x'\neval srun $CMD 1", "train.py --x 1"),
        ("B=$PWD\ncd .\ncd $SLURM_SUBMIT_DIR\nsrun bash -c '[ $A = 1 ] && cd x; C=${A:-3}; "
         "[[ 1 == 1 && 2 == 2 ]] && python train.py $C'", "train.py 3"),
        ('shift 2\n{\n  srun python train.py "${@:1}"\n} >> out.log 2>&1', "train.py"),
        ("(cd data && ls)\n( srun python train.py )", "train.py"),
    ],
)  # fmt: skip
def test_what_the_file_tells(text: str, words: str, site, cli) -> None:
    found = adopted(text, "a", "b c", head=FULL)
    assert [(line.number, line.text, line.becomes) for line in found.unclear] == []
    assert found.line.endswith(f" --per node -- python {words}")
    assert rendered(cli, found.line).code == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # The number of workers is the job's GPUs, not its tasks.
        ("srun torchrun --nnodes=2 --nproc_per_node=$SLURM_GPUS_PER_NODE train.py "
         "$SLURM_GPUS_ON_NODE $SLURM_NTASKS $SLURM_NNODES",
         "--workers 4 -- torchrun train.py '{workers_per_node}' 2 '{nodes}'"),
        ("srun torchrun --nnodes=2 --nproc_per_node=${SLURM_GPUS_ON_NODE:-8} train.py",
         "--workers 4 -- torchrun train.py"),
        ("export L=\"python -u -m torch.distributed.run --nproc_per_node $((2 * 2)) --nnodes "
         "$SLURM_NNODES --rdzv_endpoint $H:1 --tee 3\"\nH=$(hostname)\n"
         "srun bash -c \"$L --node_rank \\$SLURM_PROCID --role \\$SLURMD_NODENAME: train.py\"",
         "--workers 4 -- python -u -m torch.distributed.run --tee 3 train.py"),
        ("srun --cpu_bind=v --accel-bind=gn --ntasks-per-node=4 python train.py",
         "--launcher srun --workers 4 -- python train.py"),
        ("srun --cpu-bind=v,mask_cpu:0x1 numactl --localalloc $(which python) train.py",
         "--per node -- python train.py"),
        ("mpirun -np 8 -bind-to none --map-by ppr:4:node -x A=1 -x PATH -mca pml ob1 "
         "python train.py",
         "--launcher srun --workers 4 --set env.A=1 -- python train.py"),
        ("pushd /x/$USER\nsource /sw/$USER/v/bin/activate\n"
         "srun python train.py\npopd",
         "--per node --set 'activate=[source /sw/$USER/v/bin/activate]' "
         "--set python=/sw/ada/v/bin/python -- python train.py"),
    ],
)  # fmt: skip
def test_what_starts_it(text: str, line: str, site, cli) -> None:
    found = adopted(text, head=FULL)
    size = (
        "--name fit --set slurm.account=lab --set slurm.partition=gpu --nodes 2 --gpus 4 --cpus 8"
    )
    go = 'cd /x/"${USER}" && ' if "pushd" in text else ""
    assert found.line == f"{go}trnslurm submit {size} --time 60 {line}"
    assert rendered(cli, found.line).code == 0


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("T=$(date +%F)\nsrun python train.py --out r_$T", "--out 'r_{run_id}'",
         "replaced with {run_id}"),
        ("srun python train.py --d $NO/x $MORE", '--d "${NO}"/x', "is empty: nothing sets it"),
        ("srun singularity run /x.sif python train.py", "train.py", "the image's runscript"),
        ("srun singularity_wrapper exec python train.py", "train.py", "able to start without"),
        ("export CUDA_VISIBLE_DEVICES=1,0\nsrun python train.py", "train.py", "in their order"),
        ("export WORLD_SIZE=99\nsrun python train.py", "--per node -- python train.py", "only t"),
        ("srun bash -c 'pip install -e . && python train.py'", "python train.py", "do it once"),
        ("srun python train.py $SLURM_GPUS", "train.py", "the file has no --gpus"),
    ],
)  # fmt: skip
def test_a_command_with_doubts(text: str, line: str, why: str, site, cli) -> None:
    found = adopted(text, head=FULL)
    assert found.line.endswith(line) or line in found.line
    assert any(why in each.becomes for each in found.unclear)
    assert rendered(cli, found.line).code == 0


def test_each_line_is_said_once_and_truly() -> None:
    found = adopted(
        "A=1\nA=2\nexport B=1\nexport B=2\nR=$(date)\nS=$(date)\nP=(a\n b)\ncat <<E > $S\n$P\nE\n"
        "srun python train.py $A > $R.log\n"
    )
    said = {line.number: (line.fate, line.becomes) for line in found.lines if line.number > 2}
    assert said[3] == said[4] == ("taken", "used in place of $A")
    assert said[5] == ("left out", "line 6 exports it again")
    assert said[7] == ("left out", "used only by lines that trnslurm replaces or leaves out")
    assert said[8] == ("unclear", "needed by line 11, which is not understood")


def test_values_name_the_directory_that_the_script_left() -> None:
    here = Path.cwd()
    found = adopted(
        "B=$PWD/b\ncd /x/y\nsrun python train.py $B $SLURM_SUBMIT_DIR/c $PWD/d", head=FULL
    )
    assert found.directory == "/x/y"
    assert found.command == ("python", "train.py", f"{here}/b", f"{here}/c", "./d")


def test_an_array_of_one_task_is_a_run() -> None:
    head = "#!/bin/bash\n#SBATCH -N 1 -t 60 --array=3 --gpus-per-task=a100:2 --mem-per-gpu=4G\n"
    found = adopted("srun python train.py $SLURM_ARRAY_TASK_ID", head=head)
    assert found.line == (
        "trnslurm submit --nodes 1 --time 60 --gpus a100:2 --mem 8192M --per node -- "
        "python train.py 3"
    )


@pytest.mark.parametrize(
    ("array", "text", "line"),
    [
        ("0-1", "A=(x y)\nB=${A[$SLURM_ARRAY_TASK_ID]}\npython train.py --a $B --out r/$B-1",
         "--sweep places.task_1=x,y -- python train.py --a '{task_1}' --out 'r/{task_1}-1'"),
        ("0-3%2", "A=(x y)\nI=$SLURM_ARRAY_TASK_ID\n"
         "python train.py a=${A[$((I / 2))]} b=$((I % 2))",
         "--sweep places.task_1=x,y --sweep places.task_2=0,1 --at-most 2 -- "
         "python train.py 'a={task_1}' 'b={task_2}'"),
        ("0-1", "A=(x y)\npython train.py ${A[$SLURM_ARRAY_TASK_ID]} $SLURM_ARRAY_TASK_ID", ""),
        ("0-1%1", "python train.py", ""),
    ],
)  # fmt: skip
def test_an_array_that_looks_up_its_values_is_a_sweep(array: str, text: str, line: str) -> None:
    found = adopted(text, head=f"#!/bin/bash\n#SBATCH -N 1 -t 60 --exclusive --array={array}\n")
    assert found.line.endswith(f"--per node {line}") if line else not found.command
    assert bool(found.unclear) is not bool(line)


def test_a_file_that_calls_sbatch_is_not_said_to_run(cli) -> None:
    Path("job.sh").write_text("#!/bin/bash\nA=1\nsbatch <<E\n#!/bin/bash\n#SBATCH -N 2\n$A\nE\n")
    found = json.loads(cli("adopt", "job.sh", "--json").out)
    assert found["as_it_is"] is None and found["command"] is None
    assert "adopt the file that it passes to sbatch" in found["lines"][1]["becomes"]
    assert "It has no #SBATCH lines." in cli("adopt", "job.sh").out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "python prepare.py\nsrun python train.py",
            "this command runs before the training command",
        ),
        (
            "srun torchrun --nnodes 2 a.py\nsrun torchrun --nnodes 2 b.py",
            "a second training command, after the command on line 3",
        ),
        (
            "for i in 1 2; do srun torchrun train.py $i; done",
            "a loop that could train several times: --sweep",
        ),
        (
            "X=1\nwhile read a; do X=$a; done < f\nsrun python train.py $X",
            "X is known only in the job",
        ),
        (
            "srun --ntasks-per-node=8 torchrun train.py",
            "8 tasks on a node would start torchrun 8 times",
        ),
        ("srun -N1 torchrun train.py", "srun --nodes=1 runs on only some"),
        ("srun --multi-prog x.conf", "srun: --multi-prog changes what runs where"),
        ("cp -r data $TMPDIR\nsrun torchrun train.py", "trnslurm does not know this command"),
        ("cat << EOF > c.json\n{}\nEOF\nsrun torchrun train.py", "a here-document"),
        ("srun torchrun train.py", "each node would train its own copy"),
        ("torchrun --nnodes 2 train.py", "without srun it runs only on the first node"),
        ("module load pytorch\nsrun python train.py", "may provide the Python"),
        ("eval $(x)\nsrun python train.py", "eval are known only in the job"),
        ("cd src\nsrun python train.py ../data", "refers to files above its directory"),
        ("./prepare.sh\npython train.py", "without srun"),
        ("source /x/setup.sh\nsrun python train.py", "may provide the Python"),
        ("grep x y && A=1\nsrun python train.py $A", "whether it runs is known only in the job"),
        ("exit 0\nsrun python train.py", "the script ends here"),
        ("case $A in\na) B=1;;\nb) B=2;;\nesac\nsrun python train.py $B", "B is known only"),
        ("srun --gpus-per-task=1 --ntasks-per-node=8 python train.py", "would see one GPU"),
        ("python setup.py develop\nsrun python train.py", "runs before the training command"),
        ("export API_KEY=$(cat key)\nsrun torchrun train.py", "a secret: keep it in a file"),
        ("export PYTHONPATH=/other\nsrun torchrun train.py", "the job has its own PYTHONPATH"),
        ("srun pip install x", "no training command was found"),
        ("srun shifter python train.py", "shifter is not a supported container runtime"),
        ("srun torchrun --nnodes 2 $(which tool) x", "$(which tool) is known only in the job"),
        ("srun -n 16 bash -c 'python train.py $SLURM_NTASKS'", "a different number of tasks"),
        ("srun python train.py $1", "$1 is an argument of the file: pass its value after --"),
        ("case $NONE in a) B=1;; esac\nsrun python train.py", "a case whose value is known only"),
        ("read X < file\nsrun python train.py $X", "its input is known only in the job"),
        ("mpirun --odd python train.py", "know the option -odd"),
        ("srun apptainer exec i.sif bash -c 'cd /in && python train.py'", "directory in the image"),
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
    command = re.findall(r"then run: trnslurm (.*)", done.err)[0].split()
    shown = cli("render", *command[1:], "--cluster", "p4d").out
    assert "train.py --lr 1e-4" in shown and "export A=1" in shown
    assert "#SBATCH --nodes=2" in shown and "#SBATCH --time=01:00:00" in shown
    assert cli("adopt", "job.sbatch", "--recipe", "mine").error.endswith("or pass --force")
    stable.json("adopt", json.loads(cli("adopt", "job.sbatch", "--json").out))
    Path("job.sbatch").write_text(HEAD + "srun torchrun --nnodes 2 train.py\nfoo\n")
    refused = cli("adopt", "job.sbatch", "--recipe", "other").error
    assert refused.endswith("4 were not understood: use --force to write the recipe without them")


def test_what_a_recipe_cannot_have_is_in_the_command(site, cli) -> None:
    Path("job.sbatch").write_text(HEAD + "source /x/venv/bin/activate\nsrun python train.py\n")
    Path("train.py").touch()
    done = cli("adopt", "job.sbatch", "--recipe", "mine")
    [command] = re.findall(r"then run: trnslurm (.*)", done.err)
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
     "python -c \"print('\\d', 1if 1else 2)\"", "a" * 200_000, "cat <<", "$(", "))))", "[[ a",
     "for x; do :; done", "for; do :; done", "f() { f; }; f", "bash -c 'f() { f; }; f'", 'A="a\\'],
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


def test_another_command_sets_no_variable_of_this_shell(site, cli) -> None:
    Path("train.py").touch()
    text = "export D=/data\n./prep.sh D=1\nsrun python train.py --d $D --size $1\n"
    Path("job.sbatch").write_text(HEAD + text)
    shown = cli("adopt", "job.sbatch", "--", "8").out
    assert "train.py --d /data --size 8\n" in shown
    assert "trnslurm submit job.sbatch -- 8\n" in shown
