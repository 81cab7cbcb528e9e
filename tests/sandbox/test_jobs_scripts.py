"""Custom scripts on a real Slurm: as they are, and with the contract's three calls."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trnslurm.contract.checkpoints import newest_step
from trnslurm.records.run import RunDir

from ..waiting import eventually
from .jobs import Run, User

pytestmark = pytest.mark.rest

PROJECT = Path(__file__).parents[1] / "project"
RANKS = """
import os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE SLURM_NODEID".split()
print("ranks", *(os.environ[name] for name in names), flush=True)
"""

# Says a step, and goes on when it is told to.
HOLD = """
import sys, time
from pathlib import Path
import trnslurm
number, place = int(sys.argv[1]), Path(sys.argv[2])
trnslurm.report(step=1, steps=1, loss=number)
while not (told := place / f"go-{number}").exists():
    time.sleep(0.05)
sys.exit(told.read_text() == "fail")
"""


@pytest.fixture
def project(user: User, tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    shutil.copytree(PROJECT, directory)
    return directory


def submit(user: User, script: Path, *words: str) -> Run:
    """Submit a script on two nodes; the sandbox's are CPUs, whatever they are named."""
    options = user.options(2, "device=cpu", "devices=[cpu]", "workers_per_node=2")
    return user._submit(str(script), *options, *words)


def test_every_worker_is_a_task_of_slurm(user: User, project: Path) -> None:
    (project / "ranks.py").write_text(RANKS)
    run = submit(user, project / "ranks.py", "--time", "10", "--launcher", "srun")
    run.until("COMPLETED")
    logs = "".join(run.logs("--node", node) for node in "01")
    found = sorted(line for line in logs.splitlines() if line.startswith("ranks "))
    assert found == ["ranks 0 0 4 2 0", "ranks 1 1 4 2 0", "ranks 2 0 4 2 1", "ranks 3 1 4 2 1"]


def test_a_program_that_is_no_python(user: User, project: Path) -> None:
    run = submit(user, project / "run.sh", "--time", "10", "--", "a b", "{workers}")
    run.until("COMPLETED")
    assert (run.path / "work/said-1.txt").read_text() == "node 1 of 2: a b 4\n"


BATCH = """#!/bin/bash
#SBATCH --job-name=mine
#SBATCH -N 2 --ntasks-per-node=2 -c 3
#SBATCH --time=20 --comment="a b"
#SBATCH --output=out-%j
export HERE=$PWD
env | grep "^SLURM" | cut -d= -f1 | sort > names
srun bash -c 'echo "rank $SLURM_PROCID of $SLURM_NTASKS, $MINE, $HERE"'
echo "once: $*"
"""
# What `scontrol show job` says of a job's size.
SIZE = ("NumNodes", "NumCPUs", "NumTasks", "CPUs/Task", "TRES", "NtasksPerN:B:S:C", "MinCPUsNode",
        "MinMemoryNode", "OverSubscribe", "TimeLimit", "Partition", "Features", "Comment",
        "TresPerNode", "Licenses", "Contiguous")  # fmt: skip


@pytest.mark.first
def test_a_batch_script_runs_as_by_sbatch(user: User, project: Path) -> None:
    """Once, with the same size and variables, and with srun in it."""
    show = ("scontrol", "show", "job", "-o")

    def size(job: str) -> dict[str, str]:
        """As Slurm shows it once the job has nodes, and before Slurm forgets the job."""

        def shown() -> dict[str, str] | None:
            text = user.sandbox.slurm(*show, job).ok
            facts = dict(word.split("=", 1) for word in text.split() if "=" in word)
            has_nodes = facts["JobState"] in ("RUNNING", "COMPLETING", "COMPLETED")
            return {key: facts[key] for key in SIZE if key in facts} if has_nodes else None

        return dict(eventually(shown))

    (file := project / "job.sbatch").write_text(BATCH)
    file.chmod(0o755)
    mine = replace(user, environ={**user.environ, "MINE": "a'b c"})
    words = ("--cluster", user.sandbox.cluster, "--set", f"run_root={user.run_root}")
    run = mine._submit(str(file), *words, "--", "one", "two  words")
    ours_size = size(run.jobs["train"])
    run.until("COMPLETED")
    log = run.logs("--node", "0")
    place = run.path / "work"
    ranks = sorted(line for line in log.splitlines() if line.startswith("rank "))
    assert ranks == [f"rank {n} of 4, a'b c, {place}" for n in range(4)]
    assert log.count("once: one two  words\n") == 1
    by_hand = mine.shell("sbatch --parsable -D . job.sbatch", project).split()[-1]
    assert ours_size == size(by_hand)
    eventually(lambda: not any(line.startswith(f"{by_hand} ") for line in user.sandbox.queue()))
    ours, theirs = ({*(d / "names").read_text().split()} for d in (place, project))
    assert ours == theirs


