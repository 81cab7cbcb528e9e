"""Sends messages about a run to a command, a webhook, a plug-in, or a combination of them.

    python -m trnslurm.node.notify 10 < message.json    # in a run directory; at most 10 seconds

The run's notify.json names the events and the recipients. This program is a separate process, so
that no command or server can delay or end a training run. It prints one line per recipient to
stderr.

A webhook's URL is usually a secret, because anyone who has it can write to the channel. So this
program reads it from a private file when it is needed, and prints only its host.

A plug-in is a function in another package. The run has a copy of its code
(trnslurm/render/plugins.py).
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from trnslurm.contract.files import last_lines, open_file, read_json, write_json_once
from trnslurm.contract.rundir import NOTIFIER, RunFiles
from trnslurm.contract.states import State
from trnslurm.contract.times import utc_time
from trnslurm.contract.variables import Variable
from trnslurm.frozen import Frozen
from trnslurm.node.processes import start_group

EVENT_OF = {
    State.REQUEUED: "requeue",
    State.RESTARTED: "requeue",
    State.COMPLETED: "end",
    State.STOPPED: "end",
    State.CANCELLED: "end",
    State.FAILED: "failure",
    State.TIMEOUT: "failure",
    State.PREEMPTED: "failure",
    State.NODE_FAIL: "failure",
    State.LOST: "failure",
}
"""The event for the final state of an attempt or a run."""
# Shares of the time limit: for each try, and for the pauses between tries.
_TRIES, _PAUSES = (0.4, 0.25, 0.2), (0.03, 0.07)
_AGAIN = (408, 429)  # in addition to 5xx
_LONGEST_URL = 4096
_LONGEST_TEXT = 500
_LINES_WITHOUT_LOSS = 50
_TAIL_BYTES = 300

Message = dict[str, Any]
Way = Callable[[str, Message, float], str]
"""A function that sends a message to a target within a time limit.

It returns a text about the result or raises an error. The built-in ways are such functions, and so
is the object of a notifier plug-in.
"""


class NotifyError(Exception):
    """The reason why a message cannot be sent. It never contains the URL."""


class Recipients(Frozen):
    """The recipients of messages, and the events that they receive."""

    command: str
    webhook: str
    """The path of the file that contains the URL."""
    plugin: str
    """NAME or NAME:TARGET."""
    events: tuple[str, ...]


def read_notify(run: RunFiles) -> Recipients | None:
    """Return the contents of notify.json, or None if it names no recipient."""
    said = read_json(run.notify_file)
    events, ways = said.get("events"), {k: said.get(k) or "" for k in ("plugin", *WAYS)}
    if not (isinstance(events, list) and all(isinstance(to, str) for to in ways.values())):
        return None
    if not events or not any(ways.values()):
        return None
    return Recipients(**ways, events=tuple(map(str, events)))


def compose(
    run: RunFiles,
    event: str,
    *,
    phase: str,
    attempt: int,
    state: str,
    reason: str = "",
    what_next: str = "",
) -> Message:
    """Return the message for an event."""
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
        "next": what_next,
        **{key: _newest(lines, key) for key in ("step", "steps", "loss")},
        "time": utc_time(),
        "directory": str(run.path.resolve()),
    }
    return found | {"text": _line(found)}


def _newest(lines: Sequence[Message], key: str) -> Any:
    """Return a metric's latest value, or None if it is missing or not finite."""
    value = next((line[key] for line in lines if key in line), None)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return value if math.isfinite(value) else None


