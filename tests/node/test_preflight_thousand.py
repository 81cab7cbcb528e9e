"""A preflight of 1,000 nodes: they meet over real sockets, all in this process."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trnslurm.node.meeting import Connection, Meeting, Rendezvous, join
from trnslurm.node.preflight.program import answer_to, some_unfit
from trnslurm.node.preflight.verdict import NodeReport, judge

from ..free_port import free_port

NUMBER = 1000
HOSTS = tuple(f"a-long-queue-dy-a-long-resource-{n}" for n in range(1, NUMBER + 1))
MISSING = {"dataset": "/fsx/data is not there"}


@pytest.fixture
def node_0() -> Rendezvous:
    return Rendezvous(
        purpose="preflight", node=0, hosts=HOSTS, address="127.0.0.1", port=free_port(),
        run=Path("/fsx/runs/one"), phase="train", attempt=1,
    )  # fmt: skip


@pytest.fixture
def many_files() -> Iterator[None]:
    """Both ends of each connection are open files of this process, as they are not on a cluster."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * NUMBER:
        pytest.skip(f"at most {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * NUMBER), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def node(number: int, problems: dict[str, str] | None = None) -> dict[str, Any]:
    return {"node": number, "host": HOSTS[number], "problems": problems or {}, "seconds": 0.1}


def test_all_meet_and_are_answered(node_0: Rendezvous, many_files: None) -> None:
    """The answers are sent once all are there: every node's connection is open by then."""

    def hear(connection: Connection, deadline: float) -> dict[str, Any]:
        return connection.receive(deadline - time.monotonic())

    meeting = Meeting(node_0, hear)
    deadline = time.monotonic() + 60
    meeting.open(deadline)
    answers: dict[int, dict[str, Any]] = {}

    def take_part(number: int) -> None:
        with join(replace(node_0, node=number), reach_s=45) as connection:
            connection.send(node(number))
            answers[number] = connection.receive(60)

    others = [threading.Thread(target=take_part, args=(n,)) for n in range(1, NUMBER)]
    for other in others:
        other.start()
    meeting.wait(deadline)
    meeting.answer({n: {"you": report["host"]} for n, report in dict(meeting.heard).items()})
    for other in others:
        other.join()
    assert answers == {n: {"you": HOSTS[n]} for n in range(1, NUMBER)}


def test_what_all_send_does_not_grow_with_their_number(node_0: Rendezvous) -> None:
    assert len(node_0.name) < 110
    assert replace(node_0, hosts=(*HOSTS[:-1], "another")).name != node_0.name


def test_each_is_told_of_some_others_and_not_of_itself() -> None:
    nodes = [NodeReport(**node(n, MISSING if n else None)) for n in range(NUMBER)]
    assert judge(nodes, {}, 20.0) == list(HOSTS[1:])
    unfit = some_unfit(nodes)
    for one in (nodes[0], nodes[1], nodes[500]):
        others = answer_to(one, unfit)["others"]
        assert len(others) == 8 and not any(o.startswith(f"{one.host}: ") for o in others)
