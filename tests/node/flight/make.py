"""Make the dumps in this directory: `python tests/node/flight/make.py CASE` writes CASE/rank*.

Four workers use Gloo, as no NCCL is needed for it. Gloo records collectives as NCCL does, but
writes no dump by itself: each worker writes one after the timeout, as ProcessGroupNCCL would.
"""

import datetime
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT_S = 3.0
HERE = Path(__file__).resolve().parent


def work(case: str) -> None:
    """Run the steps of a training in which the case's rank leaves the others' path."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank, gradient = dist.get_rank(), torch.ones(8)
    dist.broadcast(gradient, 0)
    begin = time.monotonic()
    try:
        for step in range(3):
            if case == "skips" and (rank, step) == (2, 2):
                break  # it has a batch less
            if case == "other" and (rank, step) == (1, 2):
                dist.broadcast(gradient, 1)
            dist.all_reduce(gradient)
    except RuntimeError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
    time.sleep(max(0.0, begin + 3 * TIMEOUT_S - time.monotonic()))
    file = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank))
    file.write_bytes(neutral(_dump_fr_trace()))
    os._exit(0)


def neutral(dump: bytes) -> bytes:
    """Return a dump without this machine's paths: a text has its length in four bytes before it."""
    for path in {*re.findall(rb"/[\w./-]+\.py", dump)}:
        parts = path.partition(b"/site-packages/")
        new = (
            b"/env" + b"".join(parts[1:])
            if parts[1]
            else b"/home/ada/" + Path(path.decode()).name.encode()
        )
        old, new = (struct.pack("<I", len(text)) + text for text in (path, new))
        dump = dump.replace(old, new)
    return dump


def main() -> None:
    """Start the workers of a case."""
    case = sys.argv[1]
    if "RANK" in os.environ:
        work(case)
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / case
    target.mkdir(exist_ok=True)
    told = {"TORCH_FR_BUFFER_SIZE": "200", "TORCH_FR_DUMP_TEMP_FILE": f"{target}/rank"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run([*command, __file__, case], env=os.environ | told, check=True, timeout=120)


if __name__ == "__main__":
    main()
