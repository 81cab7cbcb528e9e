"""torchrun without its imports: PyTorch is imported once, and every launch is a fork of that.

Importing PyTorch and PyTorch/XLA takes a worker longer than most trainings of the tests. A server
that has imported them, and opened no device, forks a process for each launch; in it torchrun's own
code runs, which forks the workers (its options --run-path and --start-method=fork). Tests that are
about torchrun, signals or the death of processes start it as users do.

    done = torchrun(["--nproc_per_node=2", "train.py"], cwd=…, env=…, timeout_s=600, xla=True)
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What differs before anything is imported: each value has a server of its own.
_AT_IMPORT = (
    "PYTHONPATH", "PJRT_DEVICE", "XLA_FLAGS", "OMP_NUM_THREADS", "USE_TORCH_XLA",
    "ACCELERATE_USE_FSDP",
)  # fmt: skip
_MODELS = ("gpt2", "bert", "llama")
_servers: dict[tuple[Any, ...], subprocess.Popen[str]] = {}


def torchrun(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float, xla: bool
) -> subprocess.CompletedProcess[str]:
    """Run `python -m torch.distributed.run ARGUMENTS`; no process of it is left afterwards."""
    key = (xla, *(env.get(name) for name in _AT_IMPORT))
    server = _servers.get(key)
    if server is None or server.poll() is not None:
        server = _servers[key] = _start(env, xla=xla)
    log = cwd / f".torchrun-{os.getpid()}.log"
    request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "log": str(log)}
    request["timeout_s"] = timeout_s
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline() or "-1")
    output = log.read_text()
    log.unlink()
    return subprocess.CompletedProcess(list(arguments), code, stdout=output)


def _start(env: Mapping[str, str], *, xla: bool) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__, "xla" if xla else "torch"],
        env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    with server:
        server.kill()


def main() -> None:
    """Serve launches, one line of JSON each, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()  # what is imported stays; every fork would look through it at its end
    if sys.argv[1] == "xla":
        importlib.import_module("torch_xla.distributed.xla_backend")
    for model in _MODELS:
        importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    importlib.import_module("torch.distributed.run")
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            _become_torchrun(request)
            return
        answers.write(f"{_wait(pid, request['timeout_s'])}\n")
        answers.flush()


def _wait(pid: int, timeout_s: float) -> int:
    """Return the exit code of a launch; all that it started ends with it."""
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
    signal.alarm(int(timeout_s))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        signal.alarm(0)


def _become_torchrun(request: Mapping[str, Any]) -> None:
    from torch.distributed import run

    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, log, log)):
        os.dup2(descriptor, number)
    os.chdir(request["cwd"])
    for name in set(os.environ) - set(request["env"]) - set(_AT_IMPORT):
        del os.environ[name]
    os.environ.update({k: v for k, v in request["env"].items() if k not in _AT_IMPORT})
    arguments = ["--run-path", "--start-method=fork", *request["arguments"]]
    script = run.parse_args(arguments).training_script
    paths = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(script).parent), *filter(None, paths)]
    run.main(arguments)


if __name__ == "__main__":
    main()