# Stands for HyperPod's plug-in for srun: after a task was killed, it runs the step a second time.
RESUMES = """#!/bin/bash
[ "$1" = --auto-resume=1 ] || exec "$SRUN" "$@"
"$SRUN" --kill-on-bad-exit=1 "${@:2}" || { echo "[Auto Resume] Retrying step"; "$SRUN" "${@:2}"; }
"""
# Takes samples from where it was, and is killed once between two of them.
TAKES = """
import os, signal
from pathlib import Path
mine = Path(f"taken-{os.environ['SLURM_PROCID']}")
taken = mine.read_text().split() if mine.exists() else []
for sample in range(len(taken), 6):
    with mine.open("a") as file:
        file.write(f"{sample} ")
    if sample == 2 and os.environ["SLURM_PROCID"] == "1" and not taken:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_batch_script_keeps_the_retries_of_its_own_srun(user: User, project: Path) -> None:
    """The step is run again inside of one attempt, and takes each sample once."""
    (srun := project / "bin/srun").parent.mkdir()
    srun.write_text(RESUMES)
    srun.chmod(0o755)
    (project / "takes.py").write_text(TAKES)
    (file := project / "resumes.sbatch").write_text(
        "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=1 --time=10\n"
        "export SRUN=$(command -v srun) PATH=$PWD/project/bin:$PATH\n"
        "srun --auto-resume=1 python3 project/takes.py\n"
    )
    words = ("--cluster", user.sandbox.cluster, "--set", f"run_root={user.run_root}")
    run = user._submit(str(file), *words)
    run.until("COMPLETED")
    assert run.logs("--node", "0").count("[Auto Resume]") == 1
    assert len(RunDir(run.path).attempts("train")) == 1
    taken = [(run.path / f"work/taken-{rank}").read_text().split() for rank in "01"]
    assert taken == [[*"012345"]] * 2


# As a script that never deletes what it saves; the last task stops in its loop.
SAVES = """
import os, sys, time, torch
rank = int(os.environ["SLURM_PROCID"])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
os.makedirs("out", exist_ok=True)
for step in range(1, 5):
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(whole, f"out/step-{step}.pt")
def stays():
    time.sleep(1000)
if rank == 3:
    stays()
time.sleep(1000)
"""


def test_a_batch_scripts_own_tasks_are_watched(user: User, project: Path) -> None:
    """A hang in what its srun has started is found, and older checkpoints go if wanted."""
    (project / "saves.py").write_text(SAVES)
    (file := project / "hangs.sbatch").write_text(
        "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=2 --time=10\n"
        f"srun {sys.executable} project/saves.py\n"
    )
    words = ("--cluster", user.sandbox.cluster, "--set", f"run_root={user.run_root}")
    run = user._submit(str(file), *words, "--set", "hang_minutes=0.25", "--set", "keep_last=2")
    run.until("FAILED")
    (attempt,) = RunDir(run.path).attempts("train")
    assert f"worker 3 (node 1, {attempt.hosts.split(',')[1]}) has made no" in attempt.reason
    assert "(stays), while 3 others are at saves.py:" in attempt.reason
    left = sorted(path.name for path in (run.path / "work/out").iterdir())
    assert left == ["step-3.pt", "step-4.pt"]


EVALUATES = """
import sys, torch, trnslurm
path, step = sys.argv[1:]
assert torch.load(path, weights_only=True)["step"] == int(step)
if step == "40":
    raise SystemExit("no")
