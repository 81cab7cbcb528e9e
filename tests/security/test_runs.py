"""Runs, bundles and templates that another user made, and secrets: what is refused, what is shown.

Another user's directory is made by giving one away, which only root can.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trnslurm.config.values import _SECRET_TEXT
from trnslurm.records.run import RunDir
from trnslurm.runs.find import find_run

NOBODY = 65534
CANARY = "c4n4ry-of-a-secret-value"
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")


def given_away(run: RunDir) -> RunDir:
    """Make a run another user's."""
    for path in (run.path, *run.path.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    return run


@root_only
@pytest.mark.parametrize("command", ["cancel", "resume", "export", "exec"])
def test_runs_of_others_are_not_run(make_run, fake_slurm, cli, command: str) -> None:
    run = given_away(make_run(states={"precompile": [{"state": "FAILED", "exit_code": 1}]}))
    fake_slurm.queue("1002|RUNNING|None|N/A|node-1")
    words = ["--", "true"] if command == "exec" else []
    error = cli(command, run.path, *words).error
    assert error.startswith(f"{run.path} belongs to nobody, and its commands would run as you")
    assert not [c for c in fake_slurm.calls() if c.command not in ("squeue", "sacct")]


@root_only
def test_runs_of_others_can_be_looked_at(make_run, fake_slurm, cli, tmp_path: Path) -> None:
    """But their word is not taken for where Slurm's commands are, nor are they our last."""
    own = make_run("20260101-000000-own")
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "squeue").write_text("#!/bin/sh\ntouch PWNED\n")
    (evil / "squeue").chmod(0o755)
    os.chown(evil, NOBODY, NOBODY)
    run = given_away(make_run("20260202-000000-other", bin_dir=str(evil)))
    done = cli("status", run.path)
    assert (done.code, done.err) == (0, "")
    assert fake_slurm.calls("squeue")
    assert cli("runs").code == 0
    assert not Path("PWNED").exists()
    assert find_run("last", [run.path.parent]).path == own.path


def test_last_is_no_directory_here(make_run, tmp_path: Path, monkeypatch) -> None:
    """Somebody else may have put one there, as in /tmp."""
    own = make_run("20260101-000000-own")
    monkeypatch.chdir(tmp_path)
    Path("last").mkdir()
    Path("last/run.json").write_text("{}")
    assert find_run("last", [own.path.parent]).path == own.path


@root_only
def test_reviewed_bundle_of_another_is_not_submitted(site, fake_slurm, cli) -> None:
    site.recipe()
    assert cli("render", "toy", "-c", "pc", "-o", "bundle").code == 0
    os.chown("bundle/node.sh", NOBODY, NOBODY)
    assert "bundle/node.sh belongs to nobody" in cli("submit", "--rendered", "bundle").error
    assert fake_slurm.calls() == []


def test_bundle_that_everybody_can_write_to(site, fake_slurm, cli) -> None:
    site.recipe()
    assert cli("render", "toy", "-c", "pc", "-o", "bundle").code == 0
    Path("bundle").chmod(0o777)
    assert "every user can write to" in cli("submit", "--rendered", "bundle").error
    Path("bundle").chmod(0o755)
    Path("bundle/code/jobs/toy/more").symlink_to("/etc/passwd")
    assert "bundle/code/jobs/toy/more is a link" in cli("submit", "--rendered", "bundle").error
    assert fake_slurm.calls() == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("command", ["status", "logs", "cancel", "resume"])
def test_run_that_others_can_write_to(make_run, fake_slurm, cli, mode: int, command: str) -> None:
    run = make_run()
    run.path.chmod(mode)
    error = cli(command, run.path).error
    assert "can write to" in error and "chmod" in error
    assert fake_slurm.calls() == []


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "resume", "note", "keep"])
def test_record_that_others_can_write(make_run, fake_slurm, cli, command: str) -> None:
    """As older versions left it. A directory that others cannot enter closes all its files."""
    run = make_run(bin_dir="/evil")
    run.record_file.chmod(0o666)
    assert cli("status", run.path).code == 0
    run.path.chmod(0o750)
    error = cli(command, run.path).error
    assert error == (
        f"users other than its owner can write to {run.record_file}: check its contents, then run "
        f"chmod -R go-w on {run.path}"
    )
    assert "can write to" in cli("runs").err
    run.record_file.chmod(0o642)  # by users who cannot enter the directory
    assert cli("status", run.path).code == 0


