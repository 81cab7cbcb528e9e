"""Prints the network interface through which this node reaches the master, for Gloo.

    python -m trnslurm.node.interface MASTER_ADDR

It runs no commands, because an image may lack iproute2.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator, Sequence

_SIOCGIFCONF = 0x8912  # netdevice(7)
_ENTRY = struct.Struct("16s4x4s16x")  # struct ifreq: the name, and the address in its sockaddr
_MOST = 256  # a p5.48xlarge has 32 cards


def main(argv: Sequence[str] | None = None) -> int:
    """Print the interface's name."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1:
        print("usage: interface MASTER_ADDR", file=sys.stderr)
        return 2
    try:
        print(interface_to(words[0]))
    except (OSError, ValueError) as error:
        print(f"error: no network interface reaches {words[0]}: {error}", file=sys.stderr)
        return 1
    return 0


def interface_to(master: str) -> str:
    """Return the interface whose address the kernel uses to reach an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((str(ipaddress.IPv4Address(master)), 9))  # sends nothing
        own: str = probe.getsockname()[0]
        if ipaddress.IPv4Address(own).is_loopback:
            return "lo"  # serves all of 127.0.0.0/8, but has one address
        for name, address in _addresses(probe):
            if address == own:
                return name
    raise ValueError(f"no interface has the address {own}")


def _addresses(probe: socket.socket) -> Iterator[tuple[str, str]]:
    """Yield (interface, IPv4 address) for each address of each interface."""
    entries = array.array("B", bytes(_MOST * _ENTRY.size))
    at, length = entries.buffer_info()
    done = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, at))
    filled = struct.unpack("iP", done)[0]
    for name, address in _ENTRY.iter_unpack(entries.tobytes()[:filled]):
        # A second address may have a label, such as eth0:1.
        yield name.split(b"\0", 1)[0].decode().partition(":")[0], socket.inet_ntoa(address)


if __name__ == "__main__":
    sys.exit(main())
