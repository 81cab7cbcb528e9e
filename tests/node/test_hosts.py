"""Lists of hosts for people, and what a job of 1,000 nodes says of them."""

import pytest

from trnslurm.node import left_out
from trnslurm.node.hosts import brief

THOUSAND = [f"compute-dy-trn1-{n}" for n in range(1, 1001)]


@pytest.mark.parametrize(
    ("hosts", "shown"),
    [
        ([], ""),
        (["b-2", "a"], "b-2,a"),
        (THOUSAND[:8], ",".join(THOUSAND[:8])),
        (THOUSAND[:9], "compute-dy-trn1-[1-9]"),
        (THOUSAND, "compute-dy-trn1-[1-1000]"),
        ([*THOUSAND[:6], *THOUSAND[7:12]], "compute-dy-trn1-[1-6,8-12]"),
        ([f"n{n:03}" for n in range(95, 105)], "n[095-104]"),
        ([*(f"a{n}" for n in range(9)), "b3", "head"], "a[0-8],b3,head"),
        ([*(f"a{n}" for n in range(9)), "a12", "10.0.0.7"], "a[0-8,12],10.0.0.7"),
    ],
)
def test_brief(hosts: list[str], shown: str) -> None:
    assert brief(hosts) == shown


def test_trouble_names_some_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand nodes with one problem each are no reason of a thousand lines."""
    bad = dict.fromkeys(THOUSAND[1:], "preflight failed; no space left")
    monkeypatch.setattr(left_out, "bad_nodes", lambda attempt, hosts: bad)
    trouble = left_out.trouble(1, THOUSAND)
    one = "compute-dy-trn1-{}: preflight failed; no space left"
    assert trouble == "; ".join([*map(one.format, (2, 3, 4)), "and 996 more"])