trnslurm.report(step=int(step), accuracy=int(step) / 100)
"""


def test_a_job_follows_each_checkpoint(user: User, project: Path) -> None:
    """Also of a training that is killed and starts again, which a failed job does not harm.

    It ends once newer checkpoints are no better, and the best one stays.
    """
    (project / "evaluates.py").write_text(EVALUATES)
    batch = ("--set", "batch.global_batch=16", "--set", "batch.micro_batch=2")
    given = "--batch-size {micro_batch} --accum {accumulation} --resume {resume} --steps 3000"
    given += " --out {checkpoints} --pause 0.1"
    run = submit(user, project / "told.py", "--time", "30", *batch, "--", *given.split())
    follows = ("--each-checkpoint-of", run.path.name, "--every", "20", "--at-most", "2")
    follows += ("--lowest", "accuracy", "--patience", "2")
    options = user.options(1, "devices=[cpu]", "workers_per_node=1")
    words = (*options, *follows, "--time", "5", "--name", "eval", "--", "{checkpoint}", "{step}")
    user.trnslurm("submit", str(project / "evaluates.py"), *words)
    eventually(lambda: RunDir(run.path).last_metrics().get("step", 0) > 50)
    user.sandbox.fault("proc", "2", "told.py", "KILL")
    run.until("COMPLETED")
    assert len(RunDir(run.path).attempts("train")) == 2

    def own() -> dict[str, str]:
        facts = json.loads(user.trnslurm("status", f"{run.path.name}.eval", "--json"))["runs"]
        return {each["values"]["step"]: each["state"] for each in facts}

    eventually(lambda: {*own().values()} <= {"COMPLETED", "FAILED"})
    ends = own()
    assert [*map(int, ends)] == [*range(20, 20 * len(ends) + 1, 20)] and len(ends) >= 4
    assert [step for step, state in ends.items() if state == "FAILED"] == ["40"]
    told = run.status()
    assert told["reason"].startswith("ended early: eval/accuracy was best at step 20: 0.2; saved")
    (facts,) = told["followers"]
    last = 20 * len(ends)
    assert (facts["runs"], facts["step"], facts["problem"]) == (len(ends), last, "")
    assert facts["numbers"] == {"accuracy": last / 100}
    assert (facts["best"]["step"], facts["best"]["score"]) == (20, 0.2)
    assert Path(facts["best"]["checkpoint"]).exists()
    best = f"best: {run.path.name}.eval-20, accuracy 0.2000 with step=20"
    assert best in user.trnslurm("status", f"{run.path.name}.eval")
    found = {line["step"]: line["eval/accuracy"] for line in RunDir(run.path).steps()
             if "eval/accuracy" in line}  # fmt: skip
    assert found == {step: step / 100 for step in map(int, ends) if step != 40}


def test_each_task_of_a_job_array_is_a_run(user: User, project: Path) -> None:
    (file := project / "array.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --array=3,5-6%2 --time=10\n"
        "env | grep ^SLURM_ARRAY_TASK | sort\nsrun bash -c 'echo step $SLURM_ARRAY_TASK_ID'\n"
    )
    words = ("--cluster", user.sandbox.cluster, "--set", f"run_root={user.run_root}", "--json")
    found = json.loads(user.trnslurm("submit", str(file), *words))
    runs = [Run(user, Path(run["directory"]), run["jobs"]) for run in found]
    assert len({run.jobs["train"].partition("_")[0] for run in runs}) == 1
    for task, run in zip((3, 5, 6), runs, strict=True):
        run.until("COMPLETED")
        said = [f"{name}={value}" for name, value in zip(
            ("COUNT", "ID", "MAX", "MIN", "STEP"), (3, task, 6, 3, 1), strict=True)]  # fmt: skip
        log = run.logs("--node", "0")
        variables = [line for line in log.splitlines() if line.startswith("SLURM_ARRAY_TASK_")]
        assert variables == [f"SLURM_ARRAY_TASK_{word}" for word in said]
        assert f"\nstep {task}\n" in log


@pytest.mark.first
def test_a_script_that_keeps_the_contract_starts_again(user: User, project: Path) -> None:
    """It saves before it is requeued at its time limit. After a crash or a hang it starts again in
    its allocation, with what it saved.
    """
    hang = ("--set", "hang_minutes=0.15")
    batch = ("--set", "batch.global_batch=16", "--set", "batch.micro_batch=2")
    given = "--batch-size {micro_batch} --accum {accumulation} --resume {resume} --steps 100000"
    given += " --out {checkpoints} --pause 0.02"
    run = submit(user, project / "told.py", "--time", "30", *batch, *hang, "--", *given.split())
    directory = RunDir(run.path)

    def until_step(attempt: int) -> None:
        eventually(lambda: directory.last_metrics().get("attempt") == attempt)

    until_step(1)
    # What Slurm sends a while before the limit.
    user.sandbox.slurm("scancel", "--batch", "--signal=USR1", run.jobs["train"])
    until_step(2)
    first = directory.attempts("train")[0]
    saved = json.loads((run.path / "state/saved.json").read_text())
    assert first.state == "REQUEUED" and first.reason.startswith("time limit; saved step ")
    step = int(first.reason.rpartition(" ")[2])
    assert saved["step"] >= step > 0
    steps = {line["step"]: line["attempt"] for line in directory.steps()}
    assert steps[step] == 1 and steps[step + 1] == 2
    # A crash, once something newer is saved.
    eventually(lambda: newest_step(directory) > step)
    user.sandbox.fault("proc", "2", "told.py", "KILL")
    until_step(3)
    second = directory.attempts("train")[1]
    assert second.state == "RESTARTED" and " was saved" in second.reason
    # A hang, on a node that has had no other.
    frozen = directory.attempts("train")[2].hosts.split(",")[1]
    user.sandbox.fault("proc", frozen.rpartition("-")[2], "told.py", "STOP")
    until_step(4)
    third, fourth = directory.attempts("train")[2:]
    assert third.state == "RESTARTED" and f"worker 2 (node 1, {frozen}) has" in third.reason
    assert "its process is stopped (state T)" in third.reason
    assert fourth.hosts == third.hosts == second.hosts
    # The second hang of that node, which the next attempt leaves out.
    user.sandbox.fault("proc", frozen.rpartition("-")[2], "told.py", "STOP")
    until_step(5)
    fourth, fifth = directory.attempts("train")[3:]
    assert fourth.state == "REQUEUED" and frozen not in fifth.hosts.split(",")
    assert [a.restarts for a in directory.attempts("train")] == [0, 1, 1, 1, 2]
    user.trnslurm("cancel", str(run.path))
    run.until("CANCELLED")


# As nanoGPT: saves in place, tells nobody, and crashes twice.
UNTOLD = """
import argparse, os, time, torch
parser = argparse.ArgumentParser()
parser.add_argument("--init_from")
given = parser.parse_args()
torch.distributed.init_process_group("gloo")
model, first = torch.nn.Linear(4, 4), 0
optimizer = torch.optim.AdamW(model.parameters())
if given.init_from == "resume":
    whole = torch.load("out/ckpt.pt")
    model.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    first = whole["iter_num"]
