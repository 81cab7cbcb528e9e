"""Tells people what becomes of a run: a message to a command, a webhook, or both.

    python -m trnslurm.node.notify 10 < message.json    # in a run directory; at most 10 seconds

The run's notify.json says which events are sent, and how. The program is a separate process, so
nothing that a command or a server does can delay or end a training. Each outcome is one line on
stderr.

The URL of a webhook is a secret as a rule: who has it can write to the channel. So it is read from
a private file when it is used, and of it only the host is ever printed.
"""

import json
import math
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from trnslurm.rundir import RunFiles, last_lines, open_file, read_json, utc_time, write_json_once

EVENT_OF = {
    "REQUEUED": "requeue",
    "COMPLETED": "end",
    "STOPPED": "end",
    "CANCELLED": "end",
    "FAILED": "failure",
    "TIMEOUT": "failure",
    "PREEMPTED": "failure",
    "NODE_FAIL": "failure",
    "LOST": "failure",
}
"""What the end of an attempt, or of a run, is to those who are told."""
# Of the time that there is: how long each try may take, and the pauses between them.
_TRIES, _PAUSES = (0.4, 0.25, 0.2), (0.03, 0.07)
_AGAIN = (408, 429)  # besides 5xx
_LONGEST_URL = 4096
_LONGEST_TEXT = 500
_LINES_WITHOUT_LOSS = 50
_TAIL_BYTES = 300

Message = dict[str, Any]


class NotSentError(Exception):
    """Why a message was not sent; it never has the URL."""


class WebhookError(Exception):
    """What is wrong with the file of a webhook's URL; it never has the URL."""


@dataclass(frozen=True, kw_only=True)
class Recipients:
    """Whom to tell, and of what."""

    command: str
    webhook: str
    """The path of a file with the URL."""
    events: tuple[str, ...]


def read_notify(run: RunFiles) -> Recipients | None:
    """Return what notify.json says; None if no one is notified."""
    said = read_json(run.notify_file)
    command, webhook, events = (said.get(k) or "" for k in ("command", "webhook", "events"))
    if not (isinstance(command, str) and isinstance(webhook, str) and isinstance(events, list)):
        return None
    if not events or not (command or webhook):
        return None
    return Recipients(command=command, webhook=webhook, events=tuple(map(str, events)))


def compose(
    run: RunFiles, event: str, *, phase: str, attempt: int, state: str, reason: str = ""
) -> Message:
    """Return the message of an event."""
    about = read_json(run.plan_file) | read_json(run.record_file)
    lines = [*islice(last_lines(run.metrics_file), _LINES_WITHOUT_LOSS)] if phase == "train" else []
    found: Message = {
        "event": event,
        "run": run.path.resolve().name,
        **{key: about.get(key) or "" for key in ("recipe", "preset", "cluster")},
        "nodes": about.get("nodes", 1),
        "phase": phase,
        "attempt": attempt,
        "state": state,
        "reason": reason,
        **{key: _newest(lines, key) for key in ("step", "steps", "loss")},
        "time": utc_time(),
        "directory": str(run.path.resolve()),
    }
    return found | {"text": _line(found)}


def _newest(lines: Sequence[Message], key: str) -> Any:
    """Return what was said last of a number; None if nothing was, or it is not finite."""
    value = next((line[key] for line in lines if key in line), None)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if math.isfinite(value) else None


def _line(message: Message) -> str:
    """Return the message in one line."""
    phase, attempt, nodes = message["phase"], message["attempt"], message["nodes"]
    which = f" (attempt {attempt})" if attempt > 1 else ""
    what = {"start": f"{phase} starts", "stall": "no progress"}.get(
        message["event"], message["state"] if phase == "train" else f"{phase} {message['state']}"
    )
    line = f"{message['run']}: {what}{which} on {nodes} node{'' if nodes == 1 else 's'}"
    line += f" of {message['cluster']}" if message["cluster"] else ""
    if message["step"] is not None:
        line += f" at step {message['step']}"
        line += f"/{message['steps']}" if message["steps"] is not None else ""
    if message["loss"] is not None:
        line += f", loss {message['loss']:.4f}"
    line += f": {message['reason']}" if message["reason"] else ""
    # Slack reads <!channel> and <url> as more than text.
    return line.replace("<", "‹").replace(">", "›")[:_LONGEST_TEXT]


