"""Write down what this worker sees, then do what the recipe's keys say. Standard library only."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    keys = plan["train"]
    phase, rank = os.environ["TRNSLURM_PHASE"], int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) != plan["workers"]:
        sys.exit(f"error: {os.environ['WORLD_SIZE']} workers, the plan has {plan['workers']}")
    if keys["deaf"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_facts(f"facts-{phase}-{os.environ['TRNSLURM_ATTEMPT']}-{rank}.json")
    if phase == "precompile" and "TRNSLURM_COMPILE_CACHE" in os.environ:
        cache = Path(os.environ["TRNSLURM_COMPILE_CACHE"]).expanduser()
        (cache / str(rank) / "graph").write_text("compiled\n", encoding="utf-8")
    if keys["say"]:
        print(keys["say"], flush=True)
    fails = phase == keys["fail_phase"]
    if fails and rank == keys["fail_rank"]:
        raise ValueError(f"rank {rank} was told to fail")
    while fails or (keys["wait"] and not Path("go").exists()):
        time.sleep(0.05)


def write_facts(name: str) -> None:
    """Replace the file whole, so that no reader sees half of it."""
    facts = {
        "environment": dict(os.environ),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cwd": str(Path.cwd()),
    }
    temporary = Path(f".{name}")
    temporary.write_text(json.dumps(facts), encoding="utf-8")
    temporary.replace(name)


main()
