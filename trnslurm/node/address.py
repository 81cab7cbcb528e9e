"""Prints the nodes of a job and its master's address, as Slurm knows them.

    python -m trnslurm.node.address hosts NODELIST
    python -m trnslurm.node.address of HOST --nodes=2

`hosts` expands a list in Slurm's notation into names separated by commas. `of` prints a node's IPv4
address: its NodeAddr, resolved on this machine if it is a name. The controller may be too busy for
a moment, for example when many jobs start, so this program asks three times.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Print the names or the address."""
    options = parse(argv)
    if options.what == "hosts":
        print(",".join(ask("hostnames", options.name, retry_s=options.retry_s).split()))
        return 0
    said = ask("node", "-o", options.name, retry_s=options.retry_s)
    address = ipv4(node_addr(said))
    if not address or (options.nodes > 1 and ipaddress.IPv4Address(address).is_loopback):
        print(
            f"error: no usable address for {options.name} (found '{address}'): "
            "set its NodeAddr in slurm.conf",
            file=sys.stderr,
        )
        return 1
    print(address)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="address", allow_abbrev=False)
    parser.add_argument("what", choices=("hosts", "of"))
    parser.add_argument("name", metavar="NODELIST|HOST")
    parser.add_argument("--nodes", type=int, default=1, help="of the job: others must reach it")
    parser.add_argument("--retry-s", type=float, nargs="*", default=[10.0, 30.0], metavar="SECONDS")
    return parser.parse_args(argv)


def ask(*words: str, retry_s: Sequence[float]) -> str:
    """Return what `scontrol show` prints, or exit with its code after the last retry."""
    pauses_s = [*retry_s]
    while True:
        try:
            done = subprocess.run(
                ["scontrol", "show", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:  # as in bash's message
            print(f"scontrol: {error.strerror}", file=sys.stderr)
            sys.exit(127)
        if done.returncode == 0:
            return done.stdout
        if not pauses_s:
            sys.exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
        time.sleep(pauses_s.pop(0))


def node_addr(said: str) -> str:
    """Return the NodeAddr in a line of `scontrol show node -o`, or "" if it is missing."""
    found = re.search(r"(?:^| )NodeAddr=(\S+)", said)
    return found[1] if found else ""


def ipv4(address: str) -> str:
    """Return an IPv4 address as it is, or a name's address; empty if the name has none."""
    try:
        return str(ipaddress.IPv4Address(address))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET) if address else []
    except (OSError, UnicodeError):
        return ""
    return str(found[0][4][0]) if found else ""


if __name__ == "__main__":
    sys.exit(main())
