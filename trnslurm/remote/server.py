"""The remote side of a connection: runs a command once, however often the connection breaks.

    ~/.cache/trnslurm/asks/TOKEN/
        parcel       what was sent with it
        begun/       made by the one connection that starts the command
        out, err     what it has printed
        exit         how it ended

The command is a separate process, which outlives the connection. A connection sends the output from
where the last one broke, and passes on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trnslurm.contract.variables import Variable
from trnslurm.remote.receive import (
    BEAT,
    BEGUN,
    CHUNK_BYTES,
    DONE,
    END,
    ERR,
    FILE,
    INTERRUPT,
    MARK,
    OUT,
    PARCEL,
    REQUEST,
    read_line,
    receive,
    send,
    write_all,
)

_POLL_S = 0.03
_LOOK_S = 0.3
_BEAT_S = 5.0
_SILENT_S = 60.0
"""The command's process touches `alive` every few seconds, unless it has been killed."""
_ALONE_S = 900.0
"""How long a read-only command keeps running without a connection."""
_KEPT_S = 14 * 86400
_FILE_MIB = 64


def main() -> None:
    """Serve one connection."""
    if sys.argv[1:2] != ["installed"]:  # else receive.py printed the mark
        write_all(1, MARK)
    try:
        _serve()
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        send(END, _json({"error": f"{error.filename or 'connection'}: {error.strerror}"}))
        sys.exit(1)


def _serve() -> None:
    base = Path(__file__).resolve().parents[3]
    send(REQUEST)
    request: dict[str, Any] = json.loads(read_line())
    ask = base / "asks" / str(request["token"])
    ask.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_old(base)
    if request["begun"] and not (ask / "begun").exists():
        send(END, _json({"error": "the host no longer has a record of the command"}))
        return
    if request["parcel"] and not (ask / "parcel").exists():
        receive(ask / "parcel", PARCEL)
    _prepare(ask, request)
    try:
        (ask / "begun").mkdir()
    except FileExistsError:
        pass
    else:
        _begin(ask, request)
    send(BEGUN)
    _show(ask, {"out": request["out"], "err": request["err"]})


def _remove_old(base: Path) -> None:
    """Remove old requests whose outcome was never fetched, and launchers no longer in use."""
    (Path(__file__).resolve().parents[2]).touch()
    for old in (*(base / "asks").iterdir(), *base.glob("launcher-*")):
        with contextlib.suppress(OSError):
            used = old / "alive" if (old / "alive").exists() else old
            if time.time() - used.stat().st_mtime > _KEPT_S:
                shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()


def _prepare(ask: Path, request: dict[str, Any]) -> None:
    """Create the files that the command and its connections share. Several processes may do so."""
    for name in ("out", "err", "alive", "seen"):
        (ask / name).touch()
    (ask / "files").mkdir(exist_ok=True)
    for name, text in request["site"].items():
        file = ask / "site" / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".{socket.gethostname()}-{os.getpid()}")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(file)


def _begin(ask: Path, request: dict[str, Any]) -> None:
    """Start the command in a separate session, where a hang-up does not reach it."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    code = 1
    try:
        code = _oversee(ask, request)
    finally:
        temporary = ask / ".code"
        temporary.write_text(str(code))
        temporary.replace(ask / "exit")
        os._exit(0)


def _oversee(ask: Path, request: dict[str, Any]) -> int:
    """Run the command and pass on Ctrl-C. End a read-only command whose output nobody reads."""
    environment = dict(os.environ)
    if (ask / "site").is_dir():
        own = environment.get(Variable.PATH)
        environment[Variable.PATH] = f"{ask / 'site'}{(own and f':{own}') or ''}"
    if request["cluster"]:
        environment[Variable.CLUSTER] = request["cluster"]
    launcher = Path(__file__).resolve().parents[2]
    argv = [sys.executable, "-X", "utf8", "-I", str(launcher), "run", *request["argv"]]
    with (ask / "out").open("wb") as out, (ask / "err").open("wb") as err:
        child = subprocess.Popen(
            argv,
            cwd=ask / "files",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            process_group=0,
        )
        told, touched = False, 0.0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(_LOOK_S)
            with contextlib.suppress(OSError):
                if time.monotonic() - touched > _BEAT_S:
                    touched = time.monotonic()
                    os.utime(ask / "alive")
                    os.utime(launcher)  # keeps _remove_old away
                alone_s = time.time() - (ask / "seen").stat().st_mtime
                forgotten = request["shows"] and alone_s > _ALONE_S
                if (forgotten or (ask / "interrupt").exists()) and not told:
                    told = True
                    os.killpg(child.pid, signal.SIGINT)


def _show(ask: Path, offsets: dict[str, int]) -> None:
    """Send the command's output from these offsets, until it has ended and its end was received."""
    beat, alive, alive_at = 0.0, 0.0, time.monotonic()
    with (ask / "out").open("rb") as out, (ask / "err").open("rb") as err:
        streams = ((OUT, out, offsets["out"]), (ERR, err, offsets["err"]))
        for _, stream, offset in streams:
            stream.seek(offset)
        while True:
            code = _code(ask)  # before reading: nothing is printed after the exit
            said = [(kind, stream.read(CHUNK_BYTES)) for kind, stream, _ in streams]
            for kind, data in said:
                if data:
                    send(kind, data)
            more = any(data for _, data in said)
            if code is not None and not more:
                break
            now = time.monotonic()
            if now - beat > _BEAT_S:
                send(BEAT)
                os.utime(ask / "seen")
                beat = now
            if (seen := (ask / "alive").stat().st_mtime) != alive:
                alive, alive_at = seen, now
            if code is None and now - alive_at > _SILENT_S:
                send(END, _json({"error": f"the command was killed on {socket.gethostname()}"}))
                return
            if _told(0 if more else _POLL_S) == INTERRUPT:
                (ask / "interrupt").touch()
    for file in sorted((ask / "files").iterdir()):
        if file.is_file() and file.stat().st_size < _FILE_MIB << 20:
            send(FILE, file.name.encode() + b"\n" + file.read_bytes())
    send(END, _json({"code": code}))
    if _told(_SILENT_S) == DONE:
        shutil.rmtree(ask, ignore_errors=True)


def _code(ask: Path) -> int | None:
    try:
        return int((ask / "exit").read_text())
    except FileNotFoundError:
        return None


def _told(wait_s: float) -> bytes:
    """Return what the other side sends within `wait_s`. Exit if the connection has ended."""
    if not select.select([0], [], [], wait_s)[0]:
        return b""
    word = os.read(0, 1)
    if not word:
        sys.exit(0)
    return word


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()
