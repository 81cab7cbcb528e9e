"""triage reads what the installed torchrun says of a worker that dies without a word."""

import os
import subprocess
import sys
from pathlib import Path

from trnslurm.node.triage.diagnosis import diagnose

WORKER = """\
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


def test_killed_worker_is_named_though_the_other_has_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "worker.py").write_text(WORKER)
    log = tmp_path / "logs/train-1-node0.log"
    with log.open("wb") as stream:
        subprocess.run(
            [sys.executable, "-m", "trnslurm.node.torchrun", "--standalone", "--nproc_per_node=2",
             "worker.py"],
            cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=stream, stderr=subprocess.STDOUT, timeout=600, check=False,
        )  # fmt: skip
    found = diagnose(tmp_path, "train", 1)
    assert found is not None, log.read_text()
    assert (found.rank, found.node, found.name) == (1, 0, "killed-by-hand"), log.read_text()
    assert found.cause.startswith("the worker was killed by signal 9 (SIGKILL) from outside, not ")
    assert found.cause.endswith("by the kernel's OOM killer")
    assert found.when and abs(found.when - log.stat().st_mtime) < 60
