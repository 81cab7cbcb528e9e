"""Which nodes a training's job leaves out for a while, as its preflight or watchdog found them bad.

What was found bad, until when and why stands in state/excluded.json. Slurm keeps a list of nodes to
leave out with the job; the batch script replaces it when it requeues the job, and not before: one
that waits already is not let onto a node whose time is over.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

AS_THEY_ARE = "-"
_FILE = Path("state/excluded.json")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def update(
    attempt: int, hosts: Sequence[str], excluded: Sequence[str], *, hours: float, now: float
) -> tuple[str, str]:
    """Write down which nodes the attempt found bad; return the nodes to leave out, and its trouble.

    `excluded` is what the job leaves out already, the user's own choice included.
    """
    bad = bad_nodes(attempt, hosts)
    trouble = "; ".join(f"{host}: {why}" for host, why in bad.items()) or unfit(attempt)
    if hours <= 0 or (len(hosts) > 1 and len(bad) == len(hosts)):
        bad = {}  # what is wrong with all of them is not theirs
    before = read_excluded()
    after = {host: entry for host, entry in before.items() if float(entry["until"]) > now}
    after |= {host: {"until": now + hours * 3600, "why": why} for host, why in bad.items()}
    if after != before:
        write_json(_FILE, {"nodes": after})
    return to_leave_out(excluded, before, after), trouble


def to_leave_out(excluded: Iterable[str], before: Iterable[str], after: Iterable[str]) -> str:
    """Return the nodes to leave out, less those that we had put there and whose time is over."""
    own = set(excluded) - set(before)
    return AS_THEY_ARE if own | set(after) == set(excluded) else ",".join(sorted(own | set(after)))


def bad_nodes(attempt: int, hosts: Sequence[str]) -> dict[str, str]:
    """Return the nodes of an attempt that are bad, by Slurm's names, each with the reason."""
    files = [Path(f"state/preflight-train-{attempt}.json")]
    if not files[0].exists():  # the first node did not get to it
        files = sorted(Path("state").glob(f"preflight-train-{attempt}-node*.json"))
    bad: dict[str, str] = {}
    for file in files:
        bad |= _preflight(read_json(file), hosts)
    stuck = read_json(Path(f"state/stuck-train-{attempt}.json"))
    if stuck and (host := _slurms_name(stuck, hosts)):
        bad.setdefault(host, str(stuck.get("line", "stuck")))
    return bad


def unfit(attempt: int) -> str:
    """Return the first problem that a preflight found, though no node is to blame; or nothing."""
    for node in read_json(Path(f"state/preflight-train-{attempt}.json")).get("nodes", ()):
        for problem in node.get("problems", ()):
            return f"{node.get('host', 'a node')}: preflight failed; {problem}"
    return ""


def _preflight(report: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, str]:
    named = set(report.get("bad", ()))
    found = {}
    for node in report.get("nodes", ()):
        if node.get("host") in named and (host := _slurms_name(node, hosts)):
            found[host] = "; ".join(["preflight failed", *node.get("problems", ())[:1]])
    return found


def _slurms_name(node: Mapping[str, Any], hosts: Sequence[str]) -> str:
    """Return what Slurm calls a node; a host's own name may be another."""
    number = node.get("node")
    if isinstance(number, int) and 0 <= number < len(hosts):
        return hosts[number]
    return str(node["host"]) if node.get("host") in hosts else ""


def read_excluded() -> dict[str, dict[str, Any]]:
    """Return the nodes left out, with `until` and `why`."""
    nodes = read_json(_FILE).get("nodes", {})
    return {host: entry for host, entry in nodes.items() if _HOST.fullmatch(host)}


def read_json(file: Path) -> Mapping[str, Any]:
    """Return an object that another wrote; a missing or damaged one is empty."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Replace a file whole."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)
