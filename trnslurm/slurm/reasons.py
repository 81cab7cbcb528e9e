"""Explains Slurm's and ParallelCluster's reasons in plain words."""

from __future__ import annotations

import re

_JOB = {
    "Resources": "waiting for free nodes",
    "Priority": "waiting for jobs of higher priority",
    "BeginTime": "its requested start time is in the future",
    "Cleaning": "its last attempt is still being cleaned up",
    "Dependency": "waiting for another job",
    "DependencyNeverSatisfied": "the job that it waits for failed, so it will never start",
    "JobArrayTaskLimit": "waiting for the end of another run of the sweep",
    "JobHeldUser": "held by its owner: `scontrol release` frees it",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held: it was requeued too often",
    "JobLaunchFailure": "Slurm could not launch it",
    "BadConstraints": "too few nodes satisfy its constraints",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "Licenses": "waiting for a license",
    "Nodes required for job are DOWN": "the nodes it needs are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "FrontEndDown": "no front-end node is up",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "Prolog": "its prolog is running",
    "QOSNotAllowed": "its QOS is not allowed in this partition",
    "ReqNodeNotAvail": "the nodes it needs are down, drained or reserved",
    "Reservation": "waiting for its reservation to begin",
    "ReservationDeleted": "its reservation was deleted",
    "TimeLimit": "its time limit was reached",
    "QOSMaxNodePerUserLimit": "your node limit in this QOS is reached",
    "AssocGrpNodeLimit": "your group's node limit is reached",
    "AssocGrpBillingMinutes": "your group's budget is used up",
    "MaxJobsPerAccount": "your account's job limit is reached",
}
# What one job may have or must have, whatever others have (src/common/job_state_reason.c).
_OF_ONE_JOB = r"(Assoc|QOS)(Max\w+Per(Job|Node)(Limit)?|Min\w+)"
_LIMIT = r"(Assoc|QOS|Max)(Grp|Max|Min|Jobs)?\w+"
_CODE = r"\(Code:(\w+)\)"

# What ParallelCluster writes into a node's reason: AWS's error codes.
_CAPACITY = (
    "AWS has no capacity for its instance type now; ParallelCluster tries again in 10 minutes"
)
_CODES = {
    "InsufficientInstanceCapacity": _CAPACITY,
    "InsufficientHostCapacity": _CAPACITY,
    "InsufficientCapacity": _CAPACITY,
    "InsufficientCapacityOnOutpost": _CAPACITY,
    "LimitedInstanceCapacity": "AWS had too few instances for the job, so it started none",
    "InsufficientReservedInstanceCapacity": "its capacity reservation has no instances left",
    "SpotMaxPriceTooLow": "the spot price exceeds the limit of its compute resource",
    "MaxSpotInstanceCountExceeded": "the account's spot instance limit is reached",
    "VcpuLimitExceeded": "the account's vCPU quota is used up: ask AWS for more",
    "InstanceLimitExceeded": "the account's instance quota is used up: ask AWS for more",
    "InsufficientFreeAddressesInSubnet": "its subnet has no free addresses",
    "UnauthorizedOperation": "the head node is not allowed to start instances: see its IAM role",
    "Unsupported": "its Availability Zone does not offer the instance type",
    "UnsupportedOperation": "AWS refuses the launch: see slurm_resume.log on the head node",
}

# HyperPod acts on exactly these reasons and ignores all others; its documents give the times
# (awslabs/awsome-distributed-ai, 5.sagemaker-hyperpod/tools/devops-agent/docs).
_ACTIONS = {
    "Action:Reboot": "HyperPod reboots it, which takes 1 to 3 minutes",
    "Action:Replace": "HyperPod replaces its instance, which takes 20 to 30 minutes",
}
_ACTION = re.compile(r"\W*action\W*(reboot|replace)\W*", re.IGNORECASE)

UNUSABLE = ("down", "drained")
"""The states of nodes that start no jobs until an administrator acts."""
# The first of these flags of a node decides; without one, its base state does.
_FLAGS = {
    "DRAIN": "drained",
    "FAIL": "down",
    "INVALID_REG": "down",
    "NOT_RESPONDING": "down",
    "POWERING_UP": "booting",
    "POWERING_DOWN": "powering down",
    "POWER_DOWN": "powering down",
    "MAINTENANCE": "reserved",
    "RESERVED": "reserved",
}
_STATES = {
    "DOWN": "down",
    "ERROR": "down",
    "FUTURE": "down",
    "DRAINED": "drained",
    "DRAINING": "drained",
    "ALLOCATED": "in use",
    "MIXED": "in use",
    "COMPLETING": "in use",
    "IDLE": "idle",
}

LACKS_NODES = ("down, drained or reserved", "is down", "too few nodes")
"""Parts of the reasons of a job that is waiting for nodes that it may never get."""


def job_reason(reason: str) -> str:
    """Return why a job is not running, in plain words or else in Slurm's."""
    plain = reason.strip("()")
    if plain in ("None", ""):
        return ""
    key = plain.split(",")[0].split(":")[0].strip()
    if words := _JOB.get(key):
        return words
    if re.fullmatch(_OF_ONE_JOB, key):
        return f"its account or QOS allows no jobs of this size, so it never starts ({key})"
    if re.fullmatch(_LIMIT, key):
        return f"a limit of its account or QOS is reached ({key})"
    return plain


def node_reason(reason: str) -> str:
    """Return why a node is down, with AWS's error code or HyperPod's action, if there is one."""
    if wanted := _ACTION.fullmatch(reason):
        exact = f"Action:{wanted[1].capitalize()}"
        if words := _ACTIONS.get(reason):
            return f"{words} ({reason})"
        return f"HyperPod ignores the reason {reason!r}: it must be exactly {exact}"
    match = re.search(_CODE, reason)
    if match is None:
        return reason
    words = _CODES.get(match[1], "AWS did not start its instance")
    return f"{words} ({match[1]})"


def node_state(state: str) -> str:
    """Return a node's state, such as `IDLE+CLOUD+POWERED_DOWN`, in plain words."""
    base, *flags = re.sub(r"[*#~%$@!^-]", "", state).split("+")
    for flag, words in _FLAGS.items():
        if flag in flags:
            return words
    if base == "IDLE" and "POWERED_DOWN" in flags:
        return "off until a job needs it"
    return _STATES.get(base, base.lower())
