"""Messages: to a command, to a real web server that misbehaves, and about attempts that end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trnslurm.contract.attempt import Attempt, attempt_of
from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.states import State
from trnslurm.node.events import StallWatch, what_next
from trnslurm.node.notify import NotifyError, _post, compose, read_webhook
from trnslurm.node.triage.diagnosis import diagnose

from ..free_port import free_port
from ..json_lines import read_lines
from ..webhook import SECRET, Webhook, serving
from .test_attempt import ENDING, FOR_EVER, SAVES, STARTED, STOPS, Script, raises

PLAN = {
    "recipe": "toy", "preset": "tiny", "cluster": "pc", "nodes": 2, "steps": 30,
    "train": {"watchdog": 20.0, "watchdog_min_s": 120.0},
}  # fmt: skip
STEP = {"attempt": 1, "step": 12, "steps": 30, "loss": 2.5, "time": 1.0}
KEEP = 'cat >> told; echo "$TRNSLURM_EVENT" >> events'


@pytest.fixture
def script(bench: Any) -> Script:
    write_json(bench.directory / "plan.json", PLAN)
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        bench.environ.pop(name)
    return Script(bench)


@pytest.fixture
def hook(bench: Any) -> Iterator[Webhook]:
    with serving() as webhook:
        yield webhook


def told(script: Script) -> list[dict[str, Any]]:
    """What the command of these tests was given."""
    return read_lines(script.bench.directory / "told")


def notify(script: Script, **settings: Any) -> None:
    every = ["start", "failure", "requeue", "end", "stall", "notice"]
    write_json(
        script.bench.directory / "notify.json",
        {"command": None, "webhook": None, "events": every, **settings},
    )


def send(script: Script, limit_s: float = 20.0, **settings: Any) -> subprocess.CompletedProcess:
    """Send a message, as the attempt does."""
    notify(script, **settings)
    message = compose(
        RunFiles(script.bench.directory), "failure", phase="train", attempt=2, state="FAILED",
        reason="KeyError: '<pad>'", what_next="trnslurm resume x",
    )  # fmt: skip
    command = [sys.executable, "-m", "trnslurm.node.notify", str(limit_s)]
    return subprocess.run(
        command, cwd=script.bench.directory, env=script.bench.environ, process_group=0, text=True,
        input=f"{json.dumps(message)}\n", capture_output=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ended", "error", "said"),
    [
        ({"state": "COMPLETED"}, "", ""),
        ({"state": "REQUEUED", "cause": "crash"}, "KeyError: 'lr'", ""),
        (
            {"state": "FAILED", "cause": "error"},
            "KeyError: 'lr'",
            "correct it there, then trnslurm submit toy --nodes 2",
        ),
        (
            {"state": "FAILED"},
            "OSError: [Errno 28] No space left on device: '/fsx/a'",
            "make room (train.keep_last, trnslurm compile gc, /tmp, /dev/shm), then "
            "trnslurm resume x",
        ),
        (
            {"state": "TIMEOUT"},
            "",
            "trnslurm submit toy --nodes 2 --time MORE",
        ),
        ({"state": "PREEMPTED"}, "", "trnslurm resume x"),
        ({"state": "STOPPED", "cause": "cap"}, "", ""),
        ({"state": "FAILED", "cause": "error"}, "", ""),
    ],
)
def test_what_to_do_next(tmp_path, monkeypatch, ended, error: str, said: str) -> None:
    """The node tells it, too, in the words of status."""
    monkeypatch.chdir(tmp_path)
    command = ["trnslurm", "submit", "toy", "--nodes", "2"]
    write_json(tmp_path / "run.json", {"run": "x", "command": command})
    state = attempt_of("train", 1, ended)
    (tmp_path / "state").mkdir()
    state.write(RunFiles(tmp_path))
    (tmp_path / "logs").mkdir()
    raised = f'Traceback (most recent call last):\n  File "train.py", line 4, in f\n{error}\n'
    log = tmp_path / "logs/train-1-node0.log"
    log.write_text(raised if error else "")
    found = diagnose(tmp_path, "train", 1)
    assert what_next(state, lambda: None) == said
    log.unlink()  # what the attempt has found is not looked for again
    assert what_next(state, lambda: found) == said


def test_a_script_may_save_elsewhere(tmp_path, monkeypatch) -> None:
    """A script that saved where the key `checkpoints` says is resumed, not submitted again."""
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "run.json", {"run": "x", "command": ["trnslurm", "submit", "./x.py"]})
    (tmp_path / "train.sbatch").write_text('\nexport TRNSLURM_CHECKPOINTS="$PWD/work/"out\n')
    (tmp_path / "work/out").mkdir(parents=True)
    state = Attempt(phase="train", attempt=1, state=State.TIMEOUT)
    assert what_next(state, lambda: None) == "trnslurm submit ./x.py --time MORE"
    (tmp_path / "work/out/model.pt").touch()
    assert what_next(state, lambda: None) == "trnslurm resume x"


# -- the sender


def test_message(script: Script, hook: Webhook) -> None:
    """The command and the webhook get the same; the URL is nowhere."""
    script.bench.script("metrics.jsonl", f"{json.dumps(STEP)}\n{json.dumps({'step': 13})}\n")
    file = hook.file(script.bench.directory.parent / "hook")
    done = send(script, command=KEEP, webhook=str(file))
    name = script.bench.directory.name
    line = "FAILED (attempt 2) on 2 nodes of pc at step 13/30, loss 2.5000: KeyError: '‹pad›'"
    line += "; next: trnslurm resume x"
    assert hook.got == told(script) == [{
        "event": "failure", "run": name, "recipe": "toy", "preset": "tiny", "cluster": "pc",
        "nodes": 2, "phase": "train", "attempt": 2, "state": "FAILED",
        "reason": "KeyError: '<pad>'", "next": "trnslurm resume x", "step": 13,
        "steps": 30, "loss": 2.5,
        "time": hook.got[0]["time"], "directory": str(script.bench.directory),
        "text": f"{name}: {line}",
    }]  # fmt: skip
    assert hook.paths == [f"/{SECRET}"]
    assert script.bench.read("events") == "failure\n"
    assert sorted(done.stderr.splitlines()) == [
        "notify: failure: command: done", "notify: failure: webhook: sent to 127.0.0.1",
    ]  # fmt: skip
    assert done.returncode == 0 and done.stdout == ""
    assert sorted(json.loads(script.bench.read("state/told-train-2-failure.json"))["by"]) == [
        "command", "webhook",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "tries", "said"),
    [
        ([500, 503, 200], 3, "sent to 127.0.0.1"),
        ([429, 200], 2, "sent to 127.0.0.1"),
        (["close", 204], 2, "sent to 127.0.0.1"),
        (["endless body"], 1, "sent to 127.0.0.1"),
        ([500], 3, "not sent to 127.0.0.1 in 3 tries: it responded 500 Internal Server Error"),
        ([404], 1, "not sent to 127.0.0.1: it responded 404 Not Found"),
        ([307], 1, "not sent to 127.0.0.1: it responded 307 Temporary Redirect, and redirects"),
        ([301], 1, "not sent to 127.0.0.1: it responded 301 Moved Permanently, and redirects"),
        ([799], 3, "not sent to 127.0.0.1 in 3 tries: it responded 799"),
    ],
)
def test_answers(script: Script, answers: list[int | str], tries: int, said: str) -> None:
    with serving(*answers) as hook:
        done = send(script, 4, webhook=str(hook.file(script.bench.directory.parent / "hook")))
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"notify: failure: webhook: {said}")
        assert hook.paths == [f"/{SECRET}"] * tries
        assert script.bench.has("state/told-train-2-failure.json") == said.startswith("sent")


@pytest.mark.parametrize("answer", ["hang", "drip", "endless header"])
def test_answers_that_never_end(script: Script, answer: str) -> None:
    with serving(answer) as hook:
        done = send(script, 2, webhook=str(hook.file(script.bench.directory.parent / "hook")))
    tries = r"not sent to 127\.0\.0\.1 in 3 tries: (no answer within 0\.4 s|LineTooLong)"
    # On a slow machine the whole time may be over first, even before the sender has connected.
    slow = done.stderr == "notify: failure: webhook: did not finish within 2 s\n"
    assert slow or re.fullmatch(rf"notify: failure: webhook: {tries}\n", done.stderr)
    assert slow or hook.got
    assert not script.bench.has("state/told-train-2-failure.json")


def test_the_socket_may_notice_first_that_no_answer_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with serving("hang") as hook:
        url = hook.file(tmp_path / "hook").read_text().strip()
        assert _post(url, b"{}", 0.2) == ("no answer within 0.2 s", True)


def test_nobody_listens(script: Script) -> None:
    file = script.bench.directory.parent / "hook"
    file.touch(mode=0o600)
    file.write_text(f"http://127.0.0.1:{free_port()}/{SECRET}\n")
    done = send(script, 4, webhook=str(file))
    assert done.stderr == (
        "notify: failure: webhook: not sent to 127.0.0.1 in 3 tries: Connection refused\n"
    )


def test_certificates_are_verified(script: Script) -> None:
    """A server with a certificate that nobody has signed gets nothing, and is not asked again."""
    place = script.bench.directory.parent
    key, cert = place / "key.pem", place / "cert.pem"
    words = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-out", cert]
    subprocess.run(
        ["openssl", "req", "-x509", "-keyout", key, *words], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with socket.create_server(("127.0.0.1", 0)) as server:
        arrived: list[bytes] = []

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                try:
                    with context.wrap_socket(connection, server_side=True) as secure:
                        arrived.append(secure.recv(100))
                except ssl.SSLError:
                    arrived.append(b"")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        file = place / "hook"
        file.touch(mode=0o600)
        file.write_text(f"https://127.0.0.1:{server.getsockname()[1]}/{SECRET}\n")
        done = send(script, 10, webhook=str(file))
        thread.join(600)
    assert arrived == [b""]
    assert done.stderr.startswith(
        "notify: failure: webhook: not sent to 127.0.0.1: its certificate is not valid (self"
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3", "command: exit code 3"),
        ("no_such_program", "command: exit code 127: bash: line 1: no_such_program: command not"),
        ("yes | head -c 5000000; echo at last; exit 1", "command: exit code 1: at last"),
        ("printf 'a\\033[2Jb\\n'; exit 1", "command: exit code 1: a[2Jb"),
        ("sleep 600 & exit 0", "command: done"),
        ("exec 0<&-; yes | head -c 5000000", "command: done"),
        ("trap '' TERM; sleep 600", "command: did not finish within 1 s"),
    ],
)
def test_commands(script: Script, command: str, said: str) -> None:
    done = send(script, 1 if "did not" in said else 60, command=command)
    assert done.stderr.startswith(f"notify: failure: {said}")
    assert done.stderr.count("\n") == 1
    if "did not" in said:
        script.bench.await_none_alive()


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("http://x/y", 0o640, "has mode 0640, and a URL in it is a secret: chmod 600 it"),
        ("http://x/y", 0o604, "has mode 0604"),
        ("", 0o600, "expected one line with a URL, http:// or https://"),
        ("http://x/y\nhttp://x/z", 0o600, "expected one line"),
        ("ftp://x/y", 0o600, "expected one line"),
        ("file:///etc/passwd", 0o600, "expected one line"),
        ("http:///y", 0o600, "expected one line"),
        ("http://x:99999/y", 0o600, "expected one line"),
        ("http://x/\u00e9", 0o600, "expected one line"),
        ("http://x/" + 5000 * "y", 0o600, "expected one line"),
        ("http://ada:secret@x/y", 0o600, "its URL contains a user name"),
    ],
)
def test_webhook_files_that_are_refused(tmp_path: Path, text: str, mode: int, why: str) -> None:
    file = tmp_path / "hook"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(NotifyError, match="hook") as raised:
        read_webhook(file)
    assert why in str(raised.value)
    assert "x/y" not in str(raised.value) and "secret@" not in str(raised.value)


def test_webhook_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (("pipe", "not a regular"), ("none", "No such file"), ("", "not a regular")):
        with pytest.raises(NotifyError, match=why):
            read_webhook(tmp_path / name)


def test_webhook_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hook"
    file.write_text("http://x/y\n")
    file.chmod(0o600)
    assert read_webhook(file) == "http://x/y"
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(NotifyError, match="belongs to another user"):
        read_webhook(file)


# -- an attempt


def events(script: Script) -> list[tuple[str, int, str, str]]:
    return [(m["event"], m["attempt"], m["state"], m["reason"]) for m in told(script)]


def test_a_failure_with_its_cause(script: Script) -> None:
    notify(script, command=KEEP, events=["failure", "requeue", "end"])
    script.bench.script("metrics.jsonl", '{"attempt": 0, "step": 20}\n')
    script.step(raises("KeyError: 'lr'"))
    assert script.run() == 1
    assert events(script) == [("failure", 1, "FAILED", "KeyError: 'lr' at train.py, line 3")]


def test_a_requeue(script: Script) -> None:
    """TERM comes with it, and the message is sent all the same."""
    notify(script, command=f"sleep 0.3; {KEEP}", events=["failure", "requeue", "end"])
    script.step(STARTED + "exit 9\n")
    assert script.run() == 9
    [(event, attempt, state, reason)] = events(script)
    assert (event, attempt, state) == ("requeue", 1, "REQUEUED")
    assert reason.startswith("crash 1 of 3 without a new checkpoint: ")


def test_an_attempt_before_that_died_without_a_word(script: Script) -> None:
    """Its node could tell nobody, so the next attempt does."""
    notify(script, command=KEEP)
    script.bench.script(
        "state/train-1.json",
        json.dumps({"job_id": "4711", "state": "RUNNING", "started": "2026-01-01T00:00:00Z"}),
    )
    assert script.run(attempt=2) == 0
    died = "it ended without recording its state"
    assert sorted(events(script)) == [
        ("end", 2, "COMPLETED", ""),
        ("requeue", 1, "REQUEUED", f"{died}, which happens when its node fails"),
        ("start", 2, "RUNNING", ""),
    ]  # fmt: skip
    assert script.said.count("notify: end: command: done\n") == 1


def test_graphs_that_are_compiled_are_not_the_end(script: Script) -> None:
    notify(script, command=KEEP, events=["failure", "requeue", "end"])
    script.options = ["--nodes=2"]
    script.step("touch logs/precompile-1-node0.log\n")
    script.touch("train.sbatch")
    assert script.run(phase="precompile") == 0
    assert events(script) == []
    (script.bench.directory / "train.sbatch").unlink()  # a run that only compiles
    assert script.run(phase="precompile", attempt=2) == 0
    assert events(script) == [("end", 2, "COMPLETED", "")]


def test_cancelled(script: Script) -> None:
    """Slurm's TERM ends neither the sender nor its command."""
    notify(script, command=f"sleep 0.3; {KEEP}", events=["end"])
    script.step(STOPS + SAVES)
    script.says(ENDING.format("None", 0, "None"))
    process = script.running()
    os.kill(process.pid, signal.SIGTERM)
    script.bench.await_true(
        lambda: any("trnslurm.node.notify" in line for line in script.bench.alive()), "a sender"
    )
    for line in script.bench.alive():
        if "trnslurm.node.notify" in line or "sleep 0.3" in line:
            os.kill(int(line.partition(":")[0]), signal.SIGTERM)
    assert script.end(process) == 143
    assert events(script) == [("end", 1, "CANCELLED", "not by trnslurm cancel; saved step 20")]