def start_sender(run: RunFiles, message: Message, limit_s: float) -> subprocess.Popen[bytes]:
    """Start this program with a message, in a separate process group, which TERM does not end.

    Slurm sends TERM to every process of a job that is ending; a blocked signal is inherited.
    """
    held_back = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
    try:
        sender = subprocess.Popen(
            [sys.executable, "-m", "trnslurm.node.notify", f"{limit_s:.2f}"],
            cwd=run.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert sender.stdin
    with suppress(OSError), sender.stdin:
        sender.stdin.write(f"{json.dumps(message)}\n".encode())
    return sender


def end_sender(sender: subprocess.Popen[bytes], within_s: float) -> bool:
    """Wait for a sender, and kill it with all that it started; return whether it had ended."""
    try:
        sender.wait(max(0.0, within_s))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(sender.pid, signal.SIGKILL)
        sender.wait()
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Send the message on stdin; return 1 if it reached no one."""
    (limit,) = sys.argv[1:] if argv is None else argv
    limit_s, run, body = float(limit), RunFiles(Path()), sys.stdin.buffer.read()
    message, notify = json.loads(body), read_notify(run)
    event = message["event"]
    sent: list[str] = []
    ways: dict[str, Callable[[], str]] = {}
    if notify and notify.command:
        ways["command"] = lambda: run_command(notify.command, event, body)
    if notify and notify.webhook:
        ways["webhook"] = lambda: post(notify.webhook, body, limit_s)

    def go(name: str) -> None:
        try:
            said = ways[name]()
        except NotSentError as error:
            said = str(error)
        except Exception as error:  # its text might have the URL
            said = f"{name}: not sent ({type(error).__name__})"
        else:
            sent.append(name)
        if name in threads:  # else it was too late
            _say(f"notify: {event}: {said}")

    deadline = time.monotonic() + limit_s
    threads = {name: threading.Thread(target=go, args=[name], daemon=True) for name in ways}
    for thread in threads.values():
        thread.start()
    for name, thread in [*threads.items()]:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            del threads[name]
            _say(f"notify: {event}: {name}: no end within {limit_s:.0f} s")
    if sent:
        with suppress(OSError, KeyError):
            told = run.told_file(message["phase"], message["attempt"], event)
            write_json_once(told, {"time": message["time"], "by": sent})
    if len(threads) < len(ways) and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with what the command has started
    os._exit(0 if sent else 1)  # a name that is still being looked up would be waited for


def run_command(command: str, event: str, body: bytes) -> str:
    """Run a shell line with the message on stdin; return a word about it."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"TRNSLURM_EVENT": event},
    )
    assert process.stdin and process.stdout
    tail = b""

    def drain(output: IO[bytes]) -> None:
        nonlocal tail
        while some := os.read(output.fileno(), 1 << 16):
            tail = (tail + some)[-_TAIL_BYTES:]

    # A thread, because what the command leaves behind may hold the pipe open.
    reader = threading.Thread(target=drain, args=[process.stdout], daemon=True)
    reader.start()
    with suppress(OSError), process.stdin:
        process.stdin.write(body)
    code = process.wait()
    if code == 0:
        return "command: done"
    reader.join(1.0)
    said = tail.decode(errors="replace").strip().splitlines()
    last = "".join(c for c in said[-1] if c.isprintable()) if said else ""
    raise NotSentError(f"command: exit code {code}{f': {last}' if last else ''}")


def read_webhook(path: str | Path) -> str:
    """Return the URL that a webhook's file has, if the file is private and it is one."""
    file = Path(os.path.expanduser(path))  # noqa: PTH111  it never raises
    try:
        with open_file(file) as stream:
            about, text = os.fstat(stream.fileno()), stream.read(_LONGEST_URL + 1)
    except OSError as error:
        raise WebhookError(f"{file}: {error.strerror}") from None
    if about.st_uid != os.geteuid():
        raise WebhookError(f"{file} belongs to another user: make one of your own")
    if stat.S_IMODE(about.st_mode) & 0o077:
        mode = f"{stat.S_IMODE(about.st_mode):04o}"
        raise WebhookError(f"{file} has mode {mode}, and a URL in it is a secret: chmod 600 it")
    url = text.decode("latin-1").strip()
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, whole = urlsplit(""), False
    if not whole or len(text) > _LONGEST_URL or not all("!" <= c <= "~" for c in url):
        raise WebhookError(f"{file}: expected one line with a URL, http:// or https://")
    if parts.username is not None:
        raise WebhookError(f"{file}: its URL has a user's name, which webhooks do not take")
    return url


def post(file: str, body: bytes, limit_s: float) -> str:
    """Send the message to the URL in a file, again where that may help; return a word about it."""
    try:
        url = read_webhook(file)
    except WebhookError as error:
        raise NotSentError(f"webhook: {error}") from None
    host, why, number = urlsplit(url).hostname, "", 0
    for number, share in enumerate(_TRIES, 1):
        why, again = _try(url, body, share * limit_s)
        if not why:
            return f"webhook {host}: sent"
        if not again or number > len(_PAUSES):
            break
        time.sleep(_PAUSES[number - 1] * limit_s)
    tries = f" in {number} tries" if number > 1 else ""
    raise NotSentError(f"webhook {host}: not sent{tries}: {why}")


def _try(url: str, body: bytes, limit_s: float) -> tuple[str, bool]:
    """Send it once; return why not, and whether another try may help."""
    found = [(_late(limit_s), True)]
    # A thread: a timeout of the socket's bounds one read only, and none the look-up of a name.
    thread = threading.Thread(
        target=lambda: found.insert(0, _post(url, body, limit_s)), daemon=True
    )
    thread.start()
    thread.join(limit_s)
    return found[0]


def _post(url: str, body: bytes, limit_s: float) -> tuple[str, bool]:
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        """Follows no redirect: the message is for the host in the file."""

        def redirect_request(self, *_: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "trnslurm"}
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        # Nothing of the answer but its first lines is read, which http.client bounds.
        with urllib.request.build_opener(Stay).open(request, timeout=limit_s):
            return "", False
    except urllib.error.HTTPError as error:
        code = error.code
        error.close()
        word = ""
        with suppress(ValueError):  # in our words: the server's may be anything
            word = f" {http.HTTPStatus(code).phrase}"
        if 300 <= code < 400:
            return f"it answers {code}{word}, and redirects are not followed", False
        return f"it answers {code}{word}", code >= 500 or code in _AGAIN
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return f"its certificate is not valid ({reason.verify_message})", False
        why = reason.strerror if isinstance(reason, OSError) else ""
        if not why and isinstance(reason, TimeoutError):  # the socket's, which has no words
            why = _late(limit_s)
        return why or type(reason).__name__, True


def _late(limit_s: float) -> str:
    return f"no answer within {limit_s:.1f} s"


def _say(line: str) -> None:
    """Write a line to the log, whole."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
