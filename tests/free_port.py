"""Ports for servers of tests."""

from uuid import uuid4

from trnslurm.node import ports


def free_port() -> int:
    """Choose one that the kernel gives to nobody else before the server has started."""
    return ports.choose(uuid4().hex, 0, 1, None)[0]