CODE = {
    "code/trnslurm/__pycache__/frozen.cpython-311.pyc": 0o664, "code/trnslurm/__pycache__": 0o775,
    "train.sbatch": 0o660, "config.yaml": 0o660, "nodes-3/train.sbatch": 0o660, "work": 0o770,
}  # fmt: skip


@pytest.mark.parametrize("place", CODE)
@pytest.mark.parametrize("command", ["resume", "exec", "stacks", "export"])
def test_code_that_others_can_write(make_run, fake_slurm, cli, command: str, place: str) -> None:
    run = make_run(states={"precompile": [{"state": "FAILED", "exit_code": 1}]})
    path = run.path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("") if path.suffix else path.mkdir()
    path.chmod(CODE[place])
    assert "can write to" not in cli(command, run.path).error  # it is in a private directory
    run.path.chmod(0o750)
    fake_slurm.forget_calls()
    assert f"can write to {path}: check" in cli(command, run.path).error
    assert fake_slurm.calls() == []
    path.chmod(0o750)
    if os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        assert (
            f"{path} belongs to nobody, but the run belongs to root" in cli(command, run.path).error
        )


@root_only
def test_run_root_of_another(site, fake_slurm, cli) -> None:
    site.recipe()
    site.run_root.mkdir()
    os.chown(site.run_root, NOBODY, NOBODY)
    assert "belongs to another user" in cli("submit", "toy", "-c", "pc", "-y").err
    assert fake_slurm.calls("sbatch") == []


# Fields of run.json that would lead elsewhere, or into a command.
HOSTILE_RECORDS: dict[str, Any] = {
    "after": "../../x", "then": "..", "recipe": "../../../tmp/x", "phases": ["../x"],
    "jobs": {"train": "--user=root"}, "precompile": {"waits_for": "1,singleton"}, "nodes": "2",
    "bin_dir": ["/x"], "user": 3, "scheduler": None,
}  # fmt: skip


@pytest.mark.parametrize("field", HOSTILE_RECORDS)
@pytest.mark.parametrize("command", ["status", "cancel", "resume", "logs"])
def test_record_that_leads_elsewhere(make_run, fake_slurm, cli, field: str, command: str) -> None:
    run = make_run()
    record = json.loads(run.record_file.read_text())
    run.record_file.write_text(json.dumps(record | {field: HOSTILE_RECORDS[field]}))
    assert "run.json: damaged or unreadable" in cli(command, run.path).error
    # To cancel by hand, one is told the jobs of the directory.
    assert [c.command for c in fake_slurm.calls()] == ["squeue"] * (command == "cancel")


