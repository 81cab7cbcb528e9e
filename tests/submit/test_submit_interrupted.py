"""Ctrl-C and damage at awkward moments: no unknown job, nothing half-made, no result lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import trnslurm
from trnslurm.records.run import RunDir
from trnslurm.runs.status import run_status
from trnslurm.submission import cancel, submit

from ..waiting import eventually

CHECKOUT = Path(trnslurm.__file__).parent.parent
GPT2 = ("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2")


@pytest.mark.parametrize("at", [1, 2])
def test_ctrl_c_while_sbatch_is_asked_leaves_no_job(
    site, fake_slurm, tmp_path: Path, at: int
) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sbatch").write_text(
        '#!/bin/bash\n[ "$1" != --test-only ] || exit 0\n'
        f"echo >> {slow}/calls\n"
        f'if [ "$(wc -l < {slow}/calls)" -eq {at} ]; then\n'
        f"  touch {slow}/asked; until [ -e {slow}/go ]; do sleep 0.02; done\n"
        'fi\nPATH=${PATH#*:} exec "$FAKE_SBATCH" "$@"\n'
    )
    (slow / "sbatch").chmod(0o755)
    real = next(d for d in os.environ["PATH"].split(":") if (Path(d) / "sbatch").exists())
    environment = os.environ | {"FAKE_SBATCH": f"{real}/sbatch", "PYTHONPATH": str(CHECKOUT)}
    environment["PATH"] = f"{slow}:{os.environ['PATH']}"
    with subprocess.Popen(
        [sys.executable, "-m", "trnslurm", *GPT2], env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        eventually((slow / "asked").exists)
        os.killpg(process.pid, signal.SIGINT)
        (slow / "go").touch()
        _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "error: interrupted"
    run = site.run()
    assert run.record().refused == "interrupted"
    assert run_status(run).state == "FAILED"
    (cancelled,) = fake_slurm.calls("scancel")
    assert sorted(cancelled.arguments) == [str(1000 + n) for n in range(1, at + 1)]


def test_interrupted_before_it_was_recorded_leaves_nothing(site, fake_slurm, cli, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "new_record", interrupt)
    assert cli(*GPT2).code == 130
    assert site.runs() == []
    assert fake_slurm.calls("sbatch") == []


def test_interrupted_between_a_directory_and_its_record_leaves_nothing(
    site, fake_slurm, cli, monkeypatch
) -> None:
    create_run = submit.create_run

    def create(*arguments: object, **values: object) -> RunDir:
        run = create_run(*arguments, **values)
        os.kill(os.getpid(), signal.SIGINT)
        return run

    monkeypatch.setattr(submit, "create_run", create)
    assert cli(*GPT2).code == 130
    assert [*site.run_root.iterdir()] == []
    assert fake_slurm.calls("sbatch") == []


def test_ctrl_c_while_it_imports_is_one_line(run_cli, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    done = run_cli("runs", environ={"PYTHONPATH": f"{tmp_path}:{CHECKOUT}"})
    assert (done.code, done.error) == (130, "interrupted")


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_full_disk_is_one_line_and_leaves_nothing(site, fake_slurm, cli, monkeypatch) -> None:
    monkeypatch.setattr(RunDir, "write_record", full)
    done = cli(*GPT2)
    assert done.code == 1
    assert "(No space left on device)" in done.err.splitlines()[-1]
    assert site.runs() == []


def test_cancel_works_on_a_full_disk(site, fake_slurm, cli, monkeypatch) -> None:
    assert cli(*GPT2).code == 0
    monkeypatch.setattr(cancel, "write_json", full)
    assert cli("cancel", "last").code == 0
    assert sorted(fake_slurm.calls("scancel")[0].arguments) == ["1001", "1002"]


def test_cancel_goes_on_while_an_early_phase_runs(site, fake_slurm, cli, monkeypatch) -> None:
    """The second phase was refused, and the first could not be cancelled at that moment."""
    fake_slurm.refuse("sbatch-2", "sbatch: error: Invalid partition name specified")
    fake_slurm.refuse("scancel", "scancel: error: Unable to contact slurm controller")
    assert cli(*GPT2).code == 1
    fake_slurm.relent("scancel")
    fake_slurm.queue("1001|RUNNING|None|x|node-[1-2]")
    fake_slurm.forget_calls()
    assert cli("cancel", "last").code == 0
    assert fake_slurm.calls("scancel")[0].arguments == ["1001"]


def test_force_never_replaces_results(site, cli) -> None:
    render = ("render", "gpt2_zero1", "--cluster", "pc", "-o", "bundle")
    assert cli(*render).code == 0
    assert cli(*render).code == 1
    assert cli(*render, "--force").code == 0
    Path("bundle/state/train-1.json").write_text("{}")
    done = cli(*render, "--force")
    assert done.code == 1
    assert done.error == "bundle contains the results of a run: choose another name"
    assert Path("bundle/state/train-1.json").exists()


def damage(name: str, change: object) -> None:
    file = Path("bundle") / name
    if change is None:
        file.unlink()
    elif isinstance(change, dict):
        tree = yaml.safe_load(file.read_text())
        for key, value in change.items():
            (tree["config"] if key in tree["config"] else tree)[key] = value
        file.write_text(yaml.safe_dump(tree))
    else:
        file.write_text(str(change), errors="surrogatepass")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("code/jobs/gpt2_zero1/train.py", None, "missing code/jobs/gpt2_zero1/train.py"),
        ("plan.json", "{", "missing or damaged"),
        ("plan.json", "[]", "missing or damaged"),
        ("config.yaml", None, "missing or damaged"),
        ("config.yaml", "- 1\n", "config.yaml"),
        ("config.yaml", "a: [", "config.yaml"),
        ("config.yaml", "config: 3\n", "config.yaml"),
        ("config.yaml", "\ud8ff", "config.yaml"),
        ("config.yaml", {"nodes": 7}, "plan.json is for 2 nodes, but config.yaml is for 7"),
        ("config.yaml", {"name": "../../evil"}, "job name '../../evil'"),
        ("config.yaml", {"run_root": 5}, "run_root must be a string, found 5"),
        ("config.yaml", {"ask_above_node_hours": "abc"}, "must be a number, found 'abc'"),
    ],
)
def test_damaged_bundle_is_refused(site, fake_slurm, cli, name, change, words) -> None:
    assert cli("render", "gpt2_zero1", "--cluster", "pc", "--nodes", "2", "-o", "bundle").code == 0
    damage(name, change)
    done = cli("submit", "--rendered", "bundle")
    assert done.code == 1
    assert words in done.error
    assert fake_slurm.calls("sbatch") == []
    assert site.runs() == []


def test_script_that_leaves_early_has_failed(site, run_cli) -> None:
    """A sourced site file may say `exit 0`; training must not be released by that."""
    site.profile(
        "here", scheduler="local", instance_type="local", device="cpu", workers_per_node=1,
        python=sys.executable, activate=["exit 0"], slurm={},
    )  # fmt: skip
    site.recipe("batch: {global_batch: 8}\nprecompile: never\n")
    done = run_cli("submit", "toy", "--cluster", "here", "--nodes", "2")
    assert done.code == 1
    status = run_status(site.run())
    assert (status.state, status.reason) == (
        "FAILED", "exit code 1 while setting up the environment",
    )  # fmt: skip


def test_a_silent_controller_does_not_end_a_run(site, fake_slurm, cli) -> None:
    """A script that has just started has no heartbeat yet."""
    assert cli(*GPT2).code == 0
    run = site.run()
    (run.state / "precompile-1.json").write_text("")
    fake_slurm.refuse("squeue", "squeue: error: Unable to contact slurm controller")
    status = run_status(run)
    assert status.state == "PRECOMPILING"
    assert "Unable to contact" in status.reason