@pytest.mark.parametrize("ends", ["by itself", "by TERM"])
def test_a_webhook_that_hangs_does_not_delay_the_end_for_long(script: Script, ends: str) -> None:
    """It has ten seconds, or what is left until Slurm's KILL, and the state is written before."""
    with serving("hang") as hook:
        notify(script, webhook=str(hook.file(script.bench.directory.parent / "hook")))
        script.with_change("trnslurm.node.events as e; e.END_S = 4.0")
        if ends == "by TERM":
            script.step(STOPS + SAVES)
            script.says(ENDING.format("None", 0, "None"))
            process = script.running()
            os.kill(process.pid, signal.SIGTERM)
        else:
            script.step(STARTED)
            process = script.start()
        script.bench.await_true(
            lambda: any(m["event"] == "end" for m in hook.got), "the end was told"
        )
        assert script.ended()[0] == ("CANCELLED" if ends == "by TERM" else "COMPLETED")
        assert script.end(process) == (143 if ends == "by TERM" else 0)  # the webhook still hangs
        # What the sender says itself, or what is said of one that was too slow: and of the start.
        assert "notify: end: webhook" in script.said or script.said.count("before the at") == 2
        assert "notify: a message was not sent before the attempt ended" in script.said
    script.bench.await_none_alive()


