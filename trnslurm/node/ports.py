"""Chooses the TCP ports of a job's rendezvous on the node that will listen on them.

    python -m trnslurm.node.ports JOB_ID RESTART_COUNT

If the ports are free, the choice depends only on the job and the restart, so that logs are easy to
compare. Another restart gets other ports, because a process of the earlier attempt may still hold
its ports.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import pwd
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PREFERRED = (range(20000, 30000), range(10000, 20000), range(1024, 65536))
MIN_CHOICE = 1000
STRIDE = 64
"""The distance between the ports of two restarts, for ports that are not free."""
_LISTENS = "0A"
EPHEMERAL_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # for IPv6 as well


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ports, separated by a space."""
    options = parse(argv)
    print(*choose(options.job_id, options.restart_count, options.count, options.address))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="ports")
    parser.add_argument("job_id", metavar="JOB_ID", help="any text")
    parser.add_argument("restart_count", metavar="RESTART_COUNT", type=int)
    parser.add_argument("--count", type=int, default=2, choices=range(1, STRIDE + 1), metavar="N")
    parser.add_argument("--address", help="numeric address of this node")
    return parser.parse_args(argv)


def choose(job_id: str, restart_count: int, count: int, address: str | None) -> list[int]:
    """Return the first free ports from this attempt's position in the range, or exit."""
    ephemeral = ephemeral_range()
    ports = usable_ports(ephemeral)
    chosen: list[int] = []
    for offset in range(len(ports)):
        port = port_of(job_id, restart_count * STRIDE + offset, ports)
        if is_free(port, address):
            chosen.append(port)
            if len(chosen) == count:
                return chosen
    sys.exit(
        f"error: ports: found {len(chosen)} of {count} free ports among {len(ports)} outside the "
        f"ephemeral range {ephemeral.start}-{ephemeral.stop - 1} (net.ipv4.ip_local_port_range)"
    )


def port_of(what: str, number: int, ports: Sequence[int]) -> int:
    """Return one of these ports by a name and a number. The next number gets the next port."""
    digest = hashlib.sha256(what.encode(errors="surrogateescape")).digest()
    return ports[(int.from_bytes(digest[:8], "big") + number) % len(ports)]


def ephemeral_range() -> range:
    """Return the ports that the kernel may use for an outgoing connection at any time."""
    first, last = EPHEMERAL_FILE.read_text(encoding="ascii").split()
    return range(int(first), int(last) + 1)


def usable_ports(ephemeral: range) -> list[int]:
    """Return the first preferred range that has enough ports outside `ephemeral`."""
    outside: list[int] = []
    for preferred in PREFERRED:
        outside = [port for port in preferred if port not in ephemeral]
        if len(outside) >= MIN_CHOICE:
            break
    return outside


def is_free(port: int, address: str | None = None, *, lingers: bool = True) -> bool:
    """Check whether a server could listen on the port, over IPv4 and IPv6 (and on the address).

    With `lingers`, a port whose last connections linger is not free, as for a server without
    SO_REUSEADDR.
    """
    if address and not can_bind(address_family(address), address, port, lingers=lingers):
        return False
    return can_bind(socket.AF_INET, "0.0.0.0", port, lingers=lingers) and (
        not socket.has_ipv6 or can_bind(socket.AF_INET6, "::", port, lingers=lingers)
    )


def address_family(address: str) -> socket.AddressFamily:
    """Return an address's family, IPv4 or IPv6."""
    try:
        return socket.getaddrinfo(address, None, flags=socket.AI_NUMERICHOST)[0][0]
    except socket.gaierror as error:
        raise SystemExit(f"error: ports: {address} is not a numeric address") from error


def can_bind(
    family: socket.AddressFamily, address: str, port: int, *, lingers: bool = True
) -> bool:
    """Try to bind the port, with `lingers` without SO_REUSEADDR."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(not lingers))
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            server.bind((address, port))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL and address != "::":
            raise SystemExit(f"error: ports: {address} is not an address of this node") from error
        # On a host without IPv6, the port cannot be taken there.
        return error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
    return True


def who_holds(port: int) -> str:
    """Return which process listens on a port of this node, as far as /proc shows it."""
    users: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            lines = Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]
            # Columns of proc_pid_net(5): 1 local address, 3 state, 7 user, 9 inode.
            for columns in (line.split() for line in lines):
                if columns[3] == _LISTENS and int(columns[1].rpartition(":")[2], 16) == port:
                    users[f"socket:[{columns[9]}]"] = int(columns[7])
    for fd in Path("/proc").glob("[0-9]*/fd/*") if users else ():
        with suppress(OSError):  # it belongs to another user, or has ended
            if str(fd.readlink()) in users:
                process = fd.parents[1]
                name = (process / "comm").read_text(errors="replace").strip()
                job = re.search(
                    rb"\0SLURM_JOB_ID=(\d+)", b"\0" + (process / "environ").read_bytes()
                )
                of_job = f", of job {job[1].decode()}" if job else ""
                return f"{name} (process {process.name}{of_job})"
    for user in users.values():
        with suppress(KeyError):
            return f"a process of the user {pwd.getpwuid(user).pw_name}"
        return f"a process of the user {user}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
