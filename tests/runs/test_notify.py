"""notify: what is refused beforehand, what is in a run's files, and what watch tells."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from trnslurm.config.schema import Event, Notify
from trnslurm.contract.rundir import PACKAGE
from trnslurm.node.notify import EVENT_OF
from trnslurm.records.run import RunDir
from trnslurm.runs import watch

from ..toy_site import write_attempt
from ..webhook import SECRET, Webhook, serving

TOY = ("toy", "--cluster", "pc", "--nodes", "2")
NONE = {"command": None, "webhook": None, "plugin": None}
ALL = ["failure", "requeue", "end", "stall", "notice"]


@pytest.fixture
def warm(graphs, site, fake_slurm, cli) -> None:
    """The graphs of `toy` are compiled, so its runs are one job."""
    graphs.fill(graphs.facts(cli, "toy", "--nodes", "2"))


@pytest.fixture
def hook(home: Path) -> Path:
    file = home / ".my hook"
    file.touch(mode=0o600)
    file.write_text(f"https://hooks.example.org/{SECRET}\n")
    return file


def settings_of(run: RunDir) -> Any:
    return json.loads(run.notify_file.read_text())


def test_events_are_those_that_attempts_tell() -> None:
    assert {*EVENT_OF.values()} < {*get_args(Event)}
    assert {*get_args(Event)} == {*Notify().events, "start"}


def test_a_run_has_them_in_a_file_of_its_own(warm, hook, site, cli) -> None:
    """The URL is in none of its files, and neither scripts nor keys of graphs change."""
    key = cli("compile", "key", *TOY).out
    told = ("--notify", f"@{hook}", "--notify", "mail -s 'it''s over' ada")
    assert cli("compile", "key", *TOY, *told).out == key
    assert cli("submit", *TOY).code == cli("submit", *TOY, *told).code == 0
    before, run = site.runs()
    assert settings_of(run) == NONE | {
        "command": "mail -s 'it''s over' ada", "webhook": str(hook), "events": ALL
    }  # fmt: skip
    assert not before.notify_file.exists()
    for name in ("train.sbatch", "node.sh", "plan.json", "graphs.json"):
        assert (run.path / name).read_bytes() == (before.path / name).read_bytes()
    for file in run.path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_from_profile_recipe_and_command_line(warm, graphs, site, cli) -> None:
    """Each replaces what those before it say; --notify whom to tell, and not of what."""
    graphs.profile(notify={"command": "profile", "events": ["end"]})
    assert cli("submit", *TOY).code == 0
    assert settings_of(site.runs()[-1])["command"] == "profile"
    site.recipe(f"{site.root.joinpath('jobs/toy/recipe.yaml').read_text()}notify: {{command: own}}")
    assert cli("submit", *TOY).code == 0
    assert settings_of(site.runs()[-1]) == NONE | {"command": "own", "events": ["end"]}
    assert cli("submit", *TOY, "--notify", "other").code == 0
    assert settings_of(site.runs()[-1]) == NONE | {"command": "other", "events": ["end"]}
    assert cli("submit", *TOY, "--notify", "").code == 0
    assert settings_of(site.runs()[-1])["events"] == []


def test_a_reviewed_bundle_keeps_them(warm, site, cli, tmp_path: Path) -> None:
    bundle = tmp_path / "reviewed"
    assert cli("render", *TOY, "--notify", "true", "-o", bundle).code == 0
    assert cli("submit", "--rendered", bundle).code == 0
    assert settings_of(site.run()) == NONE | {"command": "true", "events": ALL}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--set", "notify.events=[ended]"],
         "--set notify.events=[ended]: notify.events[0] is 'ended' (did you mean \"end\"?); "
         "expected one of start, failure, requeue, end, stall, notice"),
        (["--set", "notify.hook=x"], "--set notify.hook=x: unknown key notify.hook (did you mean "
         '"notify.webhook"?)'),
        (["--set", "notify.webhook=https://x/y"], "notify.webhook is a URL, which would end up "
         "in the run's files: put it in a file with mode 0600, and set notify.webhook to its path"),
        (["--notify", "https://x/y"], "--notify: a URL would end up in the run's files: put it "
         "in a file with mode 0600, and pass --notify @FILE"),
        (["--notify", "@http://x/y"], "--notify: a URL would end up in the run's files: put it "
         "in a file with mode 0600, and pass --notify @FILE"),
        (["--notify", "@hook"], "notify.webhook is 'hook': it must be the absolute path of a file "
         "with the URL, or start with ~/"),
        (["--notify", "a", "--notify", "b"],
         "--notify b: only one command is allowed, and one is already given"),
        (["--notify", "", "--notify", "b"],
         "--notify '' turns messages off: remove the other --notify options"),
        (["--notify", "a", "--set", "notify.command=b"],
         "--notify and --set notify.command=… contradict each other: omit one of them"),
        (["--set", 'notify.command=""'], "notify.command is empty: remove it, or set it to "
         "null"),
    ],
)  # fmt: skip
def test_refused(warm, site, fake_slurm, cli, options: list[str], why: str) -> None:
    assert cli("submit", *TOY, *options).error == why
    assert site.runs() == [] and not fake_slurm.calls("sbatch")


@pytest.mark.parametrize(
    "command",
    ["curl -d @- https://hooks.slack.com/services/T00/B00/XXX",
     "curl -d @- https://discord.com/api/webhooks/12/abc", "curl https://ada:pw@example.org/"],
)  # fmt: skip
def test_secrets_in_a_command(warm, site, cli, command: str) -> None:
    error = cli("submit", *TOY, "--notify", command).error
    assert error.startswith("notify.command looks like a secret") and command not in error
    assert site.runs() == []


def test_what_this_host_sees_to_be_wrong(warm, hook, home: Path, site, cli) -> None:
    def error(*words: str) -> str:
        return str(cli("submit", *TOY, *words).error)

    assert error("--notify", f"@{home}/none") == (
        f"notify.webhook: {home}/none: No such file or directory"
    )
    hook.chmod(0o644)
    assert "has mode 0644, and a URL in it is a secret: chmod 600 it" in error(
        "--notify", f"@{hook}"
    )
    hook.chmod(0o600)
    hook.write_text("gopher://x/y")
    assert "expected one line with a URL, http:// or https://" in error("--notify", f"@{hook}")
    assert error("--notify", f"{home}/none -v") == f"notify.command: {home}/none does not exist"
    hook.rename(home / "hook")
    assert error("--notify", f"{home}/hook") == (
        f"notify.command: {home}/hook is not executable: if it contains the URL of a "
        f"webhook, pass --notify @{home}/hook, or set notify.webhook"
    )
    assert site.runs() == []
    done = cli("submit", *TOY, "--notify", "@/no/such/place/hook")  # the nodes may have it
    assert done.code == 0
    assert done.err.splitlines()[0] == (
        "warning: notify.webhook: /no/such/place/hook does not exist on this host, but the first "
        "node needs it"
    )


# -- resume


def failed(run: RunDir, fake_slurm) -> None:
    write_attempt(run, "train", 1, state="FAILED", reason="exit code 1", job_id="1001")
    fake_slurm.queue()


def test_resume_tells_others(warm, site, fake_slurm, cli) -> None:
    assert cli("submit", *TOY).code == 0
    run = site.run()
    failed(run, fake_slurm)
    assert cli("resume", "last", "--notify", "").code == 0
    assert not run.notify_file.exists()
    failed(run, fake_slurm)
    assert cli("resume", "last", "--notify", "true").code == 0
    assert settings_of(run) == NONE | {"command": "true", "events": ALL}
    failed(run, fake_slurm)
    assert cli("resume", "last").code == 0  # its files are as they were submitted
    failed(run, fake_slurm)
    assert cli("resume", "last", "--nodes", "1", "--notify", "").code == 0
    assert settings_of(run) == NONE | {"command": "true", "events": []}
    failed(run, fake_slurm)
    assert cli("resume", "last", "--nodes", "2").code == 0
    assert settings_of(run)["events"] == []
    failed(run, fake_slurm)
    assert cli("resume", "last", "--notify", "@/tmp/none").error.startswith("notify.webhook: ")
    assert cli("resume", "last", "--notify", "https://x").error.startswith("--notify: a URL would")
    (run.path / PACKAGE).unlink()
    record = json.loads(run.record_file.read_text())
    del record["sha256"][PACKAGE]
    run.record_file.write_text(json.dumps(record))
    assert cli("resume", "last", "--notify", "true").error == (
        f"{run.name} was submitted with a version of trnslurm without notifications: omit --notify"
    )


def test_resume_does_not_mind_a_webhook_that_is_gone(warm, hook, site, fake_slurm, cli) -> None:
    assert cli("submit", *TOY, "--notify", f"@{hook}").code == 0
    failed(site.run(), fake_slurm)
    hook.unlink()
    assert cli("resume", "last").code == 0


# -- watch, of what no node could tell


@pytest.fixture
def webhook(monkeypatch):
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with serving() as webhook:
        yield webhook


@pytest.fixture
def lost(warm, webhook: Webhook, site, fake_slurm, cli, home: Path) -> RunDir:
    """A run whose first node died; Slurm knows nothing of its job any more."""
    assert cli("submit", *TOY, "--notify", f"@{webhook.file(home / 'hook')}").code == 0
    run = site.run()
    write_attempt(run, "train", 1, state="RUNNING", job_id="1001")
    os.utime(run.state_file("train", 1), (1, 1))
    fake_slurm.queue()
    return run


def test_watch_tells_what_no_node_could(lost, webhook: Webhook, cli) -> None:
    done = cli("watch", "last", "--every", "0.05s")
    assert done.code == 1 and "LOST" in done.out
    (message,) = webhook.got
    assert (message["event"], message["state"], message["attempt"]) == ("failure", "LOST", 1)
    assert (message["run"], message["recipe"], message["nodes"]) == (lost.name, "toy", 2)
    assert "notify: failure: webhook: sent to 127.0.0.1" in done.err
    cli("watch", "last", "--every", "0.05s")
    assert len(webhook.got) == 1  # once is enough


def test_watch_tells_nothing_twice(lost, webhook: Webhook, cli, monkeypatch) -> None:
    """The node has its turn; it writes down that it has told."""
    write_attempt(lost, "train", 1, state="FAILED", reason="exit code 1", job_id="1001")
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        lost.told_file("train", 1, "failure").touch()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert cli("watch", "last", "--every", "0.05s").code == 1
    assert waited and webhook.got == []


@pytest.mark.parametrize("events", [["end"], []])
def test_watch_tells_only_what_was_asked_for(lost, webhook: Webhook, cli, events) -> None:
    lost.notify_file.write_text(json.dumps(settings_of(lost) | {"events": events}))
    assert cli("watch", "last", "--every", "0.05s").code == 1
    assert webhook.got == []


def test_the_run_of_another_user_tells_nobody(lost, webhook: Webhook, monkeypatch, cli) -> None:
    monkeypatch.setattr(watch, "is_ours", lambda path: path != lost.path)
    assert cli("watch", "last", "--every", "0.05s").code == 1
    assert webhook.got == []