def test_time_until_the_kill(script: Script) -> None:
    """With KillWait 5 s, and a step that took most of it, a moment is left, and not exceeded."""
    with serving("hang") as hook:
        notify(
            script, webhook=str(hook.file(script.bench.directory.parent / "hook")), events=["end"]
        )
        script.step(FOR_EVER)
        script.says(ENDING.format("None", 0, "None"))
        process = script.running()
        os.kill(process.pid, signal.SIGTERM)
        assert script.end(process) == 143
        said = script.said.splitlines()
    # Of 90 % of five seconds, two were waited for the step: three tries have 2.5 s.
    told = [x for x in said if x.startswith("notify: ")]
    within = [float(s) for x in told for s in re.findall(r"within ([\d.]+) s", x)]
    assert told and sum(within) <= 2.5, said


@pytest.mark.parametrize(
    "damage",
    ["no json", '{"command": 7, "webhook": null, "events": ["end"]}', "[]",
     '{"command": "x", "webhook": null, "events": "end"}'],
)  # fmt: skip
def test_damaged_settings_tell_nobody(script: Script, damage: str) -> None:
    script.bench.script("notify.json", damage)
    assert script.run() == 0
    assert "notify" not in script.said


def test_a_sender_that_cannot_start_fails_nothing(script: Script) -> None:
    notify(script, command=KEEP)
    script.with_change("trnslurm.node.events as e; e.start_sender = None")
    assert script.run() == 0
    assert "notify: end: not sent (TypeError" in script.said
    assert script.ended() == ("COMPLETED", "")


