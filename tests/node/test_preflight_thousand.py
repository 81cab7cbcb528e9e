"""A preflight of 1,000 nodes: they meet over real sockets, all in this process."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trnslurm.node.preflight.meeting import Host, report_to
from trnslurm.node.preflight.program import Job, answer_of, named_of
from trnslurm.node.preflight.verdict import Node, judge

from ..free_port import free_port

NUMBER = 1000
HOSTS = tuple(f"a-long-queue-dy-a-long-resource-{n}" for n in range(1, NUMBER + 1))
MISSING = {"dataset": "/fsx/data is not there"}


@pytest.fixture
def job() -> Job:
    return Job(
        node=0, hosts=HOSTS, address="127.0.0.1", port=free_port(), run=Path("/fsx/runs/one"),
        phase="train", attempt=1,
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


def test_all_meet_and_are_answered(job: Job, many_files: None) -> None:
    """The answers go out once all are there: every node's connection is open by then."""
    host = Host(job.port, job.name, NUMBER)
    deadline = time.monotonic() + 60
    host.open(deadline)
    answers: dict[int, dict[str, Any]] = {}

    def take_part(number: int) -> None:
        who = {"job": job.name, "node": number}
        answers[number] = report_to(
            job.address, job.port, who, lambda: node(number), clock=time.time, reach_s=45,
            answer_s=60,
        )  # fmt: skip

    guests = [threading.Thread(target=take_part, args=(n,)) for n in range(1, NUMBER)]
    for guest in guests:
        guest.start()
    host.wait(NUMBER - 1, deadline)
    met = dict(host.guests)
    host.tell({number: {"you": guest.report["host"]} for number, guest in met.items()})
    for guest in guests:
        guest.join()
    assert answers == {n: {"you": HOSTS[n]} for n in range(1, NUMBER)}


def test_what_all_send_does_not_grow_with_their_number(job: Job) -> None:
    assert len(job.name) < 100
    others = (*HOSTS[:-1], "another")
    assert Job(**{**vars(job), "hosts": others}).name != job.name


def test_each_is_told_of_some_others_and_not_of_itself() -> None:
    nodes = [Node(**node(n, MISSING if n else None)) for n in range(NUMBER)]
    assert judge(nodes, {}, 20.0) == list(HOSTS[1:])
    unfit = named_of(nodes)
    for one in (nodes[0], nodes[1], nodes[500]):
        others = answer_of(one, unfit)["others"]
        assert len(others) == 8 and not any(o.startswith(f"{one.host}: ") for o in others)


def test_what_all_have_is_the_fault_of_none() -> None:
    nodes = [Node(**node(n, MISSING)) for n in range(NUMBER)]
    assert judge(nodes, {}, 20.0) == []
