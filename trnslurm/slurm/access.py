"""Reads which accounts and QOS a user has and what they limit, if Slurm has accounting."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from itertools import zip_longest
from typing import TypeAlias

from trnslurm.frozen import Frozen
from trnslurm.slurm.snapshot import Snapshot, limits_jobs

_GIB = {"": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}


class Limits(Frozen):
    """How much one job can have. None means no limit."""

    nodes: int | None = None
    cpus: int | None = None
    gpus: int | None = None
    memory_mib: int | None = None
    minutes: int | None = None

    def least(self, other: Limits) -> Limits:
        """Return the stricter of both limits for each resource."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _NAMES}
        known = {name: [n for n in pair if n is not None] for name, pair in pairs.items()}
        return Limits(**{name: min(each) for name, each in known.items() if each})

    def below(self, need: Limits) -> dict[str, int]:
        """Return the limits that are lower than what a job needs."""
        pairs = {name: (getattr(self, name), getattr(need, name)) for name in _NAMES}
        return {
            name: most
            for name, (most, needed) in pairs.items()
            if most is not None and needed is not None and most < needed
        }

    def or_else(self, other: Limits) -> Limits:
        """Return these limits, with the other's limits for resources that these do not limit."""
        own = {name: getattr(self, name) for name in _NAMES}
        return Limits(**{n: v if v is not None else getattr(other, n) for n, v in own.items()})


_NAMES = ("nodes", "cpus", "gpus", "memory_mib", "minutes")
Kinds: TypeAlias = tuple[Limits, ...]
"""What an account or a QOS allows to a group, to a job and to a user."""


class Association(Frozen):
    """One of the user's accounts, in one partition or in all."""

    account: str
    partition: str
    """Empty if it applies to all partitions."""
    qos: tuple[str, ...]
    default_qos: str
    limits: Kinds


class Access(Frozen):
    """What accounting grants to the user."""

    default_account: str = ""
    associations: tuple[Association, ...] = ()
    qos: Mapping[str, Kinds] = field(default_factory=dict)
    least: Mapping[str, Limits] = field(default_factory=dict)
    """The minimum of each resource that a job with the QOS must have."""
    enforced: bool = False
    """Whether a job needs an association."""
    known: bool = False
    """Whether sacctmgr answered."""
    off: bool = False
    """Whether Slurm has no accounting, and so does not know any account."""
    has_rules: bool = False
    """Whether the site has custom job rules (job_submit.lua), which may set the QOS."""


class Grant(Frozen):
    """The account and QOS for a partition."""

    account: str | None = None
    """None if the user's default is right."""
    qos: str | None = None
    """None if the QOS that Slurm uses by default is right."""
    why_qos: str = ""
    limits: Limits = Limits()
    fewest_nodes: int = 1
    """The minimum number of nodes set by the job's QOS and the partition's QOS."""
    limited_by: str = ""
    """The QOS and the account that limit a job."""
    refused: str = ""
    """Why the user cannot use the partition; empty if they can."""
    questions: tuple[str, ...] = ()
    """Keys that the user must find out, with what Slurm said."""


def read_access(seen: Snapshot) -> Access:
    """Return the user's accounts and every QOS, as far as accounting reports them."""
    enforce = seen.config.get("AccountingStorageEnforce", "").lower()
    enforced = any(word in enforce for word in ("associations", "limits", "qos", "wckeys", "safe"))
    limited = limits_jobs(seen.config)
    if "slurmdbd" not in seen.config.get("AccountingStorageType", ""):
        return Access(off=True)
    if (ours := seen.associations) is None:
        return Access(enforced=enforced)
    return Access(
        default_account=ours[0][0] if ours else "",
        associations=tuple(
            Association(
                account=account,
                partition=partition,
                qos=tuple(filter(None, names.split(","))),
                default_qos=default,
                limits=_kinds(tres, wall) if limited else (),
            )
            for _, _, account, partition, names, default, *tres, wall in ours
        ),
        qos={n: _kinds(tres, wall) if limited else () for n, *tres, wall, _ in seen.qos},
        least={row[0]: _limits([row[-1]], "") if limited else Limits() for row in seen.qos},
        enforced=enforced,
        known=True,
        has_rules=seen.config.get("JobSubmitPlugins", "(null)") != "(null)",
    )