def _line(message: Message) -> str:
    """Return the message as one line."""
    phase, attempt, nodes = message["phase"], message["attempt"], message["nodes"]
    which = f" (attempt {attempt})" if attempt > 1 else ""
    what = {"start": f"{phase} starts", "stall": "no progress", "notice": "note"}.get(
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
    line += f"; next: {message['next']}" if message["next"] else ""
    # <!channel> and <url> have a meaning for Slack.
    return line.replace("<", "‹").replace(">", "›")[:_LONGEST_TEXT]


def start_sender(run: RunFiles, message: Message, limit_s: float) -> subprocess.Popen[bytes]:
    """Start this program with a message, in its own process group, which SIGTERM does not end.

    Slurm sends SIGTERM to every process of a job that is ending. A blocked signal is inherited.
    """
    held_back = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
    try:
        sender = start_group(
            [sys.executable, "-m", "trnslurm.node.notify", f"{limit_s:.2f}"],
            cwd=run.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert sender.stdin
    with suppress(OSError), sender.stdin:
        sender.stdin.write(_body(message))
    return sender


def end_sender(sender: subprocess.Popen[bytes], within_s: float) -> bool:
    """Wait for a sender, then kill it and all its processes; return whether it had ended."""
    try:
        sender.wait(max(0.0, within_s))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(sender.pid, signal.SIGKILL)
        sender.wait()
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Send the message on stdin; return 1 if no recipient received it."""
    (limit,) = sys.argv[1:] if argv is None else argv
    limit_s, run = float(limit), RunFiles(Path())
    message, notify = json.loads(sys.stdin.buffer.read()), read_notify(run)
    event = message["event"]
    sent: list[str] = []
    ways = ways_to(notify, run) if notify else {}

    def go(name: str) -> None:
        way, target = ways[name]
        try:
            said = way(target, message, limit_s) or "done"
        except NotifyError as error:
            said = str(error)
        except Exception as error:  # its message might contain the URL
            said = f"not sent ({type(error).__name__})"
        else:
            sent.append(name)
        if name in threads:  # otherwise it was too late
            _say(f"notify: {event}: {name}: {said}")

    deadline = time.monotonic() + limit_s
    threads = {name: threading.Thread(target=go, args=[name], daemon=True) for name in ways}
    for thread in threads.values():
        thread.start()
    for name, thread in [*threads.items()]:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            del threads[name]
            _say(f"notify: {event}: {name}: did not finish within {limit_s:.0f} s")
    if sent:
        with suppress(OSError, KeyError):
            told = run.told_file(message["phase"], message["attempt"], event)
            write_json_once(told, {"time": message["time"], "by": sent})
    if len(threads) < len(ways) and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # including the processes of the command
    os._exit(0 if sent else 1)  # does not wait for a pending DNS lookup


def ways_to(notify: Recipients, run: RunFiles) -> dict[str, tuple[Way, str]]:
    """Return, by the name of each way, the function that sends a message, and its recipient."""
    found: dict[str, tuple[Way, str]] = {
        name: (way, target) for name, way in WAYS.items() if (target := getattr(notify, name))
    }
    if notify.plugin:
        name, _, target = notify.plugin.partition(":")
        found[name] = (functools.partial(_by_plugin, run.notifiers / name), target)
    return found


def _by_plugin(place: Path, target: str, message: Message, limit_s: float) -> str:
    """Send the message through a plug-in's function. An error names its package."""
    from importlib.metadata import EntryPoint  # takes 40 ms

    about = read_json(place / NOTIFIER)
    if not about:
        raise NotifyError(f"the run has no code for this plug-in in {place}")
    sys.path.insert(0, str(place.absolute()))  # before the nodes' own packages
    sys.dont_write_bytecode = True
    try:
        send: Way = EntryPoint(place.name, about["entry"], "trnslurm.notifiers").load()
        said = send(target, message, limit_s)
    except (Exception, SystemExit) as error:
        # Other errors' messages might contain a secret, such as a URL with a token.
        shown = type(error) in (RuntimeError, ImportError, ModuleNotFoundError)
        what = f"{type(error).__name__}{f': {error}' if shown else ''}"
        raise NotifyError(f"not sent by {about['package']} ({what})") from error
    return said if isinstance(said, str) else ""


def run_command(command: str, message: Message, limit_s: float) -> str:
    """Run a shell command with the message on stdin; return a text about the result."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {Variable.EVENT: message["event"]},
    )
    assert process.stdin and process.stdout
    tail = b""

    def drain(output: IO[bytes]) -> None:
        nonlocal tail
        while some := os.read(output.fileno(), 1 << 16):
            tail = (tail + some)[-_TAIL_BYTES:]

    # A thread, because processes that the command leaves behind may hold the pipe open.
    reader = threading.Thread(target=drain, args=[process.stdout], daemon=True)
    reader.start()
    with suppress(OSError), process.stdin:
        process.stdin.write(_body(message))
    code = process.wait()
    if code == 0:
        return "done"
    reader.join(1.0)
    said = tail.decode(errors="replace").strip().splitlines()
    last = "".join(c for c in said[-1] if c.isprintable()) if said else ""
    raise NotifyError(f"exit code {code}{f': {last}' if last else ''}")


def read_webhook(path: str | Path) -> str:
    """Return the URL in a webhook's file. Refuse a file that is not private or has no URL."""
    file = Path(os.path.expanduser(path))  # noqa: PTH111  never raises
    try:
        with open_file(file) as stream:
            about, text = os.fstat(stream.fileno()), stream.read(_LONGEST_URL + 1)
    except OSError as error:
        raise NotifyError(f"{file}: {error.strerror}") from None
    if about.st_uid != os.geteuid():
        raise NotifyError(f"{file} belongs to another user: create your own file")
    if stat.S_IMODE(about.st_mode) & 0o077:
        mode = f"{stat.S_IMODE(about.st_mode):04o}"
        raise NotifyError(f"{file} has mode {mode}, and a URL in it is a secret: chmod 600 it")
    url = text.decode("latin-1").strip()
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, whole = urlsplit(""), False
    if not whole or len(text) > _LONGEST_URL or not all("!" <= c <= "~" for c in url):
        raise NotifyError(f"{file}: expected one line with a URL, http:// or https://")
    if parts.username is not None:
        raise NotifyError(f"{file}: its URL contains a user name, which webhooks do not accept")
    return url


def _body(message: Message) -> bytes:
    return f"{json.dumps(message)}\n".encode()


def post(file: str, message: Message, limit_s: float) -> str:
    """Post the message to the URL in a file, with retries; return a text about the result."""
    url, body = read_webhook(file), _body(message)
    host, why, number = urlsplit(url).hostname, "", 0
    for number, share in enumerate(_TRIES, 1):
        why, again = _try(url, body, share * limit_s)
        if not why:
            return f"sent to {host}"
        if not again or number > len(_PAUSES):
            break
        time.sleep(_PAUSES[number - 1] * limit_s)
    tries = f" in {number} tries" if number > 1 else ""
    raise NotifyError(f"not sent to {host}{tries}: {why}")


def _try(url: str, body: bytes, limit_s: float) -> tuple[str, bool]:
    """Send the message once; return why it was not sent, and whether a retry may help."""
    found = [(_late(limit_s), True)]
    # A thread, because a socket's timeout limits a single read, and not the look-up of a name.
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

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """Follows no redirect, because the message is meant for the host in the file."""

        def redirect_request(self, *_: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "trnslurm"}
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        # Only the first lines of the answer are read, whose length http.client limits.
        with urllib.request.build_opener(NoRedirect).open(request, timeout=limit_s):
            return "", False
    except urllib.error.HTTPError as error:
        code = error.code
        error.close()
        word = ""
        with suppress(ValueError):  # not the server's phrase, which may be anything
            word = f" {http.HTTPStatus(code).phrase}"
        if 300 <= code < 400:
            return f"it responded {code}{word}, and redirects are not followed", False
        return f"it responded {code}{word}", code >= 500 or code in _AGAIN
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return f"its certificate is not valid ({reason.verify_message})", False
        why = reason.strerror if isinstance(reason, OSError) else ""
        if not why and isinstance(reason, TimeoutError):  # the socket's has no text
            why = _late(limit_s)
        return why or type(reason).__name__, True


WAYS: Mapping[str, Way] = {"command": run_command, "webhook": post}


def _late(limit_s: float) -> str:
    return f"no answer within {limit_s:.1f} s"


def _say(line: str) -> None:
    """Write a line to the log in one write."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