def test_nothing_steers_the_terminal(make_run, fake_slurm, cli) -> None:
    red = "\x1b[31mred\u202e\x07"
    failed = {"state": "FAILED", "reason": red, "hosts": red, "exit_code": 1}
    run = make_run(
        f"20260101-{red}", cluster=red, recipe=red, preset=red, states={"train": [failed]}
    )
    run.metrics_file.write_text(json.dumps({"step": red, "steps": red, "loss": 1.0}) + "\n")
    run.node_log("train", 1, 0).write_text(f"ValueError: {red}\n")
    named = RunDir(run.path.rename(run.path.with_name("20260101-000000-x")))
    (named.state / "train-2.json").write_text('{"attempt": "2", "restarts": {}}')
    for words in (("status", named.path), ("runs",), ("status", named.path, "--json")):
        done = cli(*words)
        assert (done.code, done.err) == (0, "")
        assert not {"\x1b", "\x07", "\u202e"} & set(done.out)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (f"env.HF_TOKEN={CANARY}", "env.HF_TOKEN"), (f"env.WANDB_API_KEY={CANARY}", "env.WANDB"),
        (f"env.AWS_SECRET_ACCESS_KEY={CANARY}", "env.AWS"), (f"env.DB_PASSWORD={CANARY}", "env.DB"),
        (f"neuron.env.MY_KEY={CANARY}", "neuron.env.MY_KEY"), ("env.A=hf_" + "x" * 34, "env.A"),
        (f"activate=[export HF_TOKEN={CANARY}]", "activate: HF_TOKEN"),
        ("slurm.sbatch=['--comment=AKIA0123456789ABCDEF']", "slurm.sbatch"),
    ],
)  # fmt: skip
def test_secrets_are_refused(site, fake_slurm, cli, setting: str, words: str) -> None:
    site.recipe()
    error = cli("submit", "toy", "-c", "pc", "-y", "--set", setting).error
    assert f"{words} looks like a secret" in error or words in error
    assert "file with mode 0600" in error and CANARY not in error
    assert not site.run_root.exists()


A36, HEX = "a1B2" * 9, "0a1b" * 16
TOKENS = (
    f"hf_{A36}", f"api_org_{A36}", f"wandb_v1_{A36}_{A36}", f"nvapi-{A36}-{A36}", f"sk-proj-{A36}",
    f"gsk_{A36}{A36}", f"xai-{A36}{A36}", f"r8_{A36}", "AKIA0123456789ABCDEF", f"AIza{A36[:35]}",
    f"GOCSPX-{A36}", f"ya29.{A36}", f"ghr_{A36}", f"github_pat_{A36[:22]}_{A36}",
    f"glpat-{A36[:20]}", f"glrt-{A36}", "xoxb-1234567890-1234567890123-abcdefghij",
    f"xoxe.xoxp-1-{A36}", f"xapp-1-A0{A36}", f"npm_{A36}", f"pypi-AgEIcHlwaS5vcmc{A36}",
    f"dckr_pat_{A36}", f"sk_live_{A36}", f"SG.{A36}.{A36}", f"dop_v1_{HEX}", f"dapi{HEX[:32]}",
    f"hvs.{A36}", f"glsa_{A36}", f"tskey-auth-k{A36}", f"AGE-SECRET-KEY-1{'QPZRY9' * 9}2TVD",
    f"Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{A36}", f"https://oauth2:{A36}@host/x.git",
)  # fmt: skip
HARMLESS = (
    "hf_transfer", "api_org_chart", "wandb_v1_offline", "sk-learn-1.5", "r8_quantized_weights",
    "github_pat_rotation_notes", "xoxb-like", "npm_config_cache", "pypi-mirror.example.com/simple",
    "eyJ.and.eyJ", "glpat-less", "dapi-proxy.example.com:8080", "SG.small", "hvs.cluster",
    "nvcr.io/nvidia/pytorch:24.10-py3", f"sha256:{HEX}", HEX[:40], "arn:aws:iam::1234:role/x",
    "s3://akia-bucket/AKIA/ghp_/eyJhbGciOiJIUzI1", "xai-" + "-".join(["corporation"] * 6),
    "task-parallel-training-of-a-very-long-name-without-end", "https://host/x?key=1", A36 * 3,
)  # fmt: skip


def test_tokens_are_known_by_their_beginnings() -> None:
    """Under any name; nothing that only begins like one is refused."""
    found = {text for text in (*TOKENS, *HARMLESS) if _SECRET_TEXT.search(f"--key={text} x")}
    assert found == {*TOKENS}


def test_paths_of_secrets_are_not(site, fake_slurm, cli) -> None:
    site.recipe()
    words = ("--set", "env.HF_TOKEN_PATH=/home/ada/.hf-token", "--set", "env.DISABLE_CC_TOKEN=1")
    assert cli("submit", "toy", "-c", "pc", "-y", *words).code == 0


