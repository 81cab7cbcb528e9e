"""torchrun, which ends at once: what its process says and returns is torchrun's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trnslurm

from ..free_port import free_port

ROOT = Path(trnslurm.__file__).parents[1]


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("print('done')", 0, "done\n"),
        ("raise SystemExit(2)", 2, ""),
        ("raise SystemExit('no such script')", 1, "no such script\n"),
        ("raise RuntimeError('rank 1 failed')", 1, "RuntimeError: rank 1 failed\n"),
    ],
)
def test_end(tmp_path: Path, body: str, code: int, says: str) -> None:
    (tmp_path / "torch/distributed/elastic/utils").mkdir(parents=True)
    for package in ("", "distributed/", "distributed/elastic/", "distributed/elastic/utils/"):
        (tmp_path / "torch" / package / "__init__.py").touch()
    (tmp_path / "torch/distributed/elastic/utils/store.py").write_text("barrier = print")
    (tmp_path / "torch/distributed/run.py").write_text(
        "import atexit, sys\natexit.register(print, 'cleaned up')\n"
        f"def main():\n    assert sys.argv[1:] == ['--nnodes=2']\n    {body}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "trnslurm.node.torchrun", "--nnodes=2"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ended.returncode == code
    assert ended.stdout.replace("cleaned up\n", "").endswith(says)
    assert "cleaned up" in ended.stdout


SLOW = """
import os, time
from torch.distributed.elastic.utils import store as store_util
def barrier(store, world_size, key_prefix, barrier_timeout):
    last = store_util._barrier_nonblocking(store, world_size, key_prefix)
    time.sleep(float(os.environ["LATE_S"]))
    store.wait([last])
store_util.barrier = barrier
import runpy
runpy.run_module("trnslurm.node.torchrun", run_name="__main__")
"""


def test_the_store_stays_until_the_others_have_left(tmp_path: Path) -> None:
    """The second node is late to read from the store that the training has ended."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "train.py").touch()
    port = free_port()
    nodes = []
    for node in ("0", "1"):
        words = [f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        own = {"PYTHONPATH": str(ROOT), "SLURM_NODEID": node, "LATE_S": node}
        nodes.append(
            subprocess.Popen(
                [sys.executable, "slow.py", "--nnodes=2", *words, "train.py"],
                cwd=tmp_path, env=os.environ | own,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    said = [node.communicate(timeout=600)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0] and "Error" not in "".join(said), said
