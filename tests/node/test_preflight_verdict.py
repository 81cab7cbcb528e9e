"""Preflight: which nodes a job should avoid, given what is wrong with each."""

from __future__ import annotations

import pytest

from trnslurm.node.preflight.verdict import NodeReport, judge

HOSTS = ("node-1", "node-2", "node-3")


def nodes(**problems: str) -> list[NodeReport]:
    """Three nodes, some with a problem of a check."""
    made = [NodeReport(node=n, host=host) for n, host in enumerate(HOSTS)]
    for word, check in problems.items():
        made[int(word[1:])].problems[check] = "x"
    return made


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        ({}, []),
        ({"n1": "devices"}, ["node-2"]),
        ({"n1": "dataset"}, ["node-2"]),
        ({"n0": "dataset", "n1": "dataset", "n2": "dataset"}, []),
        ({"n0": "devices", "n1": "devices", "n2": "devices"}, []),
        ({"n0": "master port"}, []),
        ({"n0": "memory", "n2": "EFA"}, ["node-1", "node-3"]),
    ],
)
def test_who_is_to_blame(found: dict[str, str], bad: list[str]) -> None:
    assert judge(nodes(**found), {}, 20) == bad


def test_alone_a_node_is_to_blame_for_its_own_problems() -> None:
    assert judge([NodeReport(node=0, host="a", problems={"devices": "x"})], {}, 20) == ["a"]
    assert judge([NodeReport(node=0, host="a", problems={"dataset": "x"})], {}, 20) == []


def test_if_nobody_reaches_node_0_it_is_node_0() -> None:
    three = nodes()
    three[1].heard = three[2].heard = False
    assert judge(three, {1: "cannot reach it"}, 20) == ["node-1"]
    assert three[1].problems["report"].startswith("cannot reach it; look")
