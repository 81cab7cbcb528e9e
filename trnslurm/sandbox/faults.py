"""Injects faults into a sandbox and removes them; nothing outside it changes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from trnslurm.errors import SandboxError, did_you_mean
from trnslurm.sandbox import neuron
from trnslurm.sandbox.control import ask
from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.settings import settings_of

NODE_ACTIONS: Mapping[str, str] = {
    "slurmd-kill": "KILL slurmd; the processes it started keep running",
    "slurmd-start": "start slurmd again",
    "freeze": "STOP every process of the node, including slurmd",
    "thaw": "CONT every process of the node",
    "link-down": "pull the network cable",
    "link-up": "plug it back in",
    "reboot": "end every process of the node at once, and restart the node",
    "power-off": "the same, but leave the node off",
    "power-on": "start the node again",
}
OTHER_FAULTS: Mapping[str, str] = {
    "ctld kill|start": "KILL slurmctld, or start it again",
    "dbd kill|start": "the same for slurmdbd (--accounting)",
    "proc NODE PATTERN SIGNAL": "signal the processes whose command line matches",
    "disk DIRECTORY SIZE|off": "mount a small file system on an empty directory",
    "neuron NODE|all TOOL BEHAVIOR": "make a stand-in for a Neuron tool misbehave",
}


def inject(layout: Layout, words: Sequence[str]) -> str:
    """Inject the fault that the words describe; return what was done."""
    match words:
        case ["ctld" | "dbd" as target, action]:
            return _daemon(layout, target, action)
        case ["proc", node, pattern, name]:
            return _signal(layout, node, pattern, name)
        case ["disk", directory, size]:
            return _disk(layout, directory, size)
        case ["neuron", node, tool, behaviour]:
            ask(layout, do="state")  # fails if the sandbox is not running
            if node != neuron.EVERY_NODE:
                _, node = _find_node(layout, node)
            return neuron.behave(layout, node, tool, behaviour)
        case [node, action] if node not in ("proc", "disk", "neuron"):
            return _node(layout, node, action)
    usage = [form for form in OTHER_FAULTS if form.split()[0] == words[0]]
    expected = usage[0] if usage else f"NODE {'|'.join(NODE_ACTIONS)}"
    raise SandboxError(f"fault {' '.join(words)}: expected {expected}")


def _daemon(layout: Layout, target: str, action: str) -> str:
    if action not in ("kill", "start"):
        raise SandboxError(f"fault {target} {action}: expected kill or start")
    return str(ask(layout, do=action, daemon=f"slurm{target}"))


def _node(layout: Layout, node: str, action: str) -> str:
    if action not in NODE_ACTIONS:
        hint = did_you_mean(action, NODE_ACTIONS) or f": {', '.join(NODE_ACTIONS)}"
        raise SandboxError(f"fault {node} {action}: there is no such fault{hint}")
    number, name = _find_node(layout, node)
    return f"{name}: {ask(layout, do=action, node=number)}"


def _signal(layout: Layout, node: str, pattern: str, word: str) -> str:
    """Signal the processes on a node whose command line matches a pattern."""
    number, name = _find_node(layout, node)
    try:
        re.compile(pattern)
    except re.error as error:
        raise SandboxError(f"fault proc: pattern {pattern!r}: {error}") from None
    try:
        signum = (
            signal.Signals(int(word))
            if word.isdecimal()
            else signal.Signals[f"SIG{word.upper().removeprefix('SIG')}"]
        )
    except (KeyError, ValueError):
        raise SandboxError(
            f"fault proc: there is no signal {word!r}: use TERM, KILL, USR1 or similar"
        ) from None
    return f"{name}: {ask(layout, do='signal', node=number, pattern=pattern, signal=signum)}"


def _disk(layout: Layout, directory: str, size: str) -> str:
    path = Path(directory).resolve()
    if size == "off":
        return str(ask(layout, do="disk", directory=str(path), mib=0))
    match = re.fullmatch(r"([1-9]\d{0,5})([MG]?)", size)
    if not match:
        raise SandboxError(f"fault disk: size {size!r}: use a size such as 8M or 1G, or off")
    if not path.is_dir() or path.stat().st_uid != os.getuid() or any(path.iterdir()):
        raise SandboxError(f"fault disk: {path} must be an empty directory that you own")
    mib = int(match[1]) * (1024 if match[2] == "G" else 1)
    return str(ask(layout, do="disk", directory=str(path), mib=mib))


def _find_node(layout: Layout, word: str) -> tuple[int, str]:
    """Return the number and name of a node; raise if unknown or if the sandbox is not running."""
    ask(layout, do="state")
    settings = settings_of(layout)
    number = settings.node_number(word)
    return number, settings.node_names[number - 1]
