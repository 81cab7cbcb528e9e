"""Runs commands on another host with OpenSSH, and explains failures.

Names, users, keys, agents and host keys are left to ssh: its own configuration applies.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trnslurm.contract.files import is_private, make_private
from trnslurm.contract.variables import Variable
from trnslurm.errors import ConnectionLostError, RemoteError
from trnslurm.records.foreign import printable
from trnslurm.remote import receive
from trnslurm.runs.find import state_home

_CONNECT_S, _ALIVE_S, _MISSED = 15, 10, 3
_KEPT = "10m"
_SOCKET_MAX = 104 - 17  # ssh first uses a longer, temporary name
_PYTHONS = ("python3", "python3.13", "python3.12", "python3.11")
_UNABLE = 41
NO_LAUNCHER = 42
"""The exit code that asks for the launcher to be sent first."""
# Errors of ssh for which retrying is useless, and what to do.
_HOPELESS = {
    r"Permission denied[ ,(]+(publickey|password|keyboard|please|gssapi|host)": (
        "`ssh {host}` must work without trnslurm: check your keys"
    ),
    r"Host key verification failed|HOST IDENTIFICATION HAS CHANGED": (
        "run `ssh {host}` once, and check its host key"
    ),
    r"Bad configuration option|Bad owner or permissions|no such identity|terminating, \d+ bad": (
        "check your ssh configuration"
    ),
}
_UNKNOWN = {
    "Could not resolve hostname": "check the name, and its entry in ~/.ssh/config if it is an alias"
}

# For bash, whatever the account's shell. A login shell is used only if Slurm's commands are not on
# PATH without one: it may take seconds and print anything.
_SCRIPT = """\
umask 077
command -v sbatch > /dev/null 2>&1 || [ -x {sbatch} ] || [ -n "${{TRNSLURM_LOGIN-}}" ] ||
  TRNSLURM_LOGIN=1 exec bash -lc "$BASH_EXECUTION_STRING" "$0" "$@"
unset TRNSLURM_LOGIN
pythons=({pythons})
find_python() {{
  for word in "${{pythons[@]}}"; do
    python=$(command -v "$word" 2> /dev/null) &&
      "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1 && return
  done
  return 1
}}
if ! find_python; then
  {{
:
{activate}
  }} > /dev/null 2>&1 < /dev/null
  find_python || exit {unable}
fi
launcher=${{XDG_CACHE_HOME:-$HOME/.cache}}/trnslurm/{launcher}
if [ -f "$launcher/__main__.py" ]; then
  exec "$python" -X utf8 -I "$launcher" {words}
