"""What reaches a job of the shell it is submitted from, and of odd directory names: nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ..processes import processes_with
from .jobs import SITE

pytestmark = pytest.mark.rest

SECRETS = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-K7MDENG", "HF_TOKEN": "hf_QxZkWvUtSrQpOnMl"}
# Each of these changes what plain sbatch and srun do, or what the job does.
SHELL = {
    "SBATCH_TIMELIMIT": "7", "SBATCH_JOB_NAME": "theirs", "SBATCH_PARTITION": "nonsense",
    "SBATCH_REQUEUE": "0", "SBATCH_EXPORT": "ALL", "SBATCH_OUTPUT": "theirs.log",
    "SBATCH_QOS": "nonsense", "SBATCH_EXCLUSIVE": "user", "SLURM_CPU_BIND": "map_cpu:99",
    "SLURM_MEM_PER_CPU": "1", "SLURM_NTASKS": "77", "SLURM_DISTRIBUTION": "plane=9",
    "SLURM_JOB_ID": "999999", "SLURM_EXPORT_ENV": "NONE", "SLURM_TIMELIMIT": "1",
    "SRUN_EXPORT_ENV": "NONE", "SQUEUE_FORMAT": "%j", "SLURM_TIME_FORMAT": "%s",
    "MASTER_ADDR": "192.0.2.1", "OMP_NUM_THREADS": "99", "BASH_ENV": "/theirs",
    "BASH_FUNC_srun%%": "() { exit 9; }", "LEAK": "leaked",
}  # fmt: skip
# What differs between any two jobs.
ITS_OWN = {
    "JobId", "SubmitTime", "EligibleTime", "AccrueTime", "StartTime", "EndTime", "LastSchedEval",
    "RunTime", "NodeList", "BatchHost", "Nodes", "Command", "WorkDir", "StdErr", "StdOut",
    "Priority", "Scheduler",
}  # fmt: skip


def files_with(words: list[str], *directories: Path) -> list[Path]:
    """The files below the directories that hold one of the words."""
    found = []
    walks = (walk for directory in directories for walk in os.walk(directory))
    for file in (Path(inside, name) for inside, _, names in walks for name in names):
        try:
            if file.is_file() and any(word.encode() in file.read_bytes() for word in words):
                found.append(file)
        except FileNotFoundError:  # Slurm removes what a job has left
            continue
    return found


@pytest.fixture
def two_runs(user, weird_path: Path):
    """The same submission from a plain shell, and from a full one between odd directories."""
    more = ("--name", "a_name-1.x")
    plain = user.submit("train.wait=true", more=more)
    user.home = weird_path
    user.site = weird_path / "work space"
    shutil.copytree(SITE, user.site)
    user.environ = SECRETS | SHELL
    return plain, user.submit("train.wait=true", more=more)


def test_nothing_of_the_shell_reaches_a_job(user, two_runs) -> None:
    plain, run = two_runs
    usual, found = (r.until_there(1)[0]["environment"] for r in two_runs)
    assert found.keys() == usual.keys()
    assert [name for name, value in (SECRETS | SHELL).items() if found.get(name) == value] == []
    differing = {key for key, value in run.job().items() if plain.job().get(key) != value}
    assert differing <= ITS_OWN
    assert run.job()["JobName"] == "a_name-1.x-train"

    # Neither now nor later is a secret written down or handed on.
    secrets = list(SECRETS.values())
    directories = (run.path, user.sandbox.path)
    assert processes_with(run.path.name) != [] != files_with([run.path.name], user.sandbox.path)
    assert not any(processes_with(secret) for secret in secrets)
    assert files_with(secrets, *directories) == []
    run.go()
    run.until("COMPLETED")
    assert files_with(secrets, *directories) == []
    assert "COMPLETED" in run.shown() and "node 0 of 1" in run.logs()

    # The control: to plain sbatch these variables are options.
    with pytest.raises(AssertionError, match=r"(?i)invalid (partition|qos)"):
        # 26.05 refuses that value before it looks at the others.
        user.shell("unset SBATCH_REQUEUE; sbatch --output=/dev/null --wrap=true", user.home)