def grant(access: Access, partition: Mapping[str, str], node: Limits) -> Grant:
    """Return the account and QOS with which this user gets nodes of a partition.

    `node` is what a job needs for one node. The user's defaults are preferred.
    """
    accounts = _allowed(partition, "Accounts")
    qos = _allowed(partition, "Qos")
    if access.off and accounts is not None:  # every job stays pending, whatever --account is
        return Grant(refused=f"it allows only accounts {','.join(accounts)}, but accounting is off")
    if not access.known:
        named = {"account": accounts, "qos": qos}
        return Grant(
            questions=tuple(
                f"{key}|Allow{key.title() if key == 'qos' else 'Accounts'}={','.join(names)}"
                for key, names in named.items()
                if names is not None
            )
        )
    if not access.associations:
        return Grant(refused="you have no account here" if access.enforced else "")
    name = partition["PartitionName"]
    found = [a for a in access.associations if a.partition in ("", name)]
    found.sort(key=lambda a: (a.account != access.default_account, a.partition == ""))
    usable = [
        a for a in found if _is_allowed(a.account, accounts, partition.get("DenyAccounts", ""))
    ]
    if not usable:
        mine = ", ".join(sorted({a.account for a in access.associations}))
        if found and accounts is not None:
            # According to slurm.conf(5) of 24.11, not of 22.05, the list includes subaccounts.
            says = (
                f"AllowAccounts={','.join(accounts)}, but you have {mine}; newer versions of "
                "Slurm also"
            )
            return Grant(questions=(f"account|{says} allow subaccounts",))
        return Grant(refused=f"it accepts none of your accounts: {mine}")
    choices = [
        (association, word, *_in_force(access, partition, association, word))
        for association in usable
        for word in _words_for(access, association, qos)
        if _is_allowed(word, qos, partition.get("DenyQos", ""))
    ]
    if not choices:
        mine = ", ".join(sorted({word for a in usable for word in a.qos}))
        return Grant(refused=f"it allows QOS {','.join(qos or ())}, but you have {mine or 'none'}")
    of_partition = access.least.get(partition.get("QoS", ""), Limits())
    fewest = {
        word: _nodes_for(node, of_partition, access.least.get(word, Limits()))
        for _, word, *_ in choices
    }
    if not any(fewest.values()):
        return Grant(refused="its QOS requires more of a job than its nodes have (MinTRES)")
    choices = [choice for choice in choices if fewest[choice[1]]]
    taken = min(choices, key=lambda c: (bool(c[2].below(node)), *_order(c, usable, fewest, name)))
    association, word, limits, limited_by = taken
    implied = implied_qos(association)
    others = [qos for of, qos, *_ in choices if of is association and qos != word]
    why = "your default QOS does not allow a job on whole nodes here"
    if not implied:
        why = f"you have no default QOS; your other QOS here: {', '.join(others) or 'none'}"
    denied = partition.get("DenyAccounts", "").replace("(null)", "")
    says = f"partition|DenyAccounts={denied}; newer versions of Slurm also deny subaccounts"
    return Grant(
        account=association.account if association.account != access.default_account else None,
        qos=word if word != implied else None,
        why_qos=why,
        limits=limits,
        fewest_nodes=fewest[word],
        limited_by=limited_by,
        questions=(says,) if denied and accounts is None else (),
    )


def _words_for(
    access: Access, association: Association, allowed: Sequence[str] | None
) -> Sequence[str]:
    """Return the QOS to choose from; an empty string means that no QOS is named."""
    left_to_site = access.has_rules and allowed is None and not implied_qos(association)
    return association.qos if association.qos and not left_to_site else ("",)


def _order(
    choice: tuple[Association, str, Limits, str],
    usable: Sequence[Association],
    fewest: Mapping[str, int],
    partition: str,
) -> tuple[int | float, ...]:
    """Return a sort key for an account and QOS among those that allow the same.

    The order prefers the user's defaults, then the QOS with the smallest minimum of nodes, then a
    QOS with the partition's name, then the longest time.
    """
    association, word, limits, _ = choice
    return (
        usable.index(association),
        word != implied_qos(association),
        fewest[word],
        word.lower() != partition.lower(),
        -(limits.minutes or math.inf),
    )


