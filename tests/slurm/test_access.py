"""Which account and QOS a job takes, of those that the user has."""

from __future__ import annotations

import pytest

from trnslurm.slurm.access import Access, Association, Grant, Limits, grant, limits_of

NODE = Limits(nodes=1, cpus=64, gpus=4)
LARGE = Limits(nodes=1025)
DAY, LONG = ((Limits(), Limits(minutes=m), Limits()) for m in (1440, 10080))


def access(*qos: str, default: str = "", **fields: object) -> Access:
    """What accounting grants to a user of one account."""
    own = Association(account="lab", partition="", qos=qos, default_qos=default, limits=())
    return Access(default_account="lab", associations=(own,), known=True, enforced=True, **fields)


def granted(access: Access, **partition: str) -> Grant:
    return grant(access, {"PartitionName": "gpu", **partition}, NODE)


@pytest.mark.parametrize(
    ("having", "allowed", "expected"),
    [
        # Slurm takes these by itself.
        (access("gpu"), "gpu", None),
        (access("big", "gpu", default="gpu"), "ALL", None),
        (access("big", "normal"), "ALL", None),
        # It refuses a job without one here, also if the first of the list would be right.
        (access("gpu", "high", "standard"), "gpu,high", "gpu"),
        (access("high", "standard"), "ALL", "high"),
        # The site's own rules may set it where every QOS is allowed.
        (access("high", "standard", has_rules=True), "ALL", None),
        (access("high", "standard", has_rules=True), "high,standard", "high"),
        # For the fewest nodes, of the partition's name, for the longest time.
        (access("big", "day", "gpu", least={"big": LARGE}), "ALL", "gpu"),
        (access("big", "day", least={"big": LARGE}), "ALL", "day"),
        (access("day", "long", qos={"day": DAY, "long": LONG}), "ALL", "long"),
    ],
)
def test_a_qos_is_named_unless_slurm_takes_it_anyway(
    having: Access, allowed: str, expected: str | None
) -> None:
    found = granted(having, AllowQos=allowed)
    assert (found.qos, found.fewest_nodes, found.refused) == (expected, 1, "")


def test_why_a_qos_is_named() -> None:
    found = granted(access("big", "gpu", "short"), AllowQos="gpu,short")
    assert found.why_qos == "you have no default QOS; your other QOS here: short"


def test_a_job_without_a_qos_is_not_limited_by_any_of_many() -> None:
    having = access("big", "day", qos={"big": (LARGE,)})
    assert limits_of(having, {"PartitionName": "gpu"}, "", "") == (Limits(), "")
    assert limits_of(having, {"PartitionName": "gpu"}, "", "big") == (LARGE, "QOS big")