print("began", given.init_from, first, flush=True)
os.makedirs("out", exist_ok=True)
for iter_num in range(first + 1, 31):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if iter_num % 10 == 0 and os.environ["RANK"] == "0":
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(whole | {"iter_num": iter_num}, "out/ckpt.pt")
    torch.distributed.barrier()
    if iter_num == first + 15:
        raise SystemExit(7)
"""


def test_a_script_continues_from_what_nobody_reported(user: User, project: Path) -> None:
    (project / "untold.py").write_text(UNTOLD)
    given = ("--", "--init_from={first:scratch}{later:resume}")
    run = submit(user, project / "untold.py", "--time", "10", *given)
    run.until("COMPLETED")
    *crashed, last = RunDir(run.path).attempts("train")
    assert [attempt.state for attempt in crashed] == ["RESTARTED"] * 2 and last.attempt == 3
    assert all("crash after a checkpoint was saved" in attempt.reason for attempt in crashed)
    began = re.findall(r"began (\w+) (\d+)", "".join(
        run.path.joinpath(f"logs/train-{n}-node0.log").read_text() for n in (1, 2, 3)
    ))  # fmt: skip
    assert [*dict.fromkeys(began)] == [("scratch", "0"), ("resume", "10"), ("resume", "20")]


def test_nodes_are_lost(user: User, project: Path) -> None:
    """A spare takes the place of the first; without the second, training has fewer nodes. Without
    the node of the batch script there are too few, and the other one requeues the job."""
    names = [user.sandbox.node_name(n) for n in (1, 2, 3, 4)]
    given = "--batch-size {micro_batch} --accum {accumulation} --resume {resume} --steps 100000"
    given += " --out {checkpoints} --pause 0.02"
    sets = ("device=cpu", "devices=[cpu]", "workers_per_node=1")
    sets += ("batch.global_batch=12", "batch.micro_batch=2")
    words = ("--nodes", "2-3", "--spares", "1", "--time", "30", "--", *given.split())
    run = user._submit(str(project / "told.py"), *user.options(3, *sets), *words)
    directory = RunDir(run.path)

    def until_step(attempt: int) -> None:
        eventually(lambda: directory.last_metrics().get("attempt") == attempt, said=run.story)
        eventually(lambda: newest_step(directory) > 10 * attempt, said=run.story)

    until_step(1)
    user.sandbox.fault("2", "power-off")
    until_step(2)
    user.sandbox.fault("3", "power-off")
    until_step(3)
    first, second, third = directory.attempts("train")
    assert first.hosts.split(",") == names[:3]
    assert first.state == "RESTARTED" and f"{names[1]} failed" in first.reason
    assert second.hosts.split(",") == [names[0], names[2], names[3]]
    assert second.state == "RESTARTED" and f"{names[2]} failed" in second.reason
    assert third.hosts.split(",") == [names[0], names[3]]
    assert {(a.job_id, a.restarts) for a in (first, second, third)} == {(first.job_id, 0)}
    kept = [line["step"] for line in directory.steps()]
    assert kept == list(range(1, max(kept) + 1))
    for node in ("2", "3"):
        user.sandbox.fault(node, "power-on")
    # Slurm would leave the job its other node until the time limit.
    user.sandbox.fault("1", "power-off")
    eventually(lambda: directory.attempts("train")[2].state == "REQUEUED")
    user.sandbox.fault("1", "power-on")

    # Slurm 22.05 may repeat a KILL meant for the steps that nodes 2 and 3 lost: it then ends a step
    # of the requeued job, whose number is the same.
    def again() -> bool:
        user.sandbox.resume_nodes()
        return int(directory.last_metrics()["attempt"]) >= 4

    eventually(again, said=run.story)
    reason = directory.attempts("train")[2].reason
    assert re.fullmatch(rf"crash after step \d+ was saved: {names[0]} failed", reason)
    assert directory.attempts("train")[3].restarts == 1
    user.trnslurm("cancel", str(run.path))
    run.until("CANCELLED")
    assert user.sandbox.processes_of(run) == []


def submit_sweep(user: User, script: Path, *words: str) -> list[Run]:
    """Submit a sweep over places.n."""
    options = user.options(1, "device=cpu", "devices=[cpu]", "workers_per_node=1")
    said = user.trnslurm("submit", str(script), *options, "--time", "10", "--json", *words)
    return [Run(user, Path(run["directory"]), run["jobs"]) for run in json.loads(said)]


def test_runs_of_a_sweep_take_turns(user: User, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    script = tmp_path / "project/hold.py"
    script.write_text(HOLD)
    sweep = ("--sweep", "places.n=1,2,3", "--at-most", "1", "--launcher", "python")
    runs = submit_sweep(user, script, *sweep, "--", "{n}", str(tmp_path))
    first, second, third = runs
    array = first.jobs["train"].removesuffix("_1")
    assert [run.jobs for run in runs] == [{"train": f"{array}_{task}"} for task in (1, 2, 3)]
    directory = RunDir(first.path)
    eventually(lambda: directory.last_metrics().get("attempt") == 1)
    assert second.phase("train")["reason"] == "waiting for the end of another run of the sweep"
    # One that fails makes room as well.
    (tmp_path / "go-1").write_text("fail")
    second.until("RUNNING")
    assert first.state == "FAILED" and third.state == "PENDING"
    user.trnslurm("cancel", str(third.path))
    (tmp_path / "go-2").write_text("")
    second.until("COMPLETED")
    group = first.path.name.removesuffix("-1")
    stands = json.loads(user.trnslurm("status", group, "--json"))
    assert [run["state"] for run in stands["runs"]] == ["FAILED", "COMPLETED", "CANCELLED"]
    assert stands["best"] == first.path.name and stands["next"].startswith("trnslurm resume")


def test_a_task_of_an_array_is_a_run_of_its_own(user: User, project: Path) -> None:
    """The last task has the number of the array, by which scontrol would requeue them all."""
    given = "--batch-size {micro_batch} --accum {accumulation} --resume {resume} --steps {n}"
    given += " --out {checkpoints} --pause 0.02"
    batch = ("--set", "batch.global_batch=12", "--set", "batch.micro_batch=2")
    sweep = ("--sweep", "places.n=2,3,100000", *batch)
    runs = submit_sweep(user, project / "told.py", *sweep, "--", *given.split())
    *short, last = runs
    directory = RunDir(last.path)
    eventually(lambda: newest_step(directory) > 0, said=last.story)
    for run in short:
        run.until("COMPLETED")
    assert last.job()["JobId"] == last.job()["ArrayJobId"] == last.jobs["train"].partition("_")[0]
    said = user.trnslurm("exec", str(last.path), "--", "printenv", "SLURM_JOB_ID")
    assert said.strip() == last.job()["JobId"]
    # What Slurm sends a while before the limit.
    user.sandbox.slurm("scancel", "--batch", "--signal=USR1", last.jobs["train"])
    eventually(lambda: directory.last_metrics().get("attempt") == 2, said=last.story)
    first, second = directory.attempts("train")
    assert first.state == "REQUEUED" and first.job_id == second.job_id == last.jobs["train"]
    assert (first.restarts, second.restarts) == (0, 1)
    # A crash starts the script again in the allocation, where it is the same task.
    user.sandbox.fault("proc", second.host.rpartition("-")[2], "told.py", "KILL")
    eventually(lambda: directory.last_metrics().get("attempt") == 3, said=last.story)
    assert directory.attempts("train")[2].job_id == last.jobs["train"]
    user.trnslurm("cancel", str(last.path))
    last.until("CANCELLED")
    user.trnslurm("resume", str(last.path))
    assert "_" not in directory.record().jobs["train"]
    eventually(lambda: directory.last_metrics().get("attempt") == 4, said=last.story)
    user.trnslurm("cancel", str(last.path), "--now")
    last.until("CANCELLED")
    assert [len(RunDir(run.path).attempts("train")) for run in runs] == [1, 1, 4]
    assert "JOB" in (last.path / f"logs/train-{last.jobs['train']}.log").read_text()
    eventually(lambda: not user.sandbox.queue())
    user.trnslurm("rm", "--yes", last.path.name.removesuffix("-3"))
    assert [*user.run_root.glob("[!.]*")] == []