def limits_of(
    access: Access, partition: Mapping[str, str], account: str, qos: str
) -> tuple[Limits, str]:
    """Return the limits on a job with this account and QOS in a partition, and what sets them.

    An empty account or QOS means the user's default.
    """
    places = ("", partition["PartitionName"])
    found = [
        association
        for association in access.associations
        if association.account == (account or access.default_account)
        and association.partition in places
    ]
    if not found:
        return Limits(), ""
    association = max(found, key=lambda a: a.partition)
    word = qos or implied_qos(association)
    return _in_force(access, partition, association, word)


def _in_force(
    access: Access, partition: Mapping[str, str], association: Association, qos: str
) -> tuple[Limits, str]:
    """Return the limits on a job, and the names of what sets them.

    For each kind of limit, the first one counts: that of the partition's QOS, then of the job's
    QOS, then of the association (https://slurm.schedmd.com/resource_limits.html#hierarchy).
    """
    above = partition.get("QoS", "")
    points = {f"QOS {word}": access.qos.get(word, ()) for word in (above, qos)}
    points[f"account {association.account}"] = association.limits
    limits = Limits()
    for kinds in zip_longest(*points.values(), fillvalue=Limits()):
        limits = limits.least(functools.reduce(Limits.or_else, kinds))
    set_by = [name for name, kinds in points.items() if any(kind != Limits() for kind in kinds)]
    return limits, " and ".join(set_by)


def implied_qos(association: Association) -> str:
    """Return the QOS of a job that names none; empty if Slurm refuses it or there are no QOS.

    Slurm uses the default, or the only QOS, or `normal`, in this order:
    src/slurmctld/acct_policy.c.
    """
    if association.default_qos or len(association.qos) == 1:
        return association.default_qos or association.qos[0]
    return "normal" if "normal" in association.qos else ""


def _allowed(partition: Mapping[str, str], what: str) -> list[str] | None:
    names = partition.get(f"Allow{what}", "ALL")
    return None if names in ("ALL", "", "(null)") else names.split(",")


def _is_allowed(name: str, allowed: Iterable[str] | None, denied: str) -> bool:
    # According to slurm.conf(5), a list of allowed names overrides the list of denied names.
    return name in allowed if allowed is not None else name not in filter(None, denied.split(","))


def _nodes_for(node: Limits, *least: Limits) -> int:
    """Return the smallest number of nodes with what a job must have, or 0 if none suffices."""
    found = 1
    for needs in least:
        for name in _NAMES[:4]:
            need, each = getattr(needs, name), getattr(node, name)
            if not need or each is None:
                continue
            if each == 0:
                return 0
            found = max(found, -(-need // each))
    return found


def _kinds(tres: Sequence[str], wall: str) -> Kinds:
    """Return the limits of a group, of a job (including its time), and of a user."""
    return tuple(_limits([each], wall if at == 1 else "") for at, each in enumerate(tres))


def _limits(tres: Iterable[str], wall: str) -> Limits:
    found = Limits(minutes=minutes(wall))
    for text in tres:
        counts = dict(re.findall(r"([\w/]+)=(\d+[MGTP]?)", text))
        gpus = counts.get("gres/gpu")
        found = found.least(
            Limits(
                nodes=_number(counts.get("node")),
                cpus=_number(counts.get("cpu")),
                gpus=_number(gpus),
                memory_mib=mebibytes(counts.get("mem", "")),
            )
        )
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def mebibytes(text: str) -> int | None:
    """Return a size as Slurm prints it, such as 750G, in MiB, or None if it is not a size."""
    match = re.fullmatch(r"(\d+)([MGTP]?)", text)
    return int(match[1]) * _GIB[match[2]] if match else None


def minutes(text: str) -> int | None:
    """Return a time limit as Slurm prints it, in minutes, or None if there is no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, mins, _ = (int(g or 0) for g in match.groups())
    return (days * 24 + hours) * 60 + mins
