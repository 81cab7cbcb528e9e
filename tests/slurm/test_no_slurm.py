"""A host without Slurm, or with traces of it: what is planned, rendered and chosen there."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from trnslurm.slurm.commands import slurm_hint
from trnslurm.submission import choice


@pytest.fixture
def nothing_hints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "slurm_hint", lambda: slurm_hint(tmp_path / "root"))


def test_fixture_has_no_slurm(home) -> None:
    assert slurm_hint(Path("/nowhere")) == (None, False)


@pytest.mark.parametrize("trace", ["opt/slurm", "etc/slurm", "etc/slurm-llnl"])
def test_traces(home, tmp_path: Path, trace: str) -> None:
    assert slurm_hint(tmp_path) == (None, False)
    (tmp_path / trace).mkdir(parents=True)
    assert slurm_hint(tmp_path) == (str(tmp_path / trace), False)


def test_srun_on_path_is_certain(fake_slurm, tmp_path: Path) -> None:
    (tmp_path / "opt/slurm").mkdir(parents=True)
    found, certain = slurm_hint(tmp_path)
    assert certain and found is not None and found.endswith("/srun")
    assert os.access(found, os.X_OK)


def test_commands_of_no_cluster_are_no_slurm(fake_slurm, tmp_path: Path) -> None:
    """As on a machine where Slurm's packages were installed for sandboxes only."""
    fake_slurm.refuse("scontrol", "scontrol: fatal: Could not establish a configuration source")
    (tmp_path / "etc/slurm").mkdir(parents=True)  # comes with the package
    assert slurm_hint(tmp_path) == (None, False)
    fake_slurm.refuse("scontrol", "Slurmctld(primary) at head is DOWN")
    found, certain = slurm_hint(tmp_path)
    assert certain and found is not None and found.endswith("/srun")


def test_local_is_chosen_and_said(site, cli, nothing_hints) -> None:
    done = cli("submit", "gpt2_zero1", "--nodes", "2", "--dry-run")
    assert done.code == 0
    assert done.err.startswith("Using --cluster local --preset tiny by default")
    assert done.out.startswith(
        "gpt2_zero1 (tiny) on this machine, as 2 nodes (local), 1 worker per node\n"
    )


def test_cluster_asked_for_or_configured_is_taken_without_a_word(
    site, cli, nothing_hints, monkeypatch
) -> None:
    asked = cli("submit", "gpt2_zero1", "-n2", "-c", "local", "-p", "tiny", "--dry-run")
    assert (asked.err, "on this machine, as 2 nodes" in asked.out) == ("", True)
    site.recipe()
    monkeypatch.setenv("TRNSLURM_CLUSTER", "pc")
    assert cli("submit", "toy", "--dry-run").out.startswith("toy on 1 x trn1.32xlarge")
    monkeypatch.delenv("TRNSLURM_CLUSTER")
    Path("trnslurm.yaml").write_text("cluster: pc\n")
    done = cli("submit", "toy", "--dry-run")
    assert (done.err, done.out.startswith("toy on 1 x trn1.32xlarge")) == ("", True)


def test_plan_show_and_render_need_no_slurm(site, cli) -> None:
    for command in ("plan", "show", "render"):
        done = cli(command, "gpt2_zero1", "--cluster", "trn1")
        assert (done.code, done.err) == (0, ""), command


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_local_run_without_the_jobs_packages(site, cli, monkeypatch, absent: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name, *rest: None if name == absent else find("json"),
    )  # fmt: skip
    settings = f"run_root={site.run_root}"
    done = cli("submit", "gpt2_zero1", "--cluster", "local", "--set", settings)
    assert done.code == 1
    assert f"does not have {absent}, which the job needs: " in done.err.splitlines()[-1]
    assert not site.run_root.exists()


def test_runs_and_logs_of_a_cluster_are_read_without_slurm(make_run, cli) -> None:
    """Run directories are on a shared file system; a laptop that mounts it may look at them."""
    done = {"state": "COMPLETED", "exit_code": 0}
    ended = make_run("20260101-000000-ended", states={"precompile": [done], "train": [done]})
    going = make_run(
        "20260101-000001-going",
        states={"precompile": [done], "train": [{"state": "RUNNING"}]}, heartbeat_age_s=3,
    )  # fmt: skip
    lines = {line.split()[0]: line for line in cli("runs").out.splitlines()}
    assert "COMPLETED" in lines[ended.name]
    assert "RUNNING" in lines[going.name] and "squeue not found" in lines[going.name]