# -- no progress


def test_what_the_watchdog_found(script: Script) -> None:
    notify(script, command=KEEP, events=["stall", "requeue"])
    stuck = {"line": "worker 1 (node 1, node-2) has made no progress for 120 s in step 7: x"}
    script.step(STARTED + f"echo '{json.dumps(stuck)}' > state/stuck-train-1.json; exit 70\n")
    assert script.run() == 70
    stall, requeue = sorted(events(script), reverse=True)
    assert stall == ("stall", 1, "RUNNING", stuck["line"])
    assert requeue[0] == "requeue" and stuck["line"] in requeue[3]


def test_no_step_for_long(script: Script) -> None:
    notify(script, command=KEEP, events=["stall"])
    train = {"watchdog": 2.0, "watchdog_min_s": 0.5}
    write_json(script.bench.directory / "plan.json", PLAN | {"train": train})
    steps = """\
now=$(date +%s)
for n in 1 2 3 4 5 6; do
  echo '{"attempt": 1, "step": '$n', "time": '$((now - 20 + n))'}' >> metrics.jsonl
done
until [ -e told ]; do sleep 0.02; done
"""
    script.step(STARTED + steps)
    assert script.run() == 0
    [(event, attempt, state, reason)] = events(script)
    assert (event, attempt, state) == ("stall", 1, "RUNNING")
    assert reason.startswith("no step for ") and reason.endswith(" s after step 6")


@pytest.mark.parametrize(
    ("factor", "attempt", "expected"),
    [(2, 1, True), (0, 1, False), (2, 2, False)],
    ids=["too long", "a watchdog that is off", "steps of the attempt before"],
)
def test_what_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: int, attempt: int, expected: bool
) -> None:
    """A step a second is usual; twice the longest pause so far is not. A new step is progress."""
    monkeypatch.chdir(tmp_path)
    train = {"watchdog": factor, "watchdog_min_s": 1.0}
    write_json(tmp_path / "plan.json", PLAN | {"train": train})
    stall = StallWatch(attempt)

    def seen(step: int, at: float, now: float) -> bool:
        line = {"attempt": 1, "step": step, "time": at}
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")
        return stall.seen(now)

    assert not any(seen(n, 100.0 + n, 100.0 + n) for n in range(6))
    assert not seen(5, 105.0, 106.9)
    assert seen(5, 105.0, 107.1) is expected
    stall.told = True
    assert not seen(6, 115.0, 116.0) and stall.told is (attempt == 2)
    assert not seen(6, 115.0, 134.0)
    assert seen(6, 115.0, 136.0) is expected
