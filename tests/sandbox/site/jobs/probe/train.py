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
    attempt = int(os.environ["TRNSLURM_ATTEMPT"])
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
        raise KeyError("told to fail")
    if rank == 0 and attempt in keys["save"]:
        Path(f"checkpoints/step-{attempt:08d}").mkdir(parents=True)
    if rank == 0 and attempt == 1 and keys["bad_node"] >= 0:
        condemn(keys["bad_node"])
    if attempt in keys["fail_attempts"]:
        fails = True
        if rank == 0:
            while keys["wait"] and not may_go(attempt):
                time.sleep(0.05)
            sys.exit(f"error: attempt {attempt} was told to fail")
    while fails or (keys["wait"] and not may_go(attempt)):
        time.sleep(0.05)
        if keys["stop"] and Path(f"state/stop-train-{attempt}.json").exists():
            stop(rank, attempt)
            break


def may_go(attempt: int) -> bool:
    """Whether the test lets every attempt go on, or this one."""
    return Path("go").exists() or Path(f"go-{attempt}").exists()


def stop(rank: int, attempt: int) -> None:
    """Save, and say so, as a training does that was asked to stop."""
    if rank == 0:
        Path(f"checkpoints/step-{attempt * 10:08d}").mkdir(parents=True)
        stopped = {"step": attempt * 10, "saved": True, "time": time.time()}
        Path(f"state/stopped-train-{attempt}.json").write_text(json.dumps(stopped))


def condemn(node: int) -> None:
    """Write what a preflight does that found a node bad."""
    nodes = [
        {"node": n, "host": f"host-{n}", "ok": n != node, "problems": [], "seconds": 0.1}
        for n in range(int(os.environ["WORLD_SIZE"]))
    ]
    nodes[node]["problems"] = ["a device is missing"]
    report = {"nodes": nodes, "bad": [f"host-{node}"]}
    Path("state/preflight-train-1.json").write_text(json.dumps(report))


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
