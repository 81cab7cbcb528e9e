"""Commands from a laptop, over a real ssh connection; Slurm there is a stand-in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trnslurm

from .conftest import home_of_user
from .login import Login

pytestmark = pytest.mark.rest

SUBMIT = ("submit", "gpt2_zero1", "--nodes", "2", "--cluster", "far", "-y")


def phases(fake_slurm: Any) -> list[str]:
    """The scripts that were submitted."""
    return [Path(call.arguments[-1]).name for call in fake_slurm.calls("sbatch")]


def bytes_below(directory: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()
    }


@pytest.mark.first
def test_the_bytes_reviewed_here_run_there(login: Login, cli, fake_slurm, monkeypatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "not-this-one")
    monkeypatch.setenv("HF_TOKEN_OF_THIS_SHELL", "secret")
    login.forget_launcher()
    assert cli("render", "gpt2_zero1", "--nodes", "2", "--cluster", "far", "-o", "r").code == 0
    done = cli(*SUBMIT, "--json")
    assert done.code == 0, done
    said = json.loads(done.out)
    (run,) = login.runs
    assert (said["run"], said["directory"]) == (run.name, str(run))
    assert said["jobs"] == {"precompile": "1001", "train": "1002"}
    there = bytes_below(run)
    assert bytes_below(Path("r")).items() <= there.items()
    record = json.loads(there["run.json"])
    assert record["jobs"] == said["jobs"]
    assert phases(fake_slurm) == ["precompile.sbatch", "train.sbatch"]
    for call in fake_slurm.calls("sbatch"):
        assert call.cwd == run
        assert "not-this-one" not in call.environ.values()
        assert "secret" not in call.environ.values()
    assert run.stat().st_mode & 0o777 == 0o700
    cache = login.home / ".cache/trnslurm"
    assert cache.stat().st_mode & 0o777 == 0o700
    login.until_nothing_is_left()
    assert not list(Path(os.environ["XDG_STATE_HOME"], "trnslurm/remote").iterdir())
    assert login.connections() == 1


def test_a_run_from_its_first_state_to_its_removal(login: Login, cli, fake_slurm) -> None:
    assert cli(*SUBMIT).code == 0
    (run,) = login.runs
    shown = cli("status", "last")
    assert shown.out.startswith(f"{run.name}: PENDING")
    assert str(run) in shown.out
    assert run.name in cli("runs").out
    assert json.loads(cli("status", "last", "--json").out)["cluster"] == "far"
    (run / "state/precompile-1.json").write_text('{"state": "COMPLETED", "job_id": "1001"}')
    (run / "state/train-1.json").write_text(
        '{"state": "RUNNING", "job_id": "1002", "started": "2026-11-24T09:00:00Z"}'
    )
    (run / "logs/train-1-node0.log").write_text("one\ntwo\nthree\n")
    (run / "metrics.jsonl").write_text(
        "".join(
            f'{{"attempt": 1, "step": {n}, "steps": 9, "loss": {9 - n}.5, "time": 1.0}}\n'
            for n in range(1, 4)
        )
    )
    assert cli("logs", "last", "-n", "2").out == "two\nthree\n"
    assert "6.5" in cli("metrics", "last").out
    assert cli("note", "last", "it's", "a; $HOME").code == 0
    assert cli("note", "last").out == "it's a; $HOME\n"
    assert cli("cancel", "last", "--now").out == f"Cancelled {run.name}\n"
    fake_slurm.queue()
    assert cli("status", "last").out.startswith(f"{run.name}: CANCELLED")
    assert cli("report", "last").out == f"Wrote {run.name}.html\n"
    assert "6.5" in Path(f"{run.name}.html").read_text()
    assert cli("resume", "last", "--nodes", "4").code == 0
    assert cli("compare", "last", run.name).code == 0
    assert cli("cancel", "last").code == 0
    fake_slurm.queue()
    assert cli("rm", "last", "-y").code == 0
    assert not login.runs
    assert login.connections() == 1


def test_errors_there_are_errors_here(login: Login, cli) -> None:
    assert cli("status", "nothing").error.startswith("no run 'nothing' in ")
    assert "fewer than" in cli(*SUBMIT, "--set", "batch.global_batch=8").error
    done = cli("status", "--no-such-option")
    assert (done.code, login.connections()) == (2, 1)


def test_checks_there_come_before_anything_is_queued(login: Login, cli, fake_slurm) -> None:
    (login.home / "data").mkdir()
    done = cli("submit", "gpt2_zero1", "--cluster", "far", "-y", "-n", "2")
    assert done.code == 1
    assert "no prepared data at" in done.err
    assert (fake_slurm.calls("sbatch"), login.runs) == ([], [])


def test_a_dry_run_asks_there_and_leaves_nothing(login: Login, cli, fake_slurm) -> None:
    done = cli(*SUBMIT, "--dry-run")
    assert done.code == 0
    assert "has no torch on this host" in done.out
    assert (fake_slurm.calls("sbatch"), login.runs) == ([], [])


def test_a_sweep(login: Login, cli, fake_slurm) -> None:
    sweep = ("--sweep", "seed=1,2", "--precompile", "never", "--json")
    said = json.loads(cli(*SUBMIT, *sweep).out)
    assert [run["values"] for run in said] == [{"seed": "1"}, {"seed": "2"}]
    assert len(login.runs) == 2
    assert phases(fake_slurm) == ["train.sbatch", "train.sbatch"]


def test_a_chain_and_what_starts_from_a_run(login: Login, cli, fake_slurm) -> None:
    chain = ("submit", "bert_pretrain", "--chain", "--nodes", "16", "-y", "--json")
    said = json.loads(cli(*chain, "--precompile", "never").out)
    first, second = (Path(run["directory"]) for run in said)
    assert sorted(login.runs) == sorted([first, second])
    plan = json.loads((second / "plan.json").read_text())
    assert plan["train"]["init_from"] == f"{first}/checkpoints"
    assert "--dependency=afterok:1001" in fake_slurm.calls("sbatch")[1].arguments
    (first / "checkpoints/step-00000010").mkdir(parents=True)
    facts = {"files": {}, "facts": {"recipe": "gpt2_zero1"}}
    (first / "checkpoints/step-00000010/manifest.json").write_text(json.dumps(facts))
    start = ("--from", f"{first}/checkpoints/step-00000010")
    done = cli("submit", "gpt2_zero1", "--nodes", "2", "-y", *start)
    assert "keep_every" in done.err  # it is not known how long it is there
    assert len(login.runs) == 2


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("sandbox", "list"), "a sandbox runs on one machine"),
        (("top",), "trnslurm watch RUN"),
        (("data", "prepare", "gpt2_zero1"), "log in there"),
        (("compile", "key", "gpt2_zero1"), "submit --dry-run"),
    ],
)
def test_what_does_not_work_from_elsewhere(
    login: Login, cli, words: tuple[str, ...], what: str
) -> None:
    assert what in cli("--on", "login1", *words).error
    assert login.connections() == 0


def test_which_host(login: Login, cli, monkeypatch) -> None:
    assert cli("sandbox", "list").code == 0  # though the default cluster is elsewhere
    assert cli("--on", "", "runs").code == 0
    monkeypatch.setenv("TRNSLURM_ON", "")
    assert cli("runs").code == 0
    assert login.connections() == 0
    monkeypatch.delenv("TRNSLURM_CLUSTER")
    monkeypatch.setenv("TRNSLURM_ON", "login1")
    assert cli("runs").code == 0
    assert login.connections() == 1
    assert "expected HOST or USER@HOST" in cli("--on", "-oProxyCommand=x", "runs").error
    done = cli("--on", "login1", "submit", "gpt2_zero1", "--cluster", "local", "-n", "2")
    assert "the profile local describes a single machine without Slurm" in done.err


def test_a_profile_that_is_not_there_needs_no_host(login: Login, cli, monkeypatch) -> None:
    monkeypatch.setenv("TRNSLURM_CLUSTER", "sandbox")
    assert (cli("runs").code, login.connections()) == (0, 0)
    assert "is not running" in cli("submit", "gpt2_zero1").error
    (home_of_user() / "cluster-config/damaged.yaml").write_text("a: b: c")
    monkeypatch.setenv("TRNSLURM_CLUSTER", "damaged")
    assert (cli("runs").code, login.connections()) == (0, 0)
    assert (cli("--on", "login1", "runs").code, login.connections()) == (0, 1)


def test_the_command_line_helps(login: Login, cli, monkeypatch) -> None:
    done = cli("runs", "--on", "login1")
    assert done.err.endswith("put it before the command: trnslurm --on HOST COMMAND\n")
    monkeypatch.setenv("_TRNSLURM_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "trnslurm --on lo")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert cli().out == "plain,login1\n"


def test_hosts_that_cannot_be_reached(login: Login, cli, monkeypatch) -> None:
    monkeypatch.setenv("TRNSLURM_SSH", "ssh -F /dev/null")
    assert (
        "no-such.invalid: ssh: Could not resolve hostname"
        in cli("--on", "no-such.invalid", "runs").error
    )
    assert "Connection refused" in cli("--on", "ssh://127.0.0.1:1", "runs").error
    monkeypatch.setenv("TRNSLURM_SSH", f"ssh -F {login.above}/ssh_config")
    (login.above / "authorized_keys").write_text("")
    assert "`ssh login1` must work without trnslurm" in cli("runs").error
    (login.above / "known_hosts").write_text("")
    assert "check its host key" in cli("runs").error
    monkeypatch.setenv("TRNSLURM_SSH", "no-such-ssh")
    assert "requires OpenSSH" in cli("runs").error


# Where a connection breaks, with the launcher there already: in the handshake, in the parcel, in
# what is said back; and around the calls of sbatch.
CUTS: list[dict[str, Any]] = [
    {"up": 60_000},
    {"down": 2_900},
    {"down": 3_500},
    {"down": 3_800},
    {"until": "calls/sbatch-1/argv"},
    {"until": "calls/sbatch-2/script"},
]


@pytest.mark.parametrize("cut", CUTS, ids=json.dumps)
def test_a_cut_anywhere_submits_once(
    login: Login, cli, fake_slurm, tmp_path: Path, cut: dict[str, Any]
) -> None:
    login.alone()
    assert cli("runs").code == 0
    if "until" in cut:
        cut = {"until": str(tmp_path / "slurm" / cut["until"])}
    login.plan(cut)
    done = cli(*SUBMIT)
    assert done.code == 0, done
    assert done.err.count("reconnecting") == 1
    assert re.fullmatch(
        r"Submitted \S+  precompile 1001  train 1002\nSee: trnslurm status \S+\n", done.out
    )
    assert phases(fake_slurm) == ["precompile.sbatch", "train.sbatch"]
    assert len(login.runs) == 1


def test_many_cuts_in_a_first_submission(login: Login, cli, fake_slurm, tmp_path: Path) -> None:
    """The launcher, the parcel and the answer come over in pieces."""
    login.alone()
    login.forget_launcher()
    calls = tmp_path / "slurm/calls"
    login.plan(
        {"up": 100_000}, {"up": 500_000}, {"up": 600_000, "slowly": 16384}, {"up": 50_000},
        {"until": f"{calls}/sbatch-1/argv"}, {"until": f"{calls}/sbatch-2/argv"},
    )  # fmt: skip
    done = cli(*SUBMIT)
    assert done.code == 0, done
    assert done.out.startswith("Submitted ") and done.out.count("\n") == 2
    assert done.err.count("reconnecting") == 6
    assert phases(fake_slurm) == ["precompile.sbatch", "train.sbatch"]


def test_a_silent_link_is_given_up(login: Login, cli, fake_slurm, tmp_path, monkeypatch) -> None:
    login.alone()
    words = "-o ServerAliveInterval=1 -o ServerAliveCountMax=1"
    monkeypatch.setenv("TRNSLURM_SSH", f"{os.environ['TRNSLURM_SSH']} {words}")
    assert cli("runs").code == 0
    login.plan({"until": str(tmp_path / "slurm/calls/sbatch-1/argv"), "silent": True})
    done = cli(*SUBMIT)
    assert (done.code, phases(fake_slurm)) == (0, ["precompile.sbatch", "train.sbatch"])
    assert "reconnecting" in done.err


def test_what_is_known_when_no_connection_comes_back(
    login: Login, cli, fake_slurm, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("trnslurm.remote.ask._WAITS_S", (0.0, 0.0))
    login.alone()
    assert cli("runs").code == 0
    login.plan({"until": str(tmp_path / "slurm/calls/sbatch-1/argv")}, *[{"down": 100}] * 2)
    done = cli(*SUBMIT)
    assert done.code == 1
    known = "gpt2_zero1 continues there. Run `trnslurm reconnect` to see its outcome"
    assert known in done.err.splitlines()[-1]
    assert "this was already sent" in cli(*SUBMIT).err
    again = cli("reconnect")
    assert again.code == 0, again
    assert again.out.startswith("Submitted ")
    assert phases(fake_slurm) == ["precompile.sbatch", "train.sbatch"]
    assert cli("reconnect").err == "No commands were interrupted\n"


def started(*words: str) -> subprocess.Popen[str]:
    """Start a command, whose output is read while it runs."""
    return subprocess.Popen(
        [sys.executable, "-m", "trnslurm", *words], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(trnslurm.__file__).parents[1])},
    )  # fmt: skip


def test_logs_that_are_followed_lose_and_repeat_nothing(login: Login, cli, fake_slurm) -> None:
    login.alone()
    assert cli(*SUBMIT).code == 0
    (run,) = login.runs
    lines = [f"line {number} {'x' * 90}\n" for number in range(2000)]
    log = run / "logs/train-1-node0.log"
    (run / "state/train-1.json").write_text('{"state": "RUNNING", "job_id": "1002"}')
    log.write_text("".join(lines[:1000]))
    fake_slurm.queue("1002|RUNNING||N/A|n1")
    login.plan({"down": 40_000}, {"down": 60_000})
    with started("logs", "last", "-f", "-n", "0") as process:
        assert process.stdout and process.stderr
        seen = [process.stdout.readline() for _ in range(1000)]
        with log.open("a") as stream:
            stream.write("".join(lines[1000:]))
        (run / "state/train-1.json").write_text(
            '{"state": "COMPLETED", "job_id": "1002", "exit_code": 0}'
        )
        (run / "state/precompile-1.json").write_text('{"state": "COMPLETED", "job_id": "1001"}')
        fake_slurm.queue()
        seen += process.stdout.readlines()
        assert process.stderr.read().count("reconnecting") == 2
        assert process.wait() == 0
    assert seen == lines


def test_ctrl_c_is_passed_on(login: Login, cli, fake_slurm) -> None:
    assert cli(*SUBMIT).code == 0
    (run,) = login.runs
    with started("watch", "last", "--every", "1s") as process:
        assert process.stdout and process.stderr
        assert "PENDING" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read().count(run.name) in (0, 2)  # in the first second nobody says it
    login.until_nothing_is_left()


def test_a_command_on_a_node(login: Login, cli, fake_slurm, capfd) -> None:
    assert cli(*SUBMIT, "--precompile", "never").code == 0
    (run,) = login.runs
    (run / "state/train-1.json").write_text(
        '{"state": "RUNNING", "job_id": "1001", "hosts": "n1,n2"}'
    )
    fake_slurm.queue("1001|RUNNING||N/A|n[1-2]")
    done = cli("exec", "last", "--node", "1", "--", "echo", "a b", "$HOME")
    assert done.code == 0, done
    (call,) = fake_slurm.calls("srun")
    assert call.arguments[-3:] == ["echo", "a b", "$HOME"]
    own = [name for name in call.environ if name.startswith("PYTHON")]
    assert own == ["PYTHONDONTWRITEBYTECODE"]


def test_other_logins(login: Login, cli, path_without_slurm: str) -> None:
    """A login shell that talks, and alone has Slurm's commands on its PATH."""
    environ = login.environ
    (login.home / ".bash_profile").write_text(
        f"echo Welcome; echo all >&2\nexport PATH={environ['PATH']}\n"
    )
    login.environ = {**environ, "PATH": path_without_slurm}
    login.start_again()
    done = cli("runs")
    assert (done.code, done.out) == (0, "")
    assert cli(*SUBMIT).code == 0
