"""submit on Slurm: what is handed to sbatch, and what a run directory holds afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path

from trnslurm.records.run import RunDir

TRIED = ("test-only", "test-only", "scontrol")
GPT2 = ("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_two_phases_are_submitted_and_reported(site, fake_slurm, run_cli) -> None:
    done = run_cli(*GPT2)
    run = site.run()
    assert done.code == 0, done.err
    assert done.out == (
        f"Submitted {run.name}  precompile 1001  train 1002\nSee: trnslurm status {run.name}\n"
    )
    assert [c.command for c in fake_slurm.calls()] == [*TRIED, "sbatch", "sbatch"]
    assert run.record().jobs == {"precompile": "1001", "train": "1002"}
    assert run_cli("status", "last").out.startswith(f"{run.name}: PENDING (precompile: ")


def test_rendered_recorded_and_submitted_bytes_are_the_same(site, fake_slurm, cli, stable) -> None:
    rendered = site.root / "rendered"
    assert cli("render", *GPT2[1:], "-o", rendered).code == 0
    said = json.loads(cli(*GPT2, "--json").out)
    stable.json("submit", said, free=["jobs"])
    run = site.run()
    jobs = {"precompile": "1001", "train": "1002"}
    assert said == {"run": run.name, "directory": str(run.path), "jobs": jobs}
    sha256 = run.record().sha256
    for call, phase in zip(fake_slurm.calls("sbatch"), ("precompile", "train"), strict=True):
        name = f"{phase}.sbatch"
        assert call.script == (run.path / name).read_bytes() == (rendered / name).read_bytes()
        assert sha256[name] == digest(call.script)
    for name, checksum in sha256.items():
        assert digest((run.path / name).read_bytes()) == checksum, name
        assert digest((rendered / name).read_bytes()) == checksum, name


def test_the_shells_own_slurm_variables_do_not_reach_sbatch(
    site, fake_slurm, cli, monkeypatch
) -> None:
    overriding = ("SBATCH_TIMELIMIT", "SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_CPU_BIND",
                  "SLURM_MEM_PER_NODE", "SRUN_CPUS_PER_TASK", "SQUEUE_FORMAT")  # fmt: skip
    for name in overriding:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_CONF", "/shared/slurm.conf")
    assert cli(*GPT2).code == 0
    assert cli("status", "last").code == 0
    calls = fake_slurm.calls()
    assert [c.command for c in calls] == [*TRIED, "sbatch", "sbatch", "squeue"]
    for call in calls:
        assert not set(overriding) & set(call.environ)
        assert call.environ["SLURM_CONF"] == "/shared/slurm.conf"
        assert call.environ["HOME"] == os.environ["HOME"]


def test_nothing_of_submitit_is_left(site, fake_slurm, cli, monkeypatch, tmp_path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    assert cli(*GPT2).code == 0
    assert list(scratch.iterdir()) == []
    names = {f.name for f in site.run().path.iterdir()}
    assert names - {"git.patch"} == {
        "code", "config.yaml", "graphs.json", "logs", "node.sh", "plan.json",
        "precompile.sbatch", "run.json",
        "state", "train.sbatch",
    }  # fmt: skip
    leftovers = [f for f in site.run().path.rglob("*") if "submi" in f.name or f.suffix == ".pkl"]
    assert leftovers == []


def test_the_source_is_recorded_down_to_uncommitted_changes(site, fake_slurm, cli) -> None:
    site.recipe()
    author = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", site.root, *words], check=True, timeout=180)
    site.write("jobs/toy/train.py", "print('not committed')\n")
    assert cli("submit", "toy", "--cluster", "pc").code == 0
    run = site.run()
    assert run.record().git["dirty"] is True
    assert len(run.record().git["commit"]) == 40
    assert "+print('not committed')" in run.patch_file.read_text()


def test_two_runs_in_one_second_get_two_directories(site, fake_slurm, cli, monkeypatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-000000")
    assert cli(*GPT2).code == 0
    assert cli(*GPT2).code == 0
    assert [r.name for r in site.runs()] == [
        "20260101-000000-gpt2_zero1", "20260101-000000-gpt2_zero1-2",
    ]  # fmt: skip


def test_last_is_the_newest_in_any_time_zone(site, fake_slurm, cli, monkeypatch) -> None:
    try:
        for name, zone in (("first", "EAST-12"), ("second", "WEST+12")):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert cli(*GPT2, "--name", name).code == 0
        assert cli("status", "last").out.partition(":")[0].endswith("-second")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_user_without_a_name_or_a_home(site, fake_slurm, cli, monkeypatch) -> None:
    """As in a container that runs under any number."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert cli(*GPT2).code == 0
    assert site.run().record().user == str(os.getuid())
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name)
    assert cli("runs").error == "this user has no home directory: set HOME"


def test_every_path_may_have_a_weird_name(site, fake_slurm, cli, weird_path: Path) -> None:
    site.run_root = weird_path / "runs"
    site.profile(python=f"{weird_path}/bin/python")
    assert cli(*GPT2, "--set", f"data.path={weird_path}/text").code == 0
    run = site.run()
    for call, phase in zip(fake_slurm.calls("sbatch"), ("precompile", "train"), strict=True):
        assert call.cwd == run.path
        assert call.script == run.script(phase).read_bytes()
        subprocess.run(["bash", "-n", run.script(phase)], check=True, timeout=180)
    assert json.loads(run.plan_file.read_text())["data"] == f"{weird_path}/text"
    assert cli("status", run.path).out.startswith(f"{run.name}: PENDING")


def test_bytes_do_not_depend_on_the_shells_locale(site, fake_slurm, run_cli) -> None:
    site.profile(python="/shared/wëird/python")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_cli(*GPT2, environ=ascii_only)
    assert done.code == 0, done.err
    for call, phase in zip(fake_slurm.calls("sbatch"), ("precompile", "train"), strict=True):
        assert call.script == site.run().script(phase).read_bytes()


def test_run_is_found_again_although_its_root_was_set_by_hand(
    site, fake_slurm, cli, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    assert cli(*GPT2, "--set", f"run_root={elsewhere}").code == 0
    (directory,) = elsewhere.iterdir()
    assert RunDir(directory).record().user
    assert cli("status", "last").out.startswith(f"{directory.name}: PENDING")
