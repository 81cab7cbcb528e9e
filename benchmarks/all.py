"""Every benchmark in turn, and one page of all tables with the machine, the date and the versions.

    .venv/bin/python benchmarks/all.py -o benchmarks.md

`make bench-all` also passes the peers that have separate environments. If a benchmark fails, the
page and the exit status say so, and the others still run. The page is written after each benchmark,
so that an interruption loses only one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import reporting

SCRIPTS = (
    "startup",
    "launcher",
    "training",
    "checkpoint_stall",
    "mirror",
    "packing",
    "restart",
    "scale",
    "first_node",
)
PACKAGES = ("torch", "torch_xla", "transformers", "accelerate", "tokenizers", "tiktoken", "numpy")


def main() -> int:
    """Run what is asked for, write the page, and return how many failed, at most 1."""
    parser = argparse.ArgumentParser(
        description="Run all benchmarks and write one page.",
        epilog="Example: benchmarks/all.py --only training --rounds 3 -o training.md",
    )
    parser.add_argument("-o", "--output", type=Path, help="write it here (standard output)")
    parser.add_argument("--rounds", type=reporting.at_least_one, help="(each one's own)")
    parser.add_argument("--only", choices=SCRIPTS, action="append", help="repeatable (all)")
    parser.add_argument("--torchx", metavar="PYTHON", help="one that has torchx")
    parser.add_argument("--datasets", metavar="PYTHON", help="one that has datasets and tokenizers")
    options = parser.parse_args()
    peers = {"startup": options.torchx, "packing": options.datasets}
    page, failed = [describe_machine()], 0
    for name in options.only or SCRIPTS:
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), "--json"]
        command += ["--rounds", str(options.rounds)] if options.rounds else []
        command += ["--peer", peers[name]] if peers.get(name) else []
        print(f"{name} …", file=sys.stderr, flush=True)
        begun = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.monotonic() - begun
        if done.returncode:
            failed = 1
            said = (done.stdout + done.stderr).strip().splitlines() or [f"exit {done.returncode}"]
            text = said[-1]
            print(f"{name}: {text}", file=sys.stderr)
        else:
            result = json.loads(done.stdout)
            table = reporting.table(result["rows"], result["columns"])
            text = f"{result['title']}\n\n{table}"
        page.append(f"## {name}\n\n{indented(text)}\n\nTook {seconds:.0f} s.")
        if options.output:
            options.output.write_text("\n\n".join(page) + "\n")
    if options.output:
        print(f"written: {options.output}", file=sys.stderr)
    else:
        print("\n\n".join(page))
    return failed


def describe_machine() -> str:
    """Say where and with what the tables were made."""
    load = os.getloadavg()[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return (
        f"# Benchmarks\n\n{time.strftime('%Y-%m-%d')}, {processor()}, {os.cpu_count()} cores, "
        f"{memory:.0f} GiB, Linux {platform.release()}, load {load:.1f} before.\n\n"
        f"{', '.join(versions)}."
    )


def processor() -> str:
    """Return what Linux calls the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def indented(text: str) -> str:
    """Return text as Markdown shows it unchanged."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
