"""torchrun, which ends at once: what its process says and returns is torchrun's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trnslurm

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
    (tmp_path / "torch/distributed").mkdir(parents=True)
    for package in ("torch", "torch/distributed"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "torch/distributed/run.py").write_text(
        "import atexit, sys\natexit.register(print, 'cleaned up')\n"
        f"def main():\n    assert sys.argv[1:] == ['--nnodes=2']\n    {body}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "trnslurm.node.torchrun", "--nnodes=2"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == code
    assert ended.stdout.replace("cleaned up\n", "").endswith(says)
    assert "cleaned up" in ended.stdout
