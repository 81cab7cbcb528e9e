"""submit --follow on Slurm: what is said while the run goes, and the exit code at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from trnslurm.cli import follow
from trnslurm.console import Console
from trnslurm.contract.files import write_json
from trnslurm.runs import watch
from trnslurm.runs.status import run_status

SUBMIT = ("submit", "toy", "--cluster", "pc", "--nodes", "2", "--follow")


@pytest.fixture
def play(site, fake_slurm, monkeypatch) -> Callable[..., None]:
    """Play one scene at each look of the follower: queue lines, and state files by phase."""
    site.recipe()

    def put(scenes: list[tuple[list[str], dict[str, dict]]]) -> None:
        def next_scene(seconds: float) -> None:
            assert seconds >= 1, "the controller is not to be asked all the time"
            queue, attempts = scenes.pop(0)
            site.run().heartbeat_file.touch()
            fake_slurm.queue(*queue)
            for phase, fields in attempts.items():
                data = {"phase": phase, "attempt": 1, "hosts": "node-1,node-2"} | fields
                write_json(site.run().state / f"{phase}-1.json", data)

        monkeypatch.setattr(
            watch, "time", SimpleNamespace(sleep=next_scene, monotonic=time.monotonic)
        )

    return put


DONE = {"state": "COMPLETED", "exit_code": 0}
PRECOMPILING = (
    ["1001|RUNNING|None|x|n", "1002|PENDING|Dependency|N/A|"],
    {"precompile": {"state": "RUNNING"}},
)
TRAINING = (["1002|RUNNING|None|x|n"], {"precompile": DONE, "train": {"state": "RUNNING"}})


def test_to_a_good_end(site, play, cli) -> None:
    play([PRECOMPILING, PRECOMPILING, TRAINING, (["1002|COMPLETED|None|x|n"], {"train": DONE})])
    done = cli(*SUBMIT)
    assert done.code == 0
    assert done.err.splitlines()[2:] == [  # below price and graphs; each word once
        "PENDING (precompile: waiting for jobs of higher priority)",
        "PRECOMPILING",
        "RUNNING",
    ]
    assert f"{site.run().name}: COMPLETED" in done.out


@pytest.mark.parametrize("command", [SUBMIT, ("watch", "last", "--every", "1s")])
def test_a_requeue_is_said_once(site, play, cli, command) -> None:
    """Slurm gives one reason after another while the job waits."""
    lost = {"train": {"state": "RUNNING"}, "precompile": DONE}
    waits = [([f"1002|PENDING|{why}|N/A|"], lost) for why in ("BeginTime", "Priority", "Resources")]
    if command != SUBMIT:
        assert cli(*SUBMIT[:-1]).code == 0
    play([TRAINING, *waits, TRAINING, (["1002|COMPLETED|None|x|n"], {"train": DONE})])
    done = cli(*command)
    lines = [line for line in (done.out + done.err).splitlines() if "REQUEUED" in line]
    assert len(lines) == 1
    assert "which happens when node-1 fails; it will start again within minutes" in lines[0]
    assert (done.out + done.err).count("RUNNING") == 2


def test_a_script_without_steps_has_no_bar(make_run, fake_slurm, monkeypatch) -> None:
    shown: list[str] = []
    streams = SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(follow, "sys", streams)
    for name in ("_with_bar", "_with_lines"):
        monkeypatch.setattr(
            follow, name, lambda run, *_, name=name: shown.append(name) or run_status(run)
        )
    run = make_run(states={"train": [DONE]})
    for steps in (None, 7):
        write_json(run.plan_file, {"steps": steps})
        assert follow._follow(run, Console(as_json=True)) == 0
    assert shown == ["_with_lines", "_with_bar"]


def test_to_a_bad_end(site, play, cli) -> None:
    failed = {"state": "FAILED", "exit_code": 1, "reason": "exit code 1 while running on node-1"}
    play([TRAINING, (["1002|FAILED|NonZeroExitCode|x|n"], {"train": failed})])
    done = cli(*SUBMIT)
    name = site.run().name
    assert done.code == 1
    assert f"{name}: FAILED (exit code 1 while running on node-1)" in done.out
    assert f"logs: trnslurm logs {name}" in done.out


def test_silent_controller_does_not_end_it(site, play, cli, fake_slurm) -> None:
    play([([], TRAINING[1]), ([], {"train": DONE})])
    fake_slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    done = cli(*SUBMIT)
    assert done.code == 0
    words = done.err.splitlines()[2:]
    assert [line.split()[0] for line in words] == ["PENDING", "RUNNING"]
    assert all("Unable to contact slurm controller" in line for line in words)


def test_ctrl_c_leaves_the_jobs_alone(site, play, cli, fake_slurm, monkeypatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    done = cli(*SUBMIT)
    assert done.code == 130
    name = site.run().name
    assert done.err.splitlines()[-1] == f"{name} is still running: trnslurm status {name}"
    assert fake_slurm.calls("scancel") == []
    assert not site.run().cancelled_file.exists()