def test_no_secret_of_this_shell_is_anywhere(site, fake_slurm, cli, monkeypatch) -> None:
    """Not those of its environment, nor of hidden files beside the recipe's."""
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    site.recipe()
    git: Callable[..., Any] = lambda *words: subprocess.run(  # noqa: E731
        ["git", "-C", str(site.root), "-c", "user.name=a", "-c", "user.email=a@b", *words],
        check=True, capture_output=True,
    )  # fmt: skip
    git("init", "-q")
    site.write("jobs/toy/.env", "nothing")
    git("add", "-A")
    git("commit", "-qm", "one")
    site.write("jobs/toy/.env", f"HF_TOKEN={CANARY}")
    site.write("jobs/toy/.netrc", f"password {CANARY}")
    site.write("jobs/toy/train.py", "print('changed')\n")
    assert cli("submit", "toy", "-c", "pc", "-y").code == 0
    run = site.run()
    assert "changed" in run.patch_file.read_text()
    made = [f for f in (*run.path.rglob("*"), *Path.home().rglob("*")) if f.is_file()]
    assert len(made) > 12
    assert not [f for f in made if CANARY.encode() in f.read_bytes()]


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ lipsum.__globals__['os'].system('touch PWNED') }}",
        "{{ cycler.__init__.__globals__.os.popen('touch PWNED').read() }}",
        "{{ ''|attr('__class__') }}", "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ batch.__init__.__globals__ }}", "{% set x = slurm.site.append(1) %}",
        "{{ self.__init__.__globals__ }}", "{% include '/etc/passwd' %}",
        "{% include '../../../../../../etc/passwd' %}", "{% import 'os' as os %}",
        "{{ range(10**9)|list|length }}", "{% include 'node.sh.j2' %}",
    ],
)  # fmt: skip
def test_templates_of_users_are_in_a_sandbox(site, fake_slurm, cli, text: str) -> None:
    site.recipe()
    site.write("templates/node.sh.j2", f"#!/bin/bash\n{text}\n")
    done = cli("render", "toy", "-c", "pc", "-o", "bundle")
    assert done.code == 1 and len(done.error) < 400
    assert not Path("bundle").exists() and not Path("PWNED").exists()


def test_recipes_links_lead_nowhere_else(site, fake_slurm, cli, tmp_path: Path) -> None:
    recipe = site.recipe().parent
    (tmp_path / "secret").write_text(CANARY)
    (recipe / "data.txt").symlink_to(tmp_path / "secret")
    assert "data.txt is a link to a file outside" in cli("render", "toy", "-c", "pc").error
    (recipe / "data.txt").unlink()
    (recipe.parent / "shared.py").write_text("x = 1\n")
    (recipe / "shared.py").symlink_to("../shared.py")
    assert cli("render", "toy", "-c", "pc").code == 0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.text=../../x", "data.text contains '..'"),
        ("data.text=/etc/passwd", "data.text must"),
        ("data.dataset=..", "data.dataset contains '..'"),
        ("data.path=../x", "data.path contains '..'"),
        ("data.checkpoint=https://h/x/..", "must be the URL of a file"),
        ("data.checkpoint=https://ada:pw@h/x.pt", "looks like a secret"),
        ("slurm.bin_dir=bin", "it must be an absolute path"), ("entry=../x.py", "does not exist"),
        ("train={x: &a [*a]}", "a valid value"), ("seed=2024-99-99", "a valid value"),
    ],
)  # fmt: skip
def test_values_that_lead_elsewhere(site, fake_slurm, cli, setting: str, words: str) -> None:
    site.recipe()
    assert words in cli("render", "toy", "-c", "pc", "--set", setting).error


def test_checkpoint_whose_manifest_leads_elsewhere(make_run, site, fake_slurm, cli) -> None:
    site.recipe()
    saved = make_run().checkpoints / "step-00000003"
    saved.mkdir(parents=True)
    manifest = {"files": {"../../../x": {"bytes": 1}}, "facts": {"recipe": "toy"}}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert (
        "which is outside the checkpoint" in cli("render", "toy", "-c", "pc", "--from", saved).error
    )