fi
[ {attached} = 0 ] || exit {no_launcher}
exec "$python" -X utf8 -I -c "$(printf %s {receiver} | base64 -d)" "$launcher"
"""


def check_host(host: str, where: str) -> str:
    """Return a host name. Reject a string that ssh would misread."""
    if host.startswith("-") or not host.isprintable() or re.search(r"\s", host):
        raise RemoteError(f"{where}: {printable(host)!r} is not a host: expected HOST or USER@HOST")
    return host


@dataclass(frozen=True)
class Place:
    """A host, and its settings in a profile."""

    host: str
    bin_dir: str = ""
    python: str = ""
    activate: tuple[str, ...] = ()

    @cached_property
    def _settings(self) -> dict[str, str]:
        """Return ssh's own configuration for this host."""
        try:
            done = subprocess.run(
                [*_ssh(), "-G", "--", self.host],
                capture_output=True,
                text=True,
                timeout=30,
                errors="replace",
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = getattr(error, "strerror", None) or "does not answer"
            raise RemoteError(f"{_ssh()[0]}: {why}: --on requires OpenSSH") from None
        if done.returncode:
            raise RemoteError(failure(self.host, done.stderr))
        lines = (line.partition(" ") for line in done.stdout.splitlines())
        return {key: value for key, _, value in lines}

    def _options(self) -> list[str]:
        """Return options that ssh's configuration does not set: limits, a shared connection."""
        own = self._settings
        options = {} if sys.stdin.isatty() else {"BatchMode": "yes"}
        if own.get("connecttimeout", "none") == "none":
            options["ConnectTimeout"] = str(_CONNECT_S)
        if own.get("serveraliveinterval", "0") == "0":
            options |= {"ServerAliveInterval": str(_ALIVE_S), "ServerAliveCountMax": str(_MISSED)}
        if own.get("controlpath", "none") == "none" and (directory := _sockets()):
            options |= {
                "ControlMaster": "auto",
                "ControlPersist": _KEPT,
                "ControlPath": f"{directory}/%C",
            }
        return [f"-o{key}={value}" for key, value in options.items()]

    def argv(
        self, launcher: str, words: Sequence[str] = (), *, terminal: bool = False
    ) -> list[str]:
        """Return the command that starts the launcher on the host.

        With `words`, the launcher runs this command line, attached to our stdin.
        """
        script = _SCRIPT.format(
            sbatch=shlex.quote(f"{self.bin_dir}/sbatch"),
            pythons=shlex.join([*_PYTHONS, *([self.python] if self.python else [])]),
            activate="\n".join(self.activate),
            unable=_UNABLE,
            launcher=launcher,
            words=shlex.join(words),
            attached=int(bool(words)),
            no_launcher=NO_LAUNCHER,
            receiver=_coded(Path(receive.__file__).read_text()),
        )
        # Any shell accepts this; base64 has neither quotes nor newlines.
        decode = """exec bash -c 'eval "$(printf %s "$1" | base64 -d)"' trnslurm"""
        how = "-t" if terminal else "-T"
        return [*_ssh(), *self._options(), how, "--", self.host, f"{decode} {_coded(script)}"]

    def forget(self) -> None:
        """Close the shared connection, so that the next connection is new.

        Other users of the old connection keep it, because ssh's own configuration may have set it
        up.
        """
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [*_ssh(), *self._options(), "-O", "stop", "--", self.host],
                capture_output=True,
                timeout=5,
                stdin=subprocess.DEVNULL,
                check=False,
            )


def _ssh() -> list[str]:
    return shlex.split(os.environ.get(Variable.SSH) or "ssh")


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _sockets() -> str:
    """Return a private directory for the sockets of shared connections; empty if none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime, "trnslurm") if runtime else state_home() / "ssh"
    if len(str(directory)) + 41 > _SOCKET_MAX:
        return ""
    try:
        make_private(directory)
    except OSError:
        return ""
    # ssh expands percent signs.
    return str(directory) if is_private(directory) and "%" not in str(directory) else ""


def failure(host: str, stderr: str) -> str:
    """Return ssh's error as one line, and what to do."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    for pattern, advice in (_HOPELESS | _UNKNOWN).items():
        if line := next((line for line in said if re.search(pattern, line)), ""):
            return f"{host}: {printable(line)}: {advice.format(host=host)}"
    return f"{host}: {printable(said[-1]) if said else 'the connection broke'}"


def ended(place: Place, code: int, stderr: str, noise: bytes, *, reached: bool) -> RemoteError:
    """Return the error for a connection that ended before its command did.

    `reached` means that the launcher had answered.
    """
    host = place.host
    if reached and code == 1:
        said = stderr.strip().splitlines()[-1:]
        return RemoteError(f"{host}: the launcher failed there: {printable(' '.join(said))}")
    if reached and code >= 0:
        code = 255
    if code == _UNABLE:
        more = f", {place.python}" if place.python else ""
        return RemoteError(
            f"{host} has no Python 3.11 or newer ({', '.join(_PYTHONS)}{more}): set python: in "
            "the cluster profile to an interpreter that its login node has too"
        )
    if code != 255 and code >= 0:
        said = stderr.split() or noise.decode(errors="replace").split()
        words = printable(" ".join(said[-40:])) or f"exit code {code}"
        return RemoteError(f"{host}: the shell there did not run the command: {words}")
    words = failure(host, stderr)
    hopeless = any(re.search(pattern, stderr) for pattern in _HOPELESS)
    return RemoteError(words) if hopeless else ConnectionLostError(words)
